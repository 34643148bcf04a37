"""Arenas in GPU memory, and readers that copy from them to the host."""

from __future__ import annotations

import concurrent.futures
import contextlib
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from mx.core.grid import ChunkGrid
from mx.cuda.device import Device, DeviceMemory
from mx.cuda.digest import DeviceHasher, Digester, DigestKernel, digester, kernel_of
from mx.cuda.driver import load
from mx.cuda.ring import PinnedRing
from mx.cuda.vmm import VmmMemory
from mx.errors import CapacityError, ClosedError, LocalError
from mx.threads import Threads
from mx.transport import DeviceView, Span, View
from mx.units import MIB, format_bytes
from mx.views import HostView, ScatteredView, device_of, host_bytes

if TYPE_CHECKING:
    from mx.cuda.digest_table import DigestTable

#: Device memory that a pull needs besides the model: for digests, and for the driver.
_SPARE_BYTES = 64 * MIB
_MAP_NORESERVE = 0x4000  # Python names it from 3.12 on


def require_device(device: Device, nbytes: int, what: str) -> None:
    """Check that a GPU has `nbytes` of memory free.

    Args:
        device: The GPU.
        nbytes: The bytes that are needed.
        what: What needs them, for the error.

    Raises:
        CapacityError: Fewer are free.
    """
    free, total = device.memory_info()
    if (missing := nbytes + _SPARE_BYTES - free) > 0:
        raise CapacityError(
            f"{what} needs {format_bytes(nbytes)} on {device.key}, {format_bytes(missing)} more "
            f"than the {format_bytes(max(0, nbytes - missing))} free of {format_bytes(total)}",
            hint="free memory on the GPU, or use one with more",
        )


class DeviceArena:
    """`nbytes` of a GPU's memory in one piece, exportable to other processes.

    `device` is "cuda:N" or "cuda:GPU-...". `view`, and the memory with it, lives as long as
    anything refers to it; `release` only drops this object's own reference. The memory comes from
    virtual memory management, which can export descriptors of it, or from cuMemAlloc where the GPU
    has none.

    Raises:
        ConfigError: There is no such device.
        CapacityError: There is too little memory; raised before any is allocated.
        CudaError: The driver fails.
    """

    memfd: int | None = None

    def __init__(self, nbytes: int, device: str) -> None:
        self._ring: PinnedRing | None = None
        self._pool: Threads | None = None
        self._lock = threading.Lock()
        self._released = False
        self._digester: Future[Digester] | None = None
        with contextlib.ExitStack() as undo:
            self.device = undo.enter_context(Device.open(load(), device))
            require_device(self.device, nbytes, "the model")
            memory: VmmMemory | DeviceMemory
            if self.device.has_vmm:
                memory = VmmMemory.allocate(self.device, max(nbytes, 1))
            else:
                memory = DeviceMemory(self.device, max(nbytes, 1))
            undo.pop_all()
        self.view = DeviceView(self.device.key, memory.address, nbytes, memory)

    @property
    def address(self) -> int:
        """The device address of the first byte."""
        return self.view.address

    def seal(self) -> None:
        """Do nothing: device memory can't be sealed, and what mx writes it has waited for."""

    def private_view(self) -> DeviceView:
        """Return the memory for tensors to be views of: here the arena itself."""
        return self.view

    @property
    def ring(self) -> PinnedRing:
        """Pinned memory for copies to and from the host, allocated at first use.

        The arena owns it. Raises CudaMemoryError.
        """
        with self._lock:
            if self._ring is None:
                self._ring = PinnedRing(self.device)
            return self._ring

    def prepare_hashing(self) -> None:
        """Start to compile what `hasher` needs, on a thread: the first time takes a second or
        two."""
        with self._lock:
            if self._digester is not None or self._released:
                return
            self._pool = Threads(1, "mx-digest")
            self._digester = self._pool.submit(digester, self.device, lambda: self.ring)

    def finish_preparing(self) -> None:
        """Prepare hashing, and wait until that is done, or has failed."""
        self.prepare_hashing()
        if (made := self._digester) is not None:
            concurrent.futures.wait([made])

    def hasher(self, blocks: Sequence[Span]) -> DeviceHasher:
        """Return a hasher for blocks that land in these views of the arena.

        Raises:
            LocalError: A view is in host memory.
        """
        self.prepare_hashing()
        there = [block for block in blocks if isinstance(block, DeviceView)]
        if len(there) != len(blocks):
            raise LocalError(f"{self.device.key} can't hash bytes in host memory")
        return DeviceHasher(there, self._digests)

    def digest_table(
        self, grid: ChunkGrid, page_of: Callable[[int], bytes | None]
    ) -> DigestTable | None:
        """Return a table of the blocks of a model that this memory is to hold, which the caller
        closes before the arena.

        Args:
            grid: How the model is cut.
            page_of: Returns the digests that a layer's blocks must have; None while they are not
                known.
        """
        from mx.cuda.digest_table import DigestTable  # and numpy with it, which others may not need

        self.prepare_hashing()
        return DigestTable(grid, self.view, page_of, self._kernel)

    def _kernel(self) -> DigestKernel | None:
        made = self._digester
        if made is None or not made.done() or made.exception() is not None:
            return None
        return kernel_of(made.result())

    def _digests(self, blocks: Sequence[tuple[int, int]]) -> list[bytes]:
        made = self._digester
        if made is None:
            raise ClosedError("the arena was released")
        return made.result().digests(blocks)

    @contextlib.contextmanager
    def filling(self) -> Iterator[LayerWindow]:
        """Give host memory to fill, layer by layer, in place of the arena."""
        window = LayerWindow(self.view, self.ring)
        try:
            yield window
        finally:
            window.close()

    def release(self) -> None:
        """Free the ring and the digester and drop this object's reference to the memory.

        Idempotent. The arena can hash and copy nothing afterwards.
        """
        with self._lock:
            self._released = True
            made, self._digester = self._digester, None
        if self._pool is not None:
            self._pool.shutdown()
        if made is not None and made.exception() is None:
            made.result().close()
        if self._ring is not None:
            self._ring.close()
        self.view = DeviceView(self.device.key, 0, 0)
        self.device.close()


