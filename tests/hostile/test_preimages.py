"""The forgeries that the attacks use are real ones."""

from __future__ import annotations

import random

import pytest
from blake3 import blake3
from xxhash import xxh3_128_digest

from mx.units import KIB, MIB
from tests.support.preimages import FREE_BYTES, forged


@pytest.mark.parametrize("nbytes", [KIB + 64, 2 * KIB, 2 * KIB + 1, MIB - 1, MIB])
def test_forged_bytes_have_the_same_xxh3_and_are_others(nbytes: int) -> None:
    chosen = random.Random(nbytes)
    right, wanted = chosen.randbytes(nbytes), chosen.randbytes(nbytes)
    made = forged(right, wanted)
    assert len(made) == nbytes
    assert made[:FREE_BYTES] == wanted[:FREE_BYTES] != right[:FREE_BYTES]
    assert xxh3_128_digest(made) == xxh3_128_digest(right)
    assert blake3(made).digest() != blake3(right).digest()
