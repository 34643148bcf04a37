"""Filling an arena: each file read once, its bytes hashed as they land in layer space.

Files are read with O_DIRECT, so that a model does not pass through (and out of) the page cache,
by a few threads with one aligned buffer each; tensors start anywhere in their files, so bytes
are copied from there to their places. Where a file's and the arena's alignment happen to agree,
and where the file system refuses O_DIRECT, they are read into place without the buffer.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from mx.core.types import CHUNK_BYTES, Layout
from mx.errors import ClosedError
from mx.storage.landing import Landing
from mx.storage.safetensors import Checkpoint
from mx.storage.spans import DIRECT_ALIGNMENT_BYTES, SpanReader, copy_bytes
from mx.units import MIB

SPAN_BYTES = 4 * MIB
RING_BYTES = 16 * MIB
#: Threads that copy from memory and hash.
_COPY_THREADS = 2


@dataclass(frozen=True)
class Filled:
    """What was computed while an arena was filled.

    `tensor_digests` has the 32-byte blake3 of each tensor, `chunk_digests` 16 bytes for each
    chunk, in order.
    """

    tensor_digests: dict[str, bytes]
    chunk_digests: bytes


def fill(
    checkpoint: Checkpoint,
    layout: Layout,
    destination: memoryview,
    *,
    chunk_nbytes: int = CHUNK_BYTES,
    threads: int = 2,
    progress: Callable[[int], None] | None = None,
    cancelled: Callable[[], bool] = lambda: False,
    on_layer: Callable[[int], None] | None = None,
) -> Filled:
    """Read every tensor of `checkpoint` to its place in `destination`, hashing on the way.

    `destination` is a writable view of at least `layout.arena_nbytes` bytes; nothing refers to
    it any more once this returns or raises. `progress` is told the bytes landed so far, from the
    reader threads, one call at a time; `on_layer` of each layer that is complete and will not be
    looked at again in `destination`. Padding is not written. Apart from `destination`, memory
    is at most 16 MiB of buffers and some hundred bytes per tensor.

    Raises CheckpointError if a file shrank or changed since it was opened, LocalError where the
    disk fails, ClosedError soon after `cancelled()` has become true. All threads have ended by
    then.
    """
    threads = max(1, threads)
    span_nbytes = min(SPAN_BYTES, RING_BYTES // threads) // DIRECT_ALIGNMENT_BYTES
    span_nbytes *= DIRECT_ALIGNMENT_BYTES
    index_of = {tensor.name: i for i, tensor in enumerate(layout.tensors)}
    readers: list[SpanReader] = []
    with destination.cast("B") as arena:
        job = _Job(layout, arena, chunk_nbytes, progress, cancelled, on_layer)
        try:
            for file in checkpoint.files:
                readers.append(SpanReader(file, layout, index_of, arena))
            spans = deque(
                (reader, span) for reader in readers for span in reader.spans(span_nbytes)
            )

            def work() -> None:
                with mmap.mmap(-1, span_nbytes) as ring, memoryview(ring) as buffer:
                    while job.goes_on():
                        try:
                            reader, span = spans.popleft()
                        except IndexError:
                            return
                        for piece in reader.read(span, buffer):
                            job.landed(piece.index, piece.offset, piece.nbytes)

            job.run(work, threads)
            for reader in readers:
                reader.check_unchanged()
        finally:
            for reader in readers:
                reader.close()
        return job.filled()


def fill_from_tensors(
    tensors: Mapping[str, memoryview],
    layout: Layout,
    destination: memoryview,
    *,
    chunk_nbytes: int = CHUNK_BYTES,
    cancelled: Callable[[], bool] = lambda: False,
    on_layer: Callable[[int], None] | None = None,
) -> Filled:
    """As `fill`, from memory: `tensors` are contiguous byte views by name, none changed meanwhile.

    Raises ValueError if one is missing or of another size, ClosedError when cancelled.
    """
    for tensor in layout.tensors:
        if tensor.name not in tensors or tensors[tensor.name].nbytes != tensor.nbytes:
            raise ValueError(f"{tensor.name!r} is missing or has another size than the layout's")
    pieces = deque(
        (index, offset)
        for index, tensor in enumerate(layout.tensors)
        for offset in range(0, tensor.nbytes, SPAN_BYTES)
    )
    with destination.cast("B") as arena:
        job = _Job(layout, arena, chunk_nbytes, None, cancelled, on_layer)

        def work() -> None:
            while job.goes_on():
                try:
                    index, offset = pieces.popleft()
                except IndexError:
                    return
                tensor = layout.tensors[index]
                start = layout.layers[tensor.layer].arena_offset + tensor.offset + offset
                nbytes = min(SPAN_BYTES, tensor.nbytes - offset)
                with (
                    tensors[tensor.name].cast("B") as source,
                    source[offset : offset + nbytes] as there,
                    arena[start : start + nbytes] as here,
                ):
                    copy_bytes(here, there)
                job.landed(index, offset, nbytes)

        job.run(work, _COPY_THREADS)
        return job.filled()


class _Job:
    """The threads of one filling, and what they share."""

    def __init__(
        self,
        layout: Layout,
        arena: memoryview,
        chunk_nbytes: int,
        progress: Callable[[int], None] | None,
        cancelled: Callable[[], bool],
        on_layer: Callable[[int], None] | None,
    ) -> None:
        if arena.nbytes < layout.arena_nbytes:
            raise ValueError(f"the arena has {arena.nbytes} bytes, not {layout.arena_nbytes}")
        self._layout, self._progress, self._cancelled = layout, progress, cancelled
        self._landing = Landing(layout, arena, chunk_nbytes, on_layer)
        self._lock = threading.Lock()
        self._done_nbytes = 0
        self._stop = False
        self._was_cancelled = False

    def goes_on(self) -> bool:
        if not self._stop and self._cancelled():
            self._stop = self._was_cancelled = True
        return not self._stop

    def landed(self, index: int, offset: int, nbytes: int) -> None:
        self._landing.landed(index, offset, nbytes)
        if self._progress is not None:
            with self._lock:
                self._done_nbytes += nbytes
                self._progress(self._done_nbytes)

    def run(self, work: Callable[[], None], threads: int) -> None:
        """Run `work` on each of `threads` threads; the first error stops and ends all."""

        def guarded() -> None:
            try:
                work()
            except BaseException:
                self._stop = True
                raise

        with ThreadPoolExecutor(threads, thread_name_prefix="mx-read") as pool:
            try:
                for future in [pool.submit(guarded) for _ in range(threads)]:
                    future.result()
            except BaseException:  # an interrupt of this thread included: end the others first
                self._stop = True
                raise
        if self._was_cancelled:
            raise ClosedError("reading was cancelled")

    def filled(self) -> Filled:
        digests = self._landing.tensor_digests
        names = (tensor.name for tensor in self._layout.tensors)
        chunk_digests = self._landing.chunk_digests()
        return Filled(dict(zip(names, digests, strict=True)), chunk_digests)
