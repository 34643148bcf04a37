"""What the processes that lie have in common."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from mx.source.doubts import Doubts
from mx.units import KIB, MIB
from tests.support.preimages import forged


def lie(honest: object, name: str, other: object) -> None:
    """Put something else in the place of an attribute of mx."""
    setattr(honest, name, other)


def insist() -> None:
    """Answer readers that ask, whatever the chunk, that it is right in memory."""

    def add(self: Doubts, *question: Any) -> None:
        question[-1]()

    lie(Doubts, "add", add)


def change(block: memoryview, how: str, chosen: random.Random) -> None:
    """Change each byte of a block ("others"), or some, but not its xxh3_128 ("forged"). The latter
    leaves short blocks as they are."""
    if how == "others":
        found = np.frombuffer(block, dtype=np.uint8)
        np.bitwise_xor(found, 0x5A, out=found)
    elif len(block) == MIB:
        right = bytes(block)
        block[:] = forged(right, chosen.randbytes(16 * KIB) + right[16 * KIB :])
