"""Sizes and constants of xxh3_128 on a device, for the kernels that use them.

From the XXH3 specification (github.com/Cyan4973/xxHash, doc/xxhash_spec.md).
"""

from __future__ import annotations

import struct

UNIT_BYTES = 1024
#: Units in the longest input, 1 MiB; the rows of `sums`.
MAX_UNITS = 1024
#: Units that one program of `unit_sums` processes.
PROGRAM_UNITS = 64

#: The specification's default secret.
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
PRIME32_1, PRIME32_2, PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
PRIME64_1, PRIME64_2, PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
PRIME64_4, PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5


def _words(start: int, count: int) -> tuple[int, ...]:
    return struct.unpack_from(f"<{count}Q", SECRET, start)


#: The kernels' lookup table, as 64-bit words. Places in the secret are the specification's: stripe
#: n of a unit is keyed from byte 8n, the scramble from 128, the last stripe from 121, the low half
#: of the digest from 11, the high half from 117.
TABLE = (
    *_words(0, 24),
    *_words(121, 8),
    *_words(11, 8),
    *_words(117, 8),
    *(PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3),
    *(PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1),
)
