"""tcp's frames: a request of pieces, a response of status, bytes, status.

Request: id u32, generation u64, number of pieces u32, then the pieces (see
`mx_transports.toolkit.pieces`). Response: id u32, status u32, nbytes u64; where the status is OK,
the bytes follow, and then a second response with the status after the last byte was taken from
memory: a generation raised in between shows there. Responses come in the order of the requests.
Big-endian.
"""

from __future__ import annotations

import struct

from mx.transport import Read
from mx_transports.toolkit.pieces import PIECE, encode_pieces

MAGIC = b"mxtcp\0\0\1"
REQUEST = struct.Struct("!IQI")
RESPONSE = struct.Struct("!IIQ")


def encode_request(request_id: int, generation: int, read: Read) -> bytes:
    """Return the frame that requests a read; adjacent pieces travel as one.

    Args:
        request_id: The number that the response carries, 32 bits.
        generation: What the read was planned on, 64 bits.
        read: A read whose pieces lie within the source's regions.

    Raises:
        LocalError: The read has more pieces than a frame holds.
    """
    table = encode_pieces((each.region, each.region_offset, len(each.view)) for each in read.pieces)
    return REQUEST.pack(request_id, generation, len(table) // PIECE.size) + table
