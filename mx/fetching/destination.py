"""Where the parts of a transfer land: in their place in the arena, or aside, in a buffer from which
what is wanted is copied to its place."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mx.core.grid import ChunkGrid, runs_of
from mx.core.striping import Part
from mx.core.wanted import ASIDE_BYTES, WantedBlocks
from mx.memory.subset import SubsetMemory
from mx.transport import Piece, ScatteredView, Span, View, contiguous
from mx.views import cut


@dataclass(slots=True, eq=False)
class PartMemory:
    """The memory in which one part lands: its blocks, and the pieces that a session reads into.
    `buffer` holds a part that is read aside, until it is freed."""

    part: Part
    blocks: Sequence[Span]
    pieces: Sequence[Piece]
    buffer: Span | None


class Destination:
    """The memory that one transfer fills. Thread-safe.

    Its lock guards the free buffers alone. A part has its memory to itself from `land` to `free`,
    and arena and subset are dropped when nothing lands any more: they need no lock.
    """

    def __init__(
        self, grid: ChunkGrid, arena: View, subset: tuple[SubsetMemory, WantedBlocks] | None
    ) -> None:
        """
        Args:
            grid: How the model is cut into chunks.
            arena: Its memory, each tensor in one piece.
            subset: The memory of some tensors, whose view `arena` is, and the blocks to read for
                them; None: all.
        """
        self.arena = arena
        self._grid = grid
        self._subset = None if subset is None else subset[0]
        self._wanted = None if subset is None else subset[1]
        self._lock = threading.Lock()
        self._free: list[Span] = []  # buffers that no part uses

    def land(self, part: Part) -> PartMemory:
        """Return the memory in which a part is to land."""
        base, places = self._places(part)
        runs = places if len(places) == 1 else runs_of(places)
        buffer = None if self._wanted is None else self._buffer(part)
        views: Sequence[View]
        if buffer is not None:
            blocks = _one_after_another(buffer, places)
            views = _one_after_another(buffer, runs)
        else:
            blocks = self._spans(base, places)
            views = blocks if len(runs) == len(places) else cut(self.arena, runs, base)
        # The source's region is laid out as this arena is.
        pieces: list[Piece] = []
        for view in views:
            pieces.append(Piece(0, base + runs[len(pieces)][0], view))
        return PartMemory(part, blocks, pieces, buffer)

    def land_trip(self, parts: Iterable[Part]) -> list[Piece]:
        """Return the memory in which a run of parts is to land in its place: adjacent bytes, also
        of several parts, as one piece."""
        runs: list[tuple[int, int]] = []
        for part in parts:
            base, places = self._places(part)
            runs += ((base + offset, nbytes) for offset, nbytes in runs_of(places))
        runs = runs_of(runs)
        views = cut(self.arena, runs)
        return [Piece(0, at, view) for (at, _), view in zip(runs, views, strict=True)]

    def blocks(self, part: Part) -> list[Span]:
        """Return the blocks of a part in their place."""
        return self._spans(*self._places(part))

    def copy_out(self, landing: PartMemory) -> None:
        """Copy what is wanted of a part that was read aside to its place."""
        self._write(landing.part, landing.blocks)

    def write(self, part: Part, data: memoryview) -> None:
        """Scatter a part's wanted blocks to their destinations."""
        self._write(part, _one_after_another(data, self._places(part)[1]))

    def free(self, landing: PartMemory) -> None:
        """Keep the buffer of a part for others: nothing writes there any more. Idempotent."""
        buffer, landing.buffer = landing.buffer, None
        if buffer is not None:
            with self._lock:
                self._free.append(buffer)

    def forget(self) -> None:
        """Drop all memory, once nothing lands any more."""
        self.arena = memoryview(b"")
        with self._lock:
            self._free.clear()
        if self._subset is not None:
            self._subset.forget()

    def _buffer(self, part: Part) -> Span | None:
        """Return a buffer for a part that is read aside; None for others."""
        if self._wanted is None or not self._wanted.is_aside(part):
            return None
        with self._lock:
            if self._free:
                return self._free.pop()
        assert self._subset is not None
        return self._subset.buffer(ASIDE_BYTES)

    def _places(self, part: Part) -> tuple[int, Sequence[tuple[int, int]]]:
        """Return where the part's layer begins in the arena, and its blocks in layer space."""
        chunk, begin, end = part
        base = self._grid.layers[self._grid.layer_of[chunk]].arena_offset
        return base, self._grid.blocks(chunk)[begin:end]

    def _spans(self, base: int, places: Sequence[tuple[int, int]]) -> list[Span]:
        arena = self.arena
        if isinstance(arena, ScatteredView):
            return list(map(contiguous, arena.cut(places, base)))
        return [arena[base + offset : base + offset + nbytes] for offset, nbytes in places]

    def _write(self, part: Part, blocks: Iterable[Span]) -> None:
        assert self._subset is not None
        base, places = self._places(part)
        for (offset, _), block in zip(places, blocks, strict=True):
            self._subset.write(base + offset, block)


def _one_after_another(data: Span, places: Iterable[tuple[int, int]]) -> list[Span]:
    """Return views as long as these (offset, nbytes), from the start of some bytes."""
    at = 0
    found = []
    for _, nbytes in places:
        found.append(data[at : at + nbytes])
        at += nbytes
    return found
