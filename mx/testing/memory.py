"""Memory for tests of transports: known bytes in a sealed memfd or in anonymous pages."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
from enum import Enum

import numpy as np

from mx.transport import ExposedRegion
from mx.units import MIB

_F_ADD_SEALS = 1033
_SEALS = 0x2 | 0x4 | 0x8  # SHRINK, GROW, WRITE


class Kind(Enum):
    """Where a region lies: that decides which ways of reading it a transport has."""

    SEALED = "sealed"
    UNSEALED = "unsealed"
    ANONYMOUS = "anonymous"


def pattern(nbytes: int, seed: int) -> bytes:
    """Bytes that differ at any two offsets a power of two apart, and between seeds."""
    period = random.Random(seed).randbytes(min(nbytes, MIB + 1))
    return (period * (nbytes // len(period) + 1))[:nbytes] if nbytes else b""


class Memory:
    """One region's memory, filled with `pattern(nbytes, seed)`. Close it after the exposure."""

    def __init__(self, nbytes: int, seed: int, kind: Kind = Kind.SEALED) -> None:
        self.nbytes = nbytes
        self.expected = pattern(nbytes, seed)
        self.memfd: int | None = None
        if kind is Kind.ANONYMOUS:
            self._map = mmap.mmap(-1, max(nbytes, 1))
            self._map[:nbytes] = self.expected
        else:
            self.memfd = os.memfd_create("mx-testing", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.write(self.memfd, self.expected or b"\0")
            if kind is Kind.SEALED:
                fcntl.fcntl(self.memfd, _F_ADD_SEALS, _SEALS)
            self._map = mmap.mmap(self.memfd, max(nbytes, 1), prot=mmap.PROT_READ)

    def region(self, index: int) -> ExposedRegion:
        """The memory as a source exposes it. The view in it must be let go before `close`."""
        view = memoryview(self._map)[: self.nbytes].toreadonly()
        address = int(np.frombuffer(self._map, np.uint8).ctypes.data)
        return ExposedRegion(index, view, address, "cpu", self.memfd)

    def unchanged(self) -> bool:
        return self._map[: self.nbytes] == self.expected

    def close(self) -> None:
        """Raises BufferError while somebody still holds a view."""
        if self.memfd is not None:
            os.close(self.memfd)
            self.memfd = None
        self._map.close()
