"""Fills an arena: reads each file once and hashes its blocks as they land in layer space.

A few threads for each drive, each with an aligned buffer, read the files with O_DIRECT, so that a
model does not displace the page cache. Tensors start anywhere in their files, so blocks are written
from the buffer to their places, and hashed there while they are in the cache. Where the alignment
of file and arena agrees, they are read into place.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import islice

from mx.core.digest import DIGEST_BYTES
from mx.core.grid import BLOCK_BYTES
from mx.core.read_depth import MOST_READS, ReadDepth
from mx.core.types import Layout
from mx.errors import CapacityError, ClosedError
from mx.memory.arena import MakeHasher, host_hasher
from mx.storage.disk_file import DIRECT_ALIGNMENT_BYTES
from mx.storage.landing import ArenaDigests, Landing
from mx.storage.safetensors import Checkpoint
from mx.storage.spans import ArenaWriter, SpanReader
from mx.storage.stages import HASH, UPLOAD, WAIT, Drive, Stages
from mx.threads import Threads
from mx.units import MIB, format_bytes
from mx.views import HostView, View, as_bytes, contiguous, device_of, host_view

SPAN_BYTES = 4 * MIB
RING_BYTES = 64 * MIB
#: In the order of layers a read of so much ends where a layer does: to read some bytes of a later
#: layer too early costs less than many short reads.
_LAYER_BYTES = MIB
#: Threads that copy from memory and hash.
_COPY_THREADS = 2
#: Blocks that a GPU is given at once: as many as it hashes in one launch.
_GPU_BLOCKS = 512


def fill(
    checkpoint: Checkpoint,
    layout: Layout,
    destination: HostView,
    *,
    memfd: int | None = None,
    copy: Callable[[int, memoryview], None] | None = None,
    shortcuts: bool = False,
    threads: int = 2,
    in_layer_order: bool = False,
    progress: Callable[[int], None] | None = None,
    cancelled: Callable[[], bool] = lambda: False,
    on_layer: Callable[[int], None] | None = None,
    stages: Stages | None = None,
    uploads: bool = False,
) -> ArenaDigests:
    """Read every tensor of a checkpoint to its place in `destination`, hashing it on the way.

    Padding is not written. Apart from `destination` this needs a buffer of 4 MiB for each read in
    flight, of 64 MiB in all (a MiB for each if that is more), and some hundred bytes per tensor.
    All threads have ended when it returns or raises.

    Args:
        checkpoint: The checkpoint.
        layout: Where its tensors go.
        destination: A writable view of at least `layout.arena_nbytes` bytes; nothing refers to it
            once this returns or raises.
        memfd: The memfd that `destination` maps, if it is such a map.
        copy: Called with each block and its place, which it copies, in place of a copy to
            `destination`; for a `SubsetMemory`, whose view that is.
        shortcuts: Whether to compute the shortcut digests too.
        threads: How many reads of each drive are in flight at first, and of a store always. While
            more make it faster, there are up to 16 of all drives together.
        in_layer_order: Read what the first layers need first, whatever the order in the files.
        progress: Called with the bytes landed so far, from the reader threads, one call at a time.
        cancelled: Called while reading; returning True stops it soon.
        on_layer: Called with each complete layer, whose bytes in `destination` are not read again.
        stages: Gets where the time goes.
        uploads: Whether `on_layer` copies the layer to a GPU.

    Returns:
        The digests.

    Raises:
        CheckpointError: A file shrank or changed since it was opened.
        LocalError: The disk fails.
        CapacityError: The system has no memory for the arena.
        ClosedError: `cancelled` returned True.
    """
    index_of = {tensor.name: i for i, tensor in enumerate(layout.tensors)}
    readers: list[SpanReader] = []
    spent = stages or Stages()

    def complete(layer: int) -> None:
        assert on_layer is not None
        spent.mine.clock.lap(HASH)
        on_layer(layer)
        spent.mine.clock.lap(UPLOAD if uploads else WAIT, uploads * layout.layers[layer].nbytes)

    with as_bytes(destination) as view:
        arena = _arena(view, memfd, layout, copy)
        job = _FillJob(layout, shortcuts, progress, cancelled, on_layer and complete)
        try:
            for file in checkpoint.files:
                readers.append(SpanReader(file, layout, index_of, arena))  # takes its tensors
            job.read(readers, max(1, threads), _LAYER_BYTES if in_layer_order else None, spent)
            for reader in readers:
                reader.check_unchanged()
            found_stamps = [reader.stamp() for reader in readers]
        finally:
            for reader in readers:
                reader.close()
        stamps = tuple(each for each in found_stamps if each is not None)
        return replace(job.filled(), stamps=stamps if len(stamps) == len(readers) else ())


def fill_from_tensors(
    tensors: Mapping[str, memoryview],
    layout: Layout,
    destination: HostView,
    *,
    memfd: int | None = None,
    shortcuts: bool = False,
    cancelled: Callable[[], bool] = lambda: False,
    on_layer: Callable[[int], None] | None = None,
) -> ArenaDigests:
    """Copy tensors from memory to their places in `destination`, hashing the copies on the way.

    Args:
        tensors: Contiguous byte views by name. The other arguments are those of `fill`.

    Returns:
        The digests of what is in `destination`, even if the tensors change meanwhile.

    Raises:
        ValueError: A tensor is missing or has another size than the layout's.
        CapacityError: The system has no memory for the arena.
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
    with as_bytes(destination) as view:
        arena = _arena(view, memfd, layout)
        job = _FillJob(layout, shortcuts, None, cancelled, on_layer)

        def work() -> None:
            for index, base, start, end in job.blocks(layout, pieces):
                name = layout.tensors[index].name
                with tensors[name].cast("B") as source, source[start:end] as there:
                    arena.write(base + start, there)
                with host_view(view[base + start : base + end]) as here:
                    job.landing.landed(index, start // BLOCK_BYTES, here)

        job.run([work] * _COPY_THREADS, _COPY_THREADS)
        return job.filled()


def hash_in_place(
    layout: Layout,
    arena: View,
    hasher: MakeHasher = host_hasher,
    *,
    only: Collection[str] | None = None,
    before: ArenaDigests | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> ArenaDigests:
    """Hash tensors where they are: in host memory with their shortcut digests, on a GPU without.

    Args:
        layout: The layout.
        arena: The memory, laid out so; it may be scattered, a tensor in one piece.
        hasher: Makes hashers for blocks of it.
        only: The names of the tensors to hash; None: all.
        before: The digests of the others.
        cancelled: Polled; returning True stops it.

    Raises:
        ClosedError: `cancelled` returned True.
    """
    on_gpu = device_of(arena) != "cpu"
    job = _FillJob(layout, not on_gpu, None, cancelled, None)
    pieces = deque[tuple[int, int]]()
    for index, tensor in enumerate(layout.tensors):
        if before is not None and only is not None and tensor.name not in only:
            job.landing.inherit(index, before)
        else:
            pieces += ((index, offset) for offset in range(0, tensor.nbytes, SPAN_BYTES))

    def work() -> None:
        for index, base, start, end in job.blocks(layout, pieces):
            here = host_view(arena[base + start : base + end])
            job.landing.landed(index, start // BLOCK_BYTES, here)

    def work_on_gpu() -> None:
        blocks = job.blocks(layout, pieces)
        while batch := list(islice(blocks, _GPU_BLOCKS)):
            places = [contiguous(arena[base + start : base + end]) for _, base, start, end in batch]
            digests = hasher(places).block_digests()
            for number, (index, _, start, _) in enumerate(batch):
                at = DIGEST_BYTES * number
                digest = digests[at : at + DIGEST_BYTES]
                job.landing.hashed(index, start // BLOCK_BYTES, digest)

    job.run([work_on_gpu] if on_gpu else [work] * _COPY_THREADS, _COPY_THREADS)
    return job.filled()


def _buffer(nbytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, nbytes)
    except OSError as error:
        raise CapacityError(
            f"a buffer of {format_bytes(nbytes)} could not be mapped: {error.strerror}",
            hint="raise the address-space limit (ulimit -v) or overcommit",
        ) from error


def _arena(
    view: HostView,
    memfd: int | None,
    layout: Layout,
    copy: Callable[[int, memoryview], None] | None = None,
) -> ArenaWriter:
    if len(view) < layout.arena_nbytes:
        raise ValueError(f"the arena has {len(view)} bytes, not {layout.arena_nbytes}")
    return ArenaWriter(view, memfd, copy)


class _FillJob:
    """The threads that fill one arena, and the state that they share."""

    def __init__(
        self,
        layout: Layout,
        shortcuts: bool,
        progress: Callable[[int], None] | None,
        cancelled: Callable[[], bool],
        on_layer: Callable[[int], None] | None,
    ) -> None:
        self._progress, self._cancelled = progress, cancelled
        self.landing = Landing(layout, shortcuts=shortcuts, on_layer=on_layer)
        self._lock = threading.Lock()
        self._done_nbytes = 0
        self._stop = False
        self._was_cancelled = False
        self._futures: deque[Future[None]] = deque()

    def goes_on(self) -> bool:
        """Return True while threads should go on reading."""
        if not self._stop and self._cancelled():
            self._stop = self._was_cancelled = True
        return not self._stop

    def blocks(
        self, layout: Layout, pieces: deque[tuple[int, int]]
    ) -> Iterator[tuple[int, int, int, int]]:
        """Yield blocks of tensors for as long as the job goes on; its threads share them.

        Args:
            layout: The layout.
            pieces: The index of a tensor and an offset in it, from where `SPAN_BYTES` are taken.

        Yields:
            The tensor's index, its place in the arena, and where the block begins and ends in it.
        """
        while self.goes_on():
            try:
                index, offset = pieces.popleft()
            except IndexError:
                return
            tensor = layout.tensors[index]
            base = layout.layers[tensor.layer].arena_offset + tensor.offset
            for start in range(offset, min(offset + SPAN_BYTES, tensor.nbytes), BLOCK_BYTES):
                yield index, base, start, min(start + BLOCK_BYTES, tensor.nbytes)

    def progressed(self, nbytes: int) -> None:
        """Report that so many more bytes have landed."""
        if self._progress is not None:
            with self._lock:
                self._done_nbytes += nbytes
                self._progress(self._done_nbytes)

    def read(
        self, readers: list[SpanReader], threads: int, cut_nbytes: int | None, stages: Stages
    ) -> None:
        """Read files, those of each drive by threads of its own.

        Args:
            readers: The files.
            threads: As for `fill`.
            cut_nbytes: As for `SpanReader.spans`; the order is that of layers then.
            stages: Gets where the time goes.
        """
        devices = {reader.device for reader in readers}
        share = max(1, MOST_READS // len(devices))
        most = {each: share if isinstance(each, int) else threads for each in devices}
        first = {each: min(threads, most[each]) for each in devices}
        span_nbytes = max(BLOCK_BYTES, min(SPAN_BYTES, RING_BYTES // sum(most.values())))
        depths = {each: ReadDepth(first[each], most[each], time.monotonic()) for each in devices}
        found = [(each, span) for each in readers for span in each.spans(span_nbytes, cut_nbytes)]
        if cut_nbytes is not None:  # of one layer, in the order of the file
            found.sort(key=lambda each: each[0].first_layer(each[1]))
        spans = {at: deque(each for each in found if each[0].device == at) for at in devices}

        def work(device: Drive) -> None:
            ring = _buffer(span_nbytes + 2 * DIRECT_ALIGNMENT_BYTES)
            with stages.clock(device) as clock, ring, memoryview(ring) as own:
                while self.goes_on():
                    try:
                        reader, span = spans[device].popleft()
                    except IndexError:
                        return
                    reader.read(span, own, self.landing.landed, clock)
                    self.progressed(nbytes := span[1] - span[0])
                    with self._lock:
                        waited_s, clock.waited_s = clock.waited_s, 0.0
                        count = depths[device].landed(nbytes, waited_s, time.monotonic())
                        if not self._stop:
                            for _ in range(count - 1):
                                self._begin(partial(work, device))
                    clock.lap(WAIT)
                    if not count:
                        return

        works = [partial(work, each) for each in devices for _ in range(first[each])]
        self.run(works, sum(most.values()))

    def run(self, works: Sequence[Callable[[], None]], most: int) -> None:
        """Run these on threads of their own, and what they begin; the first error stops them all
        and is raised. There are `most` threads at most."""
        with Threads(most, "mx-read") as self._pool:
            try:
                for work in works:
                    self._begin(work)
                while self._futures:  # those that readers begin are there before they end
                    self._futures.popleft().result()
            except BaseException:  # also an interrupt of this thread: the others end first
                with self._lock:  # after this none begins another
                    self._stop = True
                self._futures.clear()  # their errors refer to views
                raise
        if self._was_cancelled:
            raise ClosedError("reading was cancelled")

    def _begin(self, work: Callable[[], None]) -> None:
        """Have a thread do it; one at a time calls this."""

        def guarded() -> None:
            try:
                work()
            except BaseException:
                self._stop = True
                raise

        self._futures.append(self._pool.submit(guarded))

    def filled(self) -> ArenaDigests:
        """Return the digests, once everything has landed."""
        landing = self.landing
        return ArenaDigests(landing.roots(), landing.pages(), landing.shortcuts())
