"""A model's place in GPU memory, and ways to look at it from the host."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from mx.core.types import Segment
from mx.cuda.device import Device, DeviceMemory
from mx.cuda.digest import Block, BlockDigester, DeviceHasher
from mx.cuda.driver import load
from mx.cuda.ring import PinnedRing
from mx.cuda.vmm import VmmMemory
from mx.errors import CapacityError, ClosedError, LocalError
from mx.transport import DeviceView, Span
from mx.units import MIB, format_bytes

#: What else a pull takes on the device: the digests' sums, and the driver's own.
_SPARE_BYTES = 64 * MIB
_MAP_NORESERVE = 0x4000  # Python names it from 3.12 on


def require_device(device: Device, nbytes: int, what: str) -> None:
    """Raise CapacityError if `device` has not got `nbytes` free for `what`."""
    free, total = device.memory_info()
    if nbytes + _SPARE_BYTES > free:
        raise CapacityError(
            f"{what} needs {format_bytes(nbytes)} on {device.key}, and "
            f"{format_bytes(max(0, free - _SPARE_BYTES))} of its {format_bytes(total)} are free",
            hint="free memory on the GPU, or use one with more",
        )


class DeviceArena:
    """`nbytes` of a GPU's memory in one piece, exportable to other processes.

    `device` is "cuda:N" or "cuda:GPU-...". `view` lives as long as anything refers to it, and the
    memory with it; `release` only gives up this object's own hold. Of virtual memory management,
    so that descriptors can be had of it, or of cuMemAlloc where the GPU has no such thing.

    Raises ConfigError for a device that is not there, CapacityError before allocating what is
    not free, CudaError.
    """

    memfd: int | None = None

    def __init__(self, nbytes: int, device: str) -> None:
        self._ring: PinnedRing | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._digester: Future[BlockDigester] | None = None
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
        return self.view.address

    def seal(self) -> None:
        """Nothing can seal device memory; but whatever still writes to it is waited for."""
        self.device.synchronize()

    def private_view(self) -> DeviceView:
        """What tensors are views of: here the arena itself."""
        return self.view

    @property
    def ring(self) -> PinnedRing:
        """Pinned memory for copies between here and the host; made when first asked for, the
        arena's. Raises CudaMemoryError."""
        if self._ring is None:
            self._ring = PinnedRing(self.device)
        return self._ring

    def prepare_hashing(self) -> None:
        """Compile what `hasher` needs, on a thread: it takes a second or two the first time."""
        if self._digester is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="mx-digest")
            self._digester = self._pool.submit(BlockDigester, self.device)

    def hasher(self, segments: Sequence[Segment], views: Sequence[Span]) -> DeviceHasher:
        """Hashes part of a chunk that lands in these views of the arena."""
        self.prepare_hashing()
        there = [view for view in views if isinstance(view, DeviceView)]
        if len(there) != len(views):
            raise LocalError(f"what is to be hashed on {self.device.key} is in host memory")
        return DeviceHasher(segments, there, self._digests)

    def _digests(self, blocks: Sequence[Block]) -> list[bytes]:
        digester = self._digester
        if digester is None:
            raise ClosedError("the arena was released")
        return digester.result().digests(blocks)

    @contextlib.contextmanager
    def filling(self) -> Iterator[LayerWindow]:
        """Host memory to fill layer by layer in place of the arena."""
        window = LayerWindow(self)
        try:
            yield window
        finally:
            window.close()

    def release(self) -> None:
        """Idempotent. Nothing may be hashed or copied by the arena any more."""
        digester, self._digester = self._digester, None
        if self._pool is not None:
            self._pool.shutdown()
        if digester is not None and digester.exception() is None:
            digester.result().close()
        if self._ring is not None:
            self._ring.close()
        self.view = DeviceView(self.device.key, 0, 0)
        self.device.close()


class LayerWindow:
    """Host memory as long as a device arena, of which only those layers take memory that are
    being filled: `layer_done` copies one to the device and gives its pages back."""

    def __init__(self, arena: DeviceArena) -> None:
        self._arena = arena
        nbytes = len(arena.view)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._mapping = mmap.mmap(-1, nbytes, flags=flags) if nbytes else None
        self.view = memoryview(b"" if self._mapping is None else self._mapping)

    def layer_done(self, arena_offset: int, nbytes: int) -> None:
        """The layer's bytes are all there, and nobody looks at them here any more.
        `arena_offset` is a multiple of a page. Raises CudaError."""
        with self.view[arena_offset : arena_offset + nbytes] as there:
            self._arena.ring.upload(self._arena.address + arena_offset, there)
        if self._mapping is not None and nbytes:
            self._mapping.madvise(mmap.MADV_DONTNEED, arena_offset, nbytes)

    def close(self) -> None:
        # Unmapped with the last view of it: an error's traceback may hold some.
        self.view = memoryview(b"")
        self._mapping = None


class HostReader:
    """Bytes for the host, wherever they are: host memory as it is, device memory by a ring of
    pinned memory that is made when first needed. Thread-safe; `close` frees the ring."""

    def __init__(self) -> None:
        self._ends = contextlib.ExitStack()
        self._lock = threading.Lock()
        self._rings: dict[str, PinnedRing] = {}

    def pieces(self, span: Span) -> Iterator[memoryview]:
        """The span's bytes in order, each piece valid until the next is asked for. Raises
        CudaError."""
        if isinstance(span, memoryview):
            yield span
        elif len(span):
            yield from self._ring(span.device).read(span.address, len(span))

    def whole(self, span: Span) -> memoryview:
        """The span, or a copy of it in new host memory. Raises CudaError."""
        if isinstance(span, memoryview):
            return span
        copy = memoryview(mmap.mmap(-1, len(span))) if len(span) else memoryview(b"")
        if len(span):
            self._ring(span.device).download(span.address, copy)
        return copy

    def _ring(self, device: str) -> PinnedRing:
        with self._lock:
            if device not in self._rings:
                opened = self._ends.enter_context(Device.open(load(), device))
                self._rings[device] = ring = PinnedRing(opened)
                self._ends.callback(ring.close)
            return self._rings[device]

    def close(self) -> None:
        """Idempotent."""
        self._rings.clear()
        self._ends.close()
