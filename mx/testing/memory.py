"""Memory for tests of transports: known bytes in a sealed memfd, in anonymous pages, on a GPU."""

from __future__ import annotations

import fcntl
import functools
import gc
import mmap
import os
import random
import weakref
from enum import Enum

from mx.buffers import address_of
from mx.cuda import driver as cuda
from mx.cuda.device import Device, DeviceMemory
from mx.cuda.vmm import VmmMemory
from mx.testing import spans
from mx.transport import DeviceView, ExposedRegion
from mx.units import MIB

_F_ADD_SEALS = 1033
_SEALS = 0x2 | 0x4 | 0x8  # SHRINK, GROW, WRITE


class Kind(Enum):
    """Where a region lies, which decides how a transport can read it."""

    SEALED = "sealed"
    UNSEALED = "unsealed"
    ANONYMOUS = "anonymous"
    GPU = "gpu"  # of cuMemAlloc, as torch's by default
    GPU_VMM = "gpu vmm"  # of virtual memory management, as torch's expandable segments

    @property
    def on_gpu(self) -> bool:
        return self in (Kind.GPU, Kind.GPU_VMM)


@functools.lru_cache(maxsize=16)
def pattern(nbytes: int, seed: int) -> bytes:
    """Return bytes that differ at any two offsets a power of two apart, and between seeds."""
    period = random.Random(seed).randbytes(min(nbytes, MIB + 1))
    return (period * (nbytes // len(period) + 1))[:nbytes] if nbytes else b""


class Memory:
    """One region's memory, filled with `pattern(nbytes, seed)`. Close it after the exposure.

    Memory on a GPU is on `device`; other kinds are the host's whatever that says.
    """

    def __init__(
        self, nbytes: int, seed: int, kind: Kind = Kind.SEALED, device: str = "cpu"
    ) -> None:
        self.nbytes = nbytes
        self.expected = pattern(nbytes, seed)
        self.memfd: int | None = None
        self._gpu: _GpuMemory | None = None
        if kind.on_gpu:
            self._gpu = _GpuMemory(nbytes, kind, device)
            spans.poke(self._gpu.view(), self.expected)
        elif kind is Kind.ANONYMOUS:
            self._map = mmap.mmap(-1, max(nbytes, 1))
            self._map[:nbytes] = self.expected
        else:
            self.memfd = os.memfd_create("mx-testing", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.write(self.memfd, self.expected or b"\0")
            if kind is Kind.SEALED:
                fcntl.fcntl(self.memfd, _F_ADD_SEALS, _SEALS)
            self._map = mmap.mmap(self.memfd, max(nbytes, 1), prot=mmap.PROT_READ)

    def region(self, index: int) -> ExposedRegion:
        """Return the memory as a source exposes it. Release its view before `close`."""
        if self._gpu is not None:
            on_gpu = self._gpu.view()
            return ExposedRegion(index, on_gpu, on_gpu.address, on_gpu.device)
        view = memoryview(self._map)[: self.nbytes].toreadonly()
        address = address_of(memoryview(self._map))
        return ExposedRegion(index, view, address, "cpu", self.memfd)

    def unchanged(self) -> bool:
        if self._gpu is not None:
            return spans.peek(self._gpu.view()) == self.expected
        return self._map[: self.nbytes] == self.expected

    def close(self) -> None:
        """Free the memory. Raises BufferError while a view of it exists."""
        if self._gpu is not None:
            self._gpu.close()
            return
        if self.memfd is not None:
            os.close(self.memfd)
            self.memfd = None
        self._map.close()


class _Owner:
    """What views of GPU memory refer to."""


class _GpuMemory:
    def __init__(self, nbytes: int, kind: Kind, device: str) -> None:
        self._nbytes = nbytes
        self._owner: _Owner | None = _Owner()
        with Device.open(cuda.load(), device) as opened:
            self._device = opened.key
            self._memory: DeviceMemory | VmmMemory
            if kind is Kind.GPU_VMM:
                self._memory = VmmMemory.allocate(opened, max(nbytes, 1))
            else:
                self._memory = DeviceMemory(opened, max(nbytes, 1))

    def view(self) -> DeviceView:
        return DeviceView(self._device, self._memory.address, self._nbytes, self._owner)

    def close(self) -> None:
        if self._owner is not None:
            left = weakref.ref(self._owner)
            self._owner = None
            if left() is not None:
                gc.collect()  # a view in a reference cycle, such as a traceback's frame
            if left() is not None:
                raise BufferError("a view of the memory exists")
        self._memory.close()
