"""Reads a stored checkpoint through a pull's transfer, as if it were one more source: what peers
have brought stays, and each block is verified against the manifest."""

from __future__ import annotations

import mmap
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mx.buffers import copy_bytes
from mx.contexts import Undo
from mx.core.digest import block_digest
from mx.core.grid import BLOCK_BYTES
from mx.core.pages import Pages, check_page
from mx.core.read_depth import MOST_READS, ReadDepth
from mx.core.types import Layout, Manifest
from mx.errors import CheckpointError, ClosedError, MxError, NotAllowedError, PathError, another
from mx.runtime import unexpected
from mx.storage.disk_file import DIRECT_ALIGNMENT_BYTES
from mx.storage.header import StoredBytes
from mx.storage.safetensors import Checkpoint
from mx.storage.stages import HASH, PLACE, READ, WAIT, StageClock, Stages
from mx.text import shown
from mx.threads import Threads
from mx.transport import Piece, Read, Span, View, host_view
from mx.units import MIB

#: The longest read of a file.
RUN_BYTES = 4 * MIB
#: What is read and thrown away between two tensors rather than make a read of its own for each.
_GAP_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Bit:
    """Bytes of one tensor: `nbytes` from `position` in file number `file`."""

    file: int
    position: int
    nbytes: int
    view: View


class StoredModel:
    """A checkpoint's open files, by the places of their tensors in a layout's arena. Reads are
    thread-safe; `close` it when none is running. `files` are those of the checkpoint."""

    def __init__(self, checkpoint: Checkpoint, layout: Layout, where: str) -> None:
        """
        Args:
            checkpoint: The checkpoint.
            layout: The layout of the model that is pulled.
            where: Names the checkpoint in errors.

        Raises:
            CheckpointError: It does not hold the layout's tensors.
            MxError: As `StoredFile.open`.
        """
        found = {
            tensor.spec.name: (number, tensor)
            for number, file in enumerate(checkpoint.files)
            for tensor in file.tensors
        }
        self._places: list[tuple[int, int, int, int]] = []  # arena offset, bytes, file, position
        for there in layout.tensors:
            number, tensor = found.pop(there.name, (0, None))
            if tensor is None:
                raise _other(where, f"it has no tensor {shown(there.name)}")
            if (there.dtype, there.shape) != (tensor.spec.dtype, tensor.spec.shape):
                raise _other(where, f"its {shown(there.name)} has another dtype or shape")
            if there.stride != tensor.spec.stride:
                raise _other(where, f"{shown(there.name)} is not in row-major order in memory")
            if there.nbytes:
                place = layout.layers[there.layer].arena_offset + there.offset
                self._places.append((place, there.nbytes, number, tensor.begin))
        self._places.sort()
        self._begins = [place for place, *_ in self._places]
        self.files: list[StoredBytes] = []
        with Undo(self.close):
            for file in checkpoint.files:
                self.files.append(file.open())
        #: How many reads may be in flight: a store says it itself.
        self.device = self.files[0].device
        self.most_threads = MOST_READS if isinstance(self.device, int) else checkpoint.threads

    def read(
        self,
        pieces: Sequence[tuple[int, View]],
        buffer: memoryview,
        landed: Callable[[int], None] = lambda nbytes: None,
        clock: StageClock | None = None,
    ) -> None:
        """Read bytes of the arena.

        Args:
            pieces: Offsets in the arena, and the views to fill; without padding.
            buffer: Memory of this thread's own, page-aligned, of `buffer_nbytes`.
            landed: Called with the bytes so far, in the order of the pieces.
            clock: This thread's.

        Raises:
            MxError: As `StoredBytes.window`.
        """
        done_nbytes, clock = 0, clock or StageClock()
        for run in self.runs(pieces):
            done_nbytes += self._take(run, buffer, clock)
            landed(done_nbytes)

    def runs(
        self, pieces: Sequence[tuple[int, View]], most_nbytes: int = RUN_BYTES
    ) -> Iterator[list[Bit]]:
        """Yield what is read at once, in the order of the pieces: it is of one file, and with the
        gaps no longer than `most_nbytes`."""
        run: list[Bit] = []
        for bit in self._bits(pieces, most_nbytes):
            if run and not self._fits(run, bit, most_nbytes):
                yield run
                run = []
            run.append(bit)
        if run:
            yield run

    def _bits(self, pieces: Sequence[tuple[int, View]], most_nbytes: int) -> Iterator[Bit]:
        for offset, view in pieces:
            end, at = offset + len(view), offset
            number = bisect_right(self._begins, offset) - 1
            while at < end:
                place, nbytes, file, position = self._places[number]
                if not place <= at < place + nbytes:
                    raise ValueError(f"no tensor is at {at} of the arena")
                take = min(end - at, place + nbytes - at, most_nbytes)
                here = view[at - offset : at - offset + take]
                yield Bit(file, position + at - place, take, here)
                at += take
                number += at == place + nbytes

    @staticmethod
    def _fits(run: list[Bit], bit: Bit, most_nbytes: int) -> bool:
        """Return True if the bit can be read together with those before it."""
        first, last = run[0], run[-1]
        gap = bit.position - (last.position + last.nbytes)
        fits = bit.position + bit.nbytes - first.position <= most_nbytes
        return bit.file == first.file and 0 <= gap <= _GAP_BYTES and fits

    def _take(self, run: list[Bit], buffer: memoryview, clock: StageClock) -> int:
        begin, end = run[0].position, run[-1].position + run[-1].nbytes
        file = self.files[run[0].file]
        clock.lap(HASH)  # by what was told of the bytes before
        clock.drive = file.device
        with file.window(begin, end, buffer) as window:
            clock.lap(READ, end - begin)
            for bit in run:
                first = bit.position - begin
                with window[first : first + bit.nbytes] as data:
                    copy_bytes(host_view(bit.view), data)
        clock.lap(PLACE, nbytes := sum(bit.nbytes for bit in run))
        return nbytes

    def check_unchanged(self) -> None:
        """Raise CheckpointError if a file has changed since its header was read."""
        for file in self.files:
            file.check_unchanged()

    def close(self) -> None:
        """Close the files. Idempotent."""
        while self.files:
            self.files.pop().close()


