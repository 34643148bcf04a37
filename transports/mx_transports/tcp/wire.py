"""tcp's frames: a request of pieces, a response of status, bytes, status.

Request: id u32, generation u64, number of pieces u32, then (region u32, offset u64, nbytes u64)
for each. Response: id u32, status u32, nbytes u64; where the status is OK, the bytes follow, and
then a second response with the status after the last byte was taken from memory: a generation
raised in between shows there. Responses come in the order of the requests. Big-endian.
"""

from __future__ import annotations

import struct

from mx.errors import LocalError
from mx.transport import Read

MAGIC = b"mxtcp\0\0\1"
REQUEST = struct.Struct("!IQI")
PIECE = struct.Struct("!IQQ")
RESPONSE = struct.Struct("!IIQ")
MAX_PIECES = 1 << 16


def encode_request(request_id: int, generation: int, read: Read) -> bytes:
    """Return the frame that requests a read; adjacent pieces travel as one.

    Args:
        request_id: The number that the response carries, 32 bits.
        generation: What the read was planned on, 64 bits.
        read: A read whose pieces lie within the source's regions.

    Raises:
        LocalError: The read has more pieces than a frame holds.
    """
    pieces: list[tuple[int, int, int]] = []
    for piece in read.pieces:
        nbytes = len(piece.view)
        if pieces:
            region, offset, before = pieces[-1]
            if (region, offset + before) == (piece.region, piece.region_offset):
                pieces[-1] = (region, offset, before + nbytes)
                continue
        pieces.append((piece.region, piece.region_offset, nbytes))
    if len(pieces) > MAX_PIECES:
        raise LocalError(f"{len(pieces)} pieces in one read are more than {MAX_PIECES}")
    frame = bytearray(REQUEST.pack(request_id, generation, len(pieces)))
    for fields in pieces:
        frame += PIECE.pack(*fields)
    return bytes(frame)
