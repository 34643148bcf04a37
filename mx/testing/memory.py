"""Memory for tests of transports: known bytes in a sealed memfd, in anonymous pages, on a GPU, in
one place or in many."""

from __future__ import annotations

import functools
import gc
import mmap
import os
import random
import weakref
from collections.abc import Sequence
from enum import Enum

from mx.buffers import address_of, seal
from mx.cuda import driver as cuda
from mx.cuda.device import Device, DeviceMemory
from mx.cuda.vmm import VmmMemory
from mx.testing import spans
from mx.transport import DeviceView, ExposedRegion, ScatteredView, Span
from mx.units import KIB, MIB

_SEALS = 0x2 | 0x4 | 0x8  # SHRINK, GROW, WRITE


class Kind(Enum):
    """Where a region lies, which decides how a transport can read it."""

    SEALED = "sealed"
    UNSEALED = "unsealed"
    ANONYMOUS = "anonymous"
    SCATTERED = "scattered"  # in many places, of anonymous pages or of a GPU
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


#: Where each place of a scattered region begins in it, and its bytes; ascending.
Places = Sequence[tuple[int, int]]


def cut(nbytes: int, seed: int) -> Places:
    """Return places of many sizes that cover a region without holes, alike for equal seeds."""
    rng, places, at = random.Random(seed), [], 0
    while at < nbytes:
        size = min(nbytes - at, rng.choice((1, 7, 64, 4097, 70_001, 300 * KIB, MIB)))
        places.append((at, size))
        at += size
    return places


class Memory:
    """One region's memory, filled with `pattern(nbytes, seed)`. Close it after the exposure.

    Memory on a GPU is on `device`, and so is scattered memory; other kinds are the host's whatever
    that says. Scattered memory is in `places`, which lie in another order in memory, with gaps.
    `alike`: all bytes are the same, in place of the pattern.
    """

    def __init__(
        self,
        nbytes: int,
        seed: int,
        kind: Kind = Kind.SEALED,
        device: str = "cpu",
        places: Places | None = None,
        *,
        alike: bool = False,
    ) -> None:
        self.nbytes = nbytes
        self.expected = bytes([seed % 256]) * nbytes if alike else pattern(nbytes, seed)
        self.memfd: int | None = None
        self._gpu: _GpuMemory | None = None
        self._places: Places = ()
        self._offsets: list[int] = []
        if kind is Kind.SCATTERED:
            self._places = cut(nbytes, seed) if places is None else places
            self._scatter(seed, device)
        elif kind.on_gpu:
            self._gpu = _GpuMemory(nbytes, kind, device)
            spans.poke(self._gpu.view(), self.expected)
        elif kind is Kind.ANONYMOUS:
            self._map = mmap.mmap(-1, max(nbytes, 1))
            self._map[:nbytes] = self.expected
        else:
            self.memfd = os.memfd_create("mx-testing", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            left = memoryview(self.expected or b"\0")
            while left:  # one call writes less than 2 GiB
                left = left[os.write(self.memfd, left) :]
            if kind is Kind.SEALED:
                seal(self.memfd, _SEALS)
            self._map = mmap.mmap(self.memfd, max(nbytes, 1), prot=mmap.PROT_READ)

    def _scatter(self, seed: int, device: str) -> None:
        """Put the places into memory in an order that the seed draws."""
        order = list(range(len(self._places)))
        random.Random(seed).shuffle(order)
        offsets, at = {}, 0
        for number in order:
            offsets[number] = at
            at += self._places[number][1] + 1 + number % 3
        self._offsets = [offsets[number] for number in range(len(order))]
        if device == "cpu":
            self._map = mmap.mmap(-1, max(at, 1))
        else:
            self._gpu = _GpuMemory(max(at, 1), Kind.GPU, device)
        whole = bytearray(b"\xc3" * at)
        for (begin, size), offset in zip(self._places, self._offsets, strict=True):
            whole[offset : offset + size] = self.expected[begin : begin + size]
        if self._gpu is not None:
            spans.poke(self._gpu.view()[:at], bytes(whole))
        else:
            self._map[:at] = whole

    def _scattered(self) -> ScatteredView:
        memory: Span = memoryview(self._map) if self._gpu is None else self._gpu.view()
        begins = [begin for begin, _ in self._places]
        parts = [
            memory[offset : offset + size]
            for (_, size), offset in zip(self._places, self._offsets, strict=True)
        ]
        return ScatteredView.over(begins, parts, self.nbytes).toreadonly()

    def region(self, index: int) -> ExposedRegion:
        """Return the memory as a source exposes it. Release its view before `close`."""
        if self._places:
            device = "cpu" if self._gpu is None else self._gpu.view().device
            return ExposedRegion(index, self._scattered(), 0, device)
        if self._gpu is not None:
            on_gpu = self._gpu.view()
            return ExposedRegion(index, on_gpu, on_gpu.address, on_gpu.device)
        view = memoryview(self._map)[: self.nbytes].toreadonly()
        address = address_of(memoryview(self._map))
        return ExposedRegion(index, view, address, "cpu", self.memfd)

    def unchanged(self) -> bool:
        if self._places:
            begins, parts = self._scattered().located()
            return all(
                spans.peek(part) == self.expected[begin : begin + len(part)]
                for begin, part in zip(begins, parts, strict=True)
            )
        if self._gpu is not None:
            return spans.peek(self._gpu.view()) == self.expected
        return self._map[: self.nbytes] == self.expected

    def close(self) -> None:
        """Free the memory. Raises BufferError while a view of it exists."""
        if self._gpu is not None:
            self._gpu.close()
            return
        memfd, self.memfd = self.memfd, None
        if memfd is not None:
            os.close(memfd)
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