def _other(where: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{where} is another model than the sources describe: {what}",
        hint="name the checkpoint that the sources were started from",
    )


def read_buffer() -> mmap.mmap:
    """Return memory for a thread that reads a `StoredModel`."""
    return mmap.mmap(-1, RUN_BYTES + 2 * DIRECT_ALIGNMENT_BYTES)


def find_pages(
    model: StoredModel,
    manifest: Manifest,
    pages: Pages,
    put: Callable[[int, bytes], None],
    *,
    threads: int,
    cancelled: Callable[[], bool],
) -> None:
    """Hash the layers of which no source has given the blocks' digests. Blocks.

    Args:
        model: The stored model.
        manifest: The model's manifest.
        pages: The digests that are known.
        put: Called with each layer and its digests, which were found right.
        threads: How many threads read.
        cancelled: Called now and then; returning True stops it.

    Raises:
        DigestError: The stored model is not the manifest's.
        ClosedError: `cancelled` returned True.
        MxError: As `StoredBytes.window`.
    """
    local = threading.local()

    def digest(place: int, nbytes: int) -> bytes:
        if cancelled():
            raise ClosedError("reading was cancelled")
        if not hasattr(local, "memory"):
            local.memory = read_buffer(), bytearray(BLOCK_BYTES)
        ring, block = local.memory
        with memoryview(ring) as buffer, memoryview(block)[:nbytes] as view:
            model.read([(place, view)], buffer)
            return block_digest(view)

    with Threads(threads, "mx-store") as pool:
        for layer in pages.missing:
            place = manifest.layout.layers[layer]
            blocks = [
                (place.arena_offset + at, min(BLOCK_BYTES, offset + nbytes - at))
                for offset, nbytes in place.extents
                for at in range(offset, offset + nbytes, BLOCK_BYTES)
            ]
            page = b"".join(pool.map(digest, *zip(*blocks, strict=True))) if blocks else b""
            check_page(manifest, layer, page)
            put(layer, page)


