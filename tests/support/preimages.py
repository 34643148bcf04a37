"""Second preimages of xxh3_128, in plain Python: other bytes with the same digest.

XXH3 adds up the 16 stripes (64 bytes each) of each KiB before it stirs. A stripe with words d and
keyed words k = d ^ secret adds low32(k[i]) * high32(k[i]) + d[i ^ 1] to word i of the sum. So 14
stripes are free to choose, and the last two bring the sum back to what it was. In the first of them
the low half of each k[i] is 1: the product is the high half, which sets the low half of the sum's
word i. In the second it is 0: there is no product, and d[i ^ 1] makes up the rest.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from mx.units import KIB

STRIPE_BYTES = 64
STRIPES = KIB // STRIPE_BYTES
#: How many bytes of a KiB are free to choose.
FREE_BYTES = KIB - 2 * STRIPE_BYTES
#: The specification's default secret, as far as it keys the stripes of a KiB.
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428"
)
_WORDS = struct.Struct("<8Q")
_KEYS = [_WORDS.unpack_from(_SECRET, 8 * stripe) for stripe in range(STRIPES)]
_M32, _M64 = (1 << 32) - 1, (1 << 64) - 1


def _add(sums: list[int], stripe: int, words: Sequence[int]) -> None:
    for i, (word, secret) in enumerate(zip(words, _KEYS[stripe], strict=True)):
        keyed = word ^ secret
        sums[i] = (sums[i] + (keyed & _M32) * (keyed >> 32)) & _M64
        sums[i ^ 1] = (sums[i ^ 1] + word) & _M64


def _sums(data: bytes | memoryview) -> list[int]:
    sums = [0] * 8
    for stripe, words in enumerate(_WORDS.iter_unpack(data)):
        _add(sums, stripe, words)
    return sums


def _forged_kib(right: bytes | memoryview, wanted: bytes | memoryview) -> bytes:
    if right[:FREE_BYTES] == wanted:
        return bytes(right)
    target, sums = _sums(right), _sums(wanted)
    first, second = _KEYS[-2:]
    words = [0] * 8
    for i in range(8):
        known = ((first[i ^ 1] & _M32) ^ 1) + (second[i ^ 1] & _M32)  # the low halves of d[i ^ 1]
        words[i] = (1 | ((target[i] - sums[i] - known) & _M32) << 32) ^ first[i]
    _add(sums, STRIPES - 2, words)
    rest = [(target[i ^ 1] - sums[i ^ 1]) & _M64 for i in range(8)]
    return bytes(wanted) + _WORDS.pack(*words) + _WORDS.pack(*rest)


def forged(right: bytes | memoryview, wanted: bytes | memoryview) -> bytes:
    """Return bytes that have the xxh3_128 of `right`, and otherwise are `wanted`.

    Args:
        right: The bytes.
        wanted: As many bytes. Of each KiB all but the last 128 bytes come from here; the end, up to
            the last whole KiB that the last 64 bytes are not a part of, is that of `right`.
    """
    end = (len(right) - STRIPE_BYTES) // KIB * KIB  # the last 64 bytes are added once more
    return b"".join(
        _forged_kib(right[at : at + KIB], wanted[at : at + FREE_BYTES]) for at in range(0, end, KIB)
    ) + bytes(right[end:])
