"""Fills an arena: reads each file once and hashes its bytes as they land in layer space.

A few threads, each with an aligned buffer, read the files with O_DIRECT, so that a model does not
displace the page cache. Tensors start anywhere in their files, so bytes are copied from the buffer
to their places. Bytes are read into place without the buffer where the alignment of file and arena
agrees, and where the file system refuses O_DIRECT.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from mx.buffers import copy_bytes
from mx.core.types import CHUNK_BYTES, Layout
from mx.errors import ClosedError
from mx.storage.landing import Landing
from mx.storage.safetensors import Checkpoint
from mx.storage.spans import DIRECT_ALIGNMENT_BYTES, SpanReader
from mx.units import MIB

SPAN_BYTES = 4 * MIB
RING_BYTES = 16 * MIB
#: Threads that copy from memory and hash.
_COPY_THREADS = 2


@dataclass(frozen=True)
class Filled:
    """The digests that were computed while an arena was filled.

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
    """Read every tensor of a checkpoint to its place in `destination`, hashing it on the way.

    Padding is not written. Apart from `destination` this needs at most 16 MiB of buffers and some
    hundred bytes per tensor. All threads have ended when it returns or raises.

    Args:
        checkpoint: The checkpoint.
        layout: Where its tensors go.
        destination: A writable view of at least `layout.arena_nbytes` bytes; nothing refers to it
            once this returns or raises.
        chunk_nbytes: The chunk size of the digests.
        threads: How many threads read.
        progress: Called with the bytes landed so far, from the reader threads, one call at a time.
        cancelled: Called while reading; returning True stops it soon.
        on_layer: Called with each complete layer, whose bytes in `destination` are not read again.

    Returns:
        The digests.

    Raises:
        CheckpointError: A file shrank or changed since it was opened.
        LocalError: The disk fails.
        ClosedError: `cancelled` returned True.
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
    """Copy tensors from memory to their places in `destination`, hashing them on the way.

    Args:
        tensors: Contiguous byte views by name, which must not change meanwhile. The other
            arguments are those of `fill`.

    Returns:
        The digests.

    Raises:
        ValueError: A tensor is missing or has another size than the layout's.
        ClosedError: `cancelled` returned True.
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
    """The threads that fill one arena, and the state that they share."""

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
        """Return True while threads should go on reading."""
        if not self._stop and self._cancelled():
            self._stop = self._was_cancelled = True
        return not self._stop

    def landed(self, index: int, offset: int, nbytes: int) -> None:
        """Hash bytes of a tensor that are in place, and report progress."""
        self._landing.landed(index, offset, nbytes)
        if self._progress is not None:
            with self._lock:
                self._done_nbytes += nbytes
                self._progress(self._done_nbytes)

    def run(self, work: Callable[[], None], threads: int) -> None:
        """Run `work` on each of `threads` threads; the first error stops them all and is raised."""

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
            except BaseException:  # also an interrupt of this thread: the others end first
                self._stop = True
                raise
        if self._was_cancelled:
            raise ClosedError("reading was cancelled")

    def filled(self) -> Filled:
        """Return the digests, once everything has landed."""
        digests = self._landing.tensor_digests
        names = (tensor.name for tensor in self._layout.tensors)
        chunk_digests = self._landing.chunk_digests()
        return Filled(dict(zip(names, digests, strict=True)), chunk_digests)