class StoreSession:
    """A `mx.transport.Session` that reads a stored model. Its owner closes the model after `join`.

    `failure` is what ended it, `stages` has where its threads' time went.
    `on_idle` is called on any thread when nothing is left to read.
    """

    def __init__(self, model: StoredModel, threads: int, on_idle: Callable[[], None]) -> None:
        self.stages = Stages()
        self.depth = 2 * threads  # half of it is always in flight
        self.failure: MxError | None = None
        self._model, self._on_idle = model, on_idle
        self._queue: deque[Read] = deque()
        self._changed = threading.Condition()
        self._running = 0
        self._closed = False
        self._readers = ReadDepth(threads, max(threads, model.most_threads), time.monotonic())
        self._threads: list[threading.Thread] = []
        self._start(threads)

    def _start(self, count: int) -> None:
        for _ in range(count):
            self._threads.append(threading.Thread(target=self._work, name="mx-store", daemon=True))
            self._threads[-1].start()

    def adopt(self, arena: Span) -> None:
        """Do nothing: there is nothing to register."""

    def attach(self, region: int) -> Span:
        raise NotAllowedError("a stored checkpoint is read, not attached")

    def read(self, reads: Sequence[Read]) -> None:
        """Enqueue reads. Raises ClosedError."""
        with self._changed:
            if self._closed:
                raise ClosedError("the store's session is closed")
            self._queue.extend(reads)
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def idle(self) -> bool:
        """True while nothing is being read, nor is to be."""
        with self._changed:
            return not self._queue and not self._running

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self, timeout_s: float | None = None) -> bool:
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        ring = read_buffer()
        with self.stages.clock(self._model.device) as clock, ring, memoryview(ring) as buffer:
            while (read := self._next()) is not None:
                clock.lap(WAIT)
                nbytes = sum(len(piece.view) for piece in read.pieces)
                try:
                    self._read(read, buffer, clock)
                finally:
                    del read
                    clock.lap(HASH, nbytes)
                    goes_on = self._landed(nbytes, clock)
                if not goes_on:
                    return

    def _landed(self, nbytes: int, clock: StageClock) -> bool:
        """Return True if the thread is to read on."""
        waited_s, clock.waited_s = clock.waited_s, 0.0
        with self._changed:
            self._running -= 1
            idle = not self._queue and not self._running
            count = self._readers.landed(nbytes, waited_s, time.monotonic())
            self.depth = 2 * self._readers.depth
            self._start(0 if self._closed else count - 1)
        if idle:
            self._on_idle()
        return count > 0

    def _next(self) -> Read | None:
        with self._changed:
            while not self._queue and not self._closed:
                self._changed.wait()
            if not self._queue:
                return None
            self._running += 1
            return self._queue.popleft()

    def _read(self, read: Read, buffer: memoryview, clock: StageClock) -> None:
        try:
            if self._closed:
                raise ClosedError("the store's session is closed")
            if self.failure is not None:
                raise another(self.failure)
            self._model.read([_place(p) for p in read.pieces], buffer, read.sink.landed, clock)
        except BaseException as error:  # noqa: BLE001 - reported
            failure = unexpected(error)
            if not isinstance(failure, ClosedError):
                self.failure = self.failure or failure
                failure = PathError(failure.message)
            # Its traceback refers to the views.
            read.sink.failed(failure.with_traceback(None))
        else:
            read.sink.done()


def _place(piece: Piece) -> tuple[int, View]:
    return piece.region_offset, piece.view
