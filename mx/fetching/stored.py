"""Reads a stored checkpoint through a pull's transfer, as if it were one more source: what peers
have brought stays, and each block is verified against the manifest."""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mx.buffers import copy_bytes
from mx.core.digest import block_digest
from mx.core.grid import BLOCK_BYTES
from mx.core.pages import Pages, check_page
from mx.core.types import Layout, Manifest
from mx.errors import CheckpointError, ClosedError, MxError, NotAllowedError, PathError, another
from mx.runtime import unexpected
from mx.storage.disk_file import DIRECT_ALIGNMENT_BYTES
from mx.storage.header import StoredBytes
from mx.storage.safetensors import Checkpoint
from mx.text import shown
from mx.threads import Threads
from mx.transport import Piece, Read, Span, View, host_view
from mx.units import MIB

#: The longest read of a file.
_RUN_BYTES = 4 * MIB
#: What is read and thrown away between two tensors rather than make a read of its own for each.
_GAP_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class _Bit:
    """Bytes of one tensor: `nbytes` from `position` in file number `file`."""

    file: int
    position: int
    nbytes: int
    view: memoryview


class StoredModel:
    """A checkpoint's open files, by the places of their tensors in a layout's arena. Reads are
    thread-safe; `close` it when none is running."""

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
            if there.stride:
                raise _other(where, f"{shown(there.name)} is not in row-major order in memory")
            if there.nbytes:
                place = layout.layers[there.layer].arena_offset + there.offset
                self._places.append((place, there.nbytes, number, tensor.begin))
        self._places.sort()
        self._begins = [place for place, *_ in self._places]
        self._files: list[StoredBytes] = []
        try:
            for file in checkpoint.files:
                self._files.append(file.open())
        except BaseException:
            self.close()
            raise

    def read(
        self,
        pieces: Sequence[tuple[int, View]],
        buffer: memoryview,
        landed: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """Read bytes of the arena.

        Args:
            pieces: Offsets in the arena, and the views to fill; without padding.
            buffer: Memory of this thread's own, page-aligned, of `buffer_nbytes`.
            landed: Called with the bytes so far, in the order of the pieces.

        Raises:
            MxError: As `StoredBytes.window`.
        """
        run: list[_Bit] = []
        done_nbytes = 0
        for bit in self._bits(pieces):
            if run and not self._fits(run, bit):
                done_nbytes += self._take(run, buffer)
                landed(done_nbytes)
                run = []
            run.append(bit)
        if run:
            done_nbytes += self._take(run, buffer)
        landed(done_nbytes)

    def _bits(self, pieces: Sequence[tuple[int, View]]) -> Iterator[_Bit]:
        for offset, view in pieces:
            end, at = offset + len(view), offset
            number = bisect_right(self._begins, offset) - 1
            while at < end:
                place, nbytes, file, position = self._places[number]
                if not place <= at < place + nbytes:
                    raise ValueError(f"no tensor is at {at} of the arena")
                take = min(end - at, place + nbytes - at, _RUN_BYTES)
                here = host_view(view[at - offset : at - offset + take])
                yield _Bit(file, position + at - place, take, here)
                at += take
                number += at == place + nbytes

    @staticmethod
    def _fits(run: list[_Bit], bit: _Bit) -> bool:
        """Return True if the bit can be read together with those before it."""
        first, last = run[0], run[-1]
        gap = bit.position - (last.position + last.nbytes)
        fits = bit.position + bit.nbytes - first.position <= _RUN_BYTES
        return bit.file == first.file and 0 <= gap <= _GAP_BYTES and fits

    def _take(self, run: list[_Bit], buffer: memoryview) -> int:
        begin, end = run[0].position, run[-1].position + run[-1].nbytes
        with self._files[run[0].file].window(begin, end, buffer) as window:
            for bit in run:
                first = bit.position - begin
                with window[first : first + bit.nbytes] as data:
                    copy_bytes(bit.view, data)
        return sum(bit.nbytes for bit in run)

    def check_unchanged(self) -> None:
        """Raise CheckpointError if a file has changed since its header was read."""
        for file in self._files:
            file.check_unchanged()

    def close(self) -> None:
        """Close the files. Idempotent."""
        while self._files:
            self._files.pop().close()


def _other(where: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{where} is another model than the sources describe: {what}",
        hint="name the checkpoint that the sources were started from",
    )


def _buffer() -> mmap.mmap:
    return mmap.mmap(-1, _RUN_BYTES + 2 * DIRECT_ALIGNMENT_BYTES)


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
            local.memory = _buffer(), bytearray(BLOCK_BYTES)
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

    `failure` is what ended it. `on_idle` is called on any thread when nothing is left to read.
    """

    def __init__(self, model: StoredModel, threads: int, on_idle: Callable[[], None]) -> None:
        self.depth = 2 * threads  # half of it is always in flight
        self.failure: MxError | None = None
        self._model, self._on_idle = model, on_idle
        self._queue: deque[Read] = deque()
        self._changed = threading.Condition()
        self._running = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"mx-store-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

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
        with _buffer() as ring, memoryview(ring) as buffer:
            while (read := self._next()) is not None:
                try:
                    self._read(read, buffer)
                finally:
                    del read
                    with self._changed:
                        self._running -= 1
                        idle = not self._queue and not self._running
                    if idle:
                        self._on_idle()

    def _next(self) -> Read | None:
        with self._changed:
            while not self._queue and not self._closed:
                self._changed.wait()
            if not self._queue:
                return None
            self._running += 1
            return self._queue.popleft()

    def _read(self, read: Read, buffer: memoryview) -> None:
        try:
            if self._closed:
                raise ClosedError("the store's session is closed")
            if self.failure is not None:
                raise another(self.failure)
            self._model.read([_place(piece) for piece in read.pieces], buffer, read.sink.landed)
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