class LayerWindow:
    """Host memory as long as an arena on a GPU, which uses pages only for layers in progress.

    `layer_done` copies a layer to the device and frees its pages.
    """

    def __init__(self, arena: DeviceView | ScatteredView, ring: PinnedRing) -> None:
        """
        Args:
            arena: The GPU's memory, in one place or in several.
            ring: What the bytes go through; the caller's.
        """
        self._arena, self._ring = arena, ring
        nbytes = len(arena)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._mapping = mmap.mmap(-1, nbytes, flags=flags) if nbytes else None
        self.view = memoryview(b"" if self._mapping is None else self._mapping)

    def layer_done(self, arena_offset: int, nbytes: int) -> None:
        """Copy a complete layer to the device and free its pages here.

        Args:
            arena_offset: Where the layer begins, a multiple of the page size.
            nbytes: The layer's length.

        Raises:
            CudaError: The copy fails.
        """
        for begin, span in _parts(self._arena[arena_offset : arena_offset + nbytes]):
            at = arena_offset + begin
            with self.view[at : at + len(span)] as there:
                self._ring.upload(span.address, there)
        if self._mapping is not None and nbytes:
            self._mapping.madvise(mmap.MADV_DONTNEED, arena_offset, nbytes)

    def close(self) -> None:
        """Drop the memory. Idempotent."""
        # The last view unmaps it: an error's traceback may still refer to one.
        self.view = memoryview(b"")
        self._mapping = None


def _parts(view: View) -> Iterator[tuple[int, DeviceView]]:
    """Yield the parts of a view of device memory that are not empty, and where each begins."""
    begins, spans = view.located() if isinstance(view, ScatteredView) else ([0], [view])
    for begin, span in zip(begins, spans, strict=True):
        assert isinstance(span, DeviceView)
        if len(span):
            yield begin, span


class HostReader:
    """Gives the host bytes of either kind of memory, and writes to a device's.

    Host memory is returned as it is; device memory is copied through a ring of pinned memory,
    allocated at first use. Thread-safe; `close` frees the ring.
    """

    def __init__(self) -> None:
        self._ends = contextlib.ExitStack()
        self._lock = threading.Lock()
        self._rings: dict[str, PinnedRing] = {}

    def pieces(self, span: Span) -> Iterator[memoryview]:
        """Yield the span's bytes in order; each piece is valid until the next one is taken.

        Every piece but the last is some MiB long. Raises CudaError.
        """
        if isinstance(span, memoryview):
            yield span
        elif len(span):
            yield from self._ring(span.device).read(span.address, len(span))

    def whole(self, span: View) -> HostView:
        """Return a host view itself, or a copy of a device's in new host memory, in which holes are
        zeros.

        Raises CudaError.
        """
        if device_of(span) == "cpu":
            return host_bytes(span)
        copy = memoryview(mmap.mmap(-1, len(span))) if len(span) else memoryview(b"")
        for begin, part in _parts(span):
            self._ring(part.device).download(part.address, copy[begin : begin + len(part)])
        return copy

    def write(self, span: View, data: memoryview) -> None:
        """Copy host bytes to a device; they are in place when this returns. Raises CudaError."""
        for begin, part in _parts(span):
            self._ring(part.device).upload(part.address, data[begin : begin + len(part)])

    def _ring(self, device: str) -> PinnedRing:
        with self._lock:
            if device not in self._rings:
                opened = self._ends.enter_context(Device.open(load(), device))
                self._rings[device] = ring = PinnedRing(opened)
                self._ends.callback(ring.close)
            return self._rings[device]

    def close(self) -> None:
        """Free the rings. Idempotent."""
        self._rings.clear()
        self._ends.close()
