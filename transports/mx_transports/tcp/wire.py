"""tcp's frames: a request of pieces, a response of status, bytes, status.

Request: id u32, generation u64, number of pieces u32, then the pieces (see
`mx_transports.toolkit.pieces`). Response: id u32, status u32, nbytes u64; where the status is OK,
the bytes follow, and then a second response with the status after the last byte was taken from
memory: a generation raised in between shows there. Responses come in the order of the requests.
Big-endian.
"""

from __future__ import annotations

import struct

MAGIC = b"mxtcp\0\0\1"
REQUEST = struct.Struct("!IQI")
RESPONSE = struct.Struct("!IIQ")
