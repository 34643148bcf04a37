"""Reads spans of one safetensors file to the places of their tensors in an arena."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mx.buffers import copy_bytes
from mx.core.grid import BLOCK_BYTES
from mx.core.types import Layout
from mx.errors import CapacityError
from mx.memory.huge import HugePages
from mx.storage.header import StoredFile
from mx.storage.stages import HASH, PLACE, READ, StageClock
from mx.views import HostView, ScatteredView, host_view

#: To give up the interpreter lock takes longer than to copy so few bytes.
_SHORT_BYTES = 16 * 1024

#: Called with a tensor's index in the layout, a block's number in the tensor, and its bytes.
BlockLanded = Callable[[int, int, memoryview], None]


class ArenaWriter:
    """Copies bytes to their places in an arena. Thread-safe.

    `view` is the arena. If it is a map of a memfd, `memfd` is that: a write to the file takes half
    the time of a copy into pages of the map that nothing has touched, since the kernel need neither
    clear nor map them; and its pages are huge ones where there are any. `copy` does the copying in
    place of all that, where only some bytes are wanted; `view` is scattered then.
    """

    def __init__(
        self,
        view: HostView,
        memfd: int | None = None,
        copy: Callable[[int, memoryview], None] | None = None,
    ) -> None:
        self.view, self.memfd, self._copy = view, memfd, copy
        #: Whether bytes are read into the view. Not where tensors lie in several places, which may
        #: overlap: what is hashed are a file's bytes.
        self.takes_views = memfd is None and copy is None and not isinstance(view, ScatteredView)
        self._huge_pages = None if memfd is None else HugePages(memfd, len(view))

    def write(self, place: int, data: memoryview) -> None:
        """Copy `data` to `place` in the arena, without the interpreter lock unless it is short.

        Raises:
            CapacityError: The system has no memory for it.
        """
        if self._copy is not None:
            self._copy(place, data)
            return
        end = place + data.nbytes
        if self._huge_pages is not None:
            self._huge_pages.prepare(place, end)
        if data.nbytes <= _SHORT_BYTES:
            host_view(self.view[place:end])[:] = data
            return
        if self.memfd is None:
            with host_view(self.view[place:end]) as here:
                copy_bytes(here, data)
            return
        try:
            while place < end:
                with data[data.nbytes - (end - place) :] as rest:
                    place += os.pwrite(self.memfd, rest, place)
        except OSError as error:
            raise CapacityError(
                f"the model's memory could not be written: {error.strerror}",
                hint="free memory or raise the container's limit",
            ) from error


@dataclass(frozen=True, slots=True)
class SpanPiece:
    """Blocks [offset, offset + nbytes) of the layout's tensor `index`.

    They are at `position` in the file and belong at `place` in the arena.
    """

    index: int
    offset: int
    nbytes: int
    position: int
    place: int


class SpanReader:
    """One open file. `read` is thread-safe; `close` it when no read is running.

    `index_of` maps the names of the tensors that no other file is read for to their indices in the
    layout; those that this file holds are removed from it. `arena` is used until `close`.

    Raises:
        CheckpointError: The file is gone, or changed since its header was read.
        ConfigError: This user may not read the file.
        LocalError: The disk fails.
    """

    def __init__(
        self, file: StoredFile, layout: Layout, index_of: dict[str, int], arena: ArenaWriter
    ) -> None:
        self._arena = arena
        self._layer_of = [tensor.layer for tensor in layout.tensors]
        # (index in the layout, first byte in the file, bytes, place in the arena)
        self._tensors: list[tuple[int, int, int, int]] = []
        for tensor in file.tensors:
            index = index_of.pop(tensor.spec.name, None)
            if index is None:  # an earlier file holds it, too
                continue
            there = layout.tensors[index]
            if (there.dtype, there.shape, there.stride) != tensor.spec[1:]:
                raise ValueError(f"the layout has another {tensor.spec.name!r}")
            if there.nbytes:
                place = layout.layers[there.layer].arena_offset + there.offset
                self._tensors.append((index, tensor.begin, there.nbytes, place))
        self._begins = [begin for _, begin, _, _ in self._tensors]
        self._bytes = file.open()
        self.device = self._bytes.device

    def spans(self, span_nbytes: int, cut_nbytes: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield the tensors' part of the file as [start, end) ranges of whole blocks.

        A block that two threads read half each could be hashed only after both, when at least one
        half has left the cache.

        Args:
            span_nbytes: The length of the longest range, at least a block's.
            cut_nbytes: A range of this length or more ends where a layer does; shorter ones, and
                all if it is None, hold what follows in the file, too.
        """
        if span_nbytes < BLOCK_BYTES:
            raise ValueError(f"{span_nbytes} bytes do not hold a block")
        start = at = self._begins[0] if self._begins else 0
        layer = -1
        for index, begin, nbytes, _ in self._tensors:
            before, layer = layer, self._layer_of[index]
            ends = cut_nbytes is not None and layer != before and at - start >= cut_nbytes
            if begin != at or ends:  # what is between is read from another file
                if start < at:
                    yield start, at
                start = at = begin
            end = begin + nbytes
            while at < end:
                take = min(end - at, start + span_nbytes - at)
                if take < end - at:
                    take -= take % BLOCK_BYTES
                if not take:
                    yield start, at
                    start = at
                at += take
        if start < at:
            yield start, at

    def first_layer(self, span: tuple[int, int]) -> int:
        """Return the first layer that has bytes in a range that `spans` yielded."""
        return min(self._layer_of[piece.index] for piece in self._pieces(*span))

    def read(
        self, span: tuple[int, int], buffer: memoryview, landed: BlockLanded, clock: StageClock
    ) -> None:
        """Read a span, put its blocks in place, and announce each while it is in the cache.

        Args:
            span: A range that `spans` yielded.
            buffer: Memory of this thread's own, page-aligned, and longer than a span by
                two times `DIRECT_ALIGNMENT_BYTES`.
            landed: Called with each block that is in place. Its bytes may be in `buffer`, so it
                must not keep them.
            clock: This thread's.

        Raises:
            CheckpointError: The file has become too short.
            LocalError: The disk fails.
            CapacityError: The system has no memory for the arena.
        """
        start, end = span
        pieces = list(self._pieces(start, end))
        views: list[memoryview] = []
        try:
            for piece in pieces if self._arena.takes_views else ():
                place = piece.place
                views.append(host_view(self._arena.view[place : place + piece.nbytes]))
            places = [(each.position, view) for each, view in zip(pieces, views, strict=False)]
            window, there = self._bytes.scatter(start, end, buffer, places)
            clock.lap(READ, end - start)
            with window:
                for number, piece in enumerate(pieces):
                    first, inside = piece.position - start, there[number] if there else (0, 0)
                    with window[first : first + piece.nbytes] as rest:
                        data = views[number] if inside[1] else rest
                        self._land(piece, data, inside, rest, landed, clock)
        finally:
            for view in views:
                view.release()

    def _land(
        self,
        piece: SpanPiece,
        data: memoryview,
        inside: tuple[int, int],
        rest: memoryview,
        landed: BlockLanded,
        clock: StageClock,
    ) -> None:
        """Put what is not `inside`, in place already, there; and announce the blocks of `data`."""
        for at in range(0, piece.nbytes, BLOCK_BYTES):
            end = min(at + BLOCK_BYTES, piece.nbytes)
            for low, high in ((at, min(end, inside[0])), (max(at, inside[1]), end)):
                if low < high:
                    with rest[low:high] as copied:
                        self._arena.write(piece.place + low, copied)
                    clock.lap(PLACE, high - low)
            with data[at:end] as block:
                landed(piece.index, (piece.offset + at) // BLOCK_BYTES, block)
            clock.lap(HASH, end - at)

    def check_unchanged(self) -> None:
        """Raise CheckpointError if the file changed since its header was read."""
        self._bytes.check_unchanged()

    def stamp(self) -> tuple[int, int, int, int, int] | None:
        """Return the file's stamp, as `StoredBytes.stamp`."""
        return self._bytes.stamp()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._bytes.close()

    def _pieces(self, start: int, end: int) -> Iterator[SpanPiece]:
        for i in range(bisect_right(self._begins, start) - 1, len(self._tensors)):
            index, begin, nbytes, place = self._tensors[i]
            if begin >= end:
                return
            low = max(start, begin)
            high = min(end, begin + nbytes)
            offset = low - begin
            yield SpanPiece(index, offset, high - low, low, place + offset)
