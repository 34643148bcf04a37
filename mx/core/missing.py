"""Which parts of a pull are not being read yet: chunks, and pieces of chunks in whole blocks.
Pure."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator

from mx.core.grid import ChunkGrid
from mx.core.holdings import members
from mx.core.striping import Part
from mx.core.wanted import ASIDE_BYTES, WantedBlocks


class MissingChunks:
    """The chunks of which a part is missing: neither verified, nor being read. In ascending
    order."""

    def __init__(
        self, grid: ChunkGrid, wanted: WantedBlocks | None = None, first: WantedBlocks | None = None
    ) -> None:
        """At first all blocks are missing, or the wanted ones, or of these the ones in `first`."""
        self._grid = grid
        self._wanted = wanted
        self._sizes = grid.sizes
        self._chunks = deque(range(len(grid)))
        self._pieces: dict[int, list[Part]] = {}  # the missing pieces of a chunk, if not all
        self.nbytes = sum(grid.sizes)
        first = wanted if first is None else first
        if first is not None:
            self._chunks, self.nbytes = deque(first.chunks), first.nbytes
            for chunk in first.chunks:
                pieces = first.parts(chunk)
                if pieces != [Part(chunk, 0, self.blocks(chunk))]:
                    self._pieces[chunk] = pieces

    def chunks(self, among: int | None = None) -> Iterator[int]:
        """Return the chunks of which a part is missing, the lowest first; with `among`, a bit set,
        only those in it."""
        if among is None:
            return iter(self._chunks)
        return (chunk for chunk in members(among) if chunk in self)

    def nbytes_in(self, among: int | None) -> int:
        """Return how many bytes are missing; with `among`, a bit set, of these chunks only."""
        if among is None:
            return self.nbytes
        return sum(self._nbytes_of_chunk(chunk) for chunk in self.chunks(among))

    def _nbytes_of_chunk(self, chunk: int) -> int:
        pieces = self._pieces.get(chunk)
        return self._sizes[chunk] if pieces is None else sum(map(self.nbytes_of, pieces))

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def __contains__(self, chunk: int) -> bool:
        at = bisect.bisect_left(self._chunks, chunk)
        return at < len(self._chunks) and self._chunks[at] == chunk

    @property
    def first(self) -> int:
        """The lowest chunk; there must be one."""
        return self._chunks[0]

    def untouched(self, chunk: int) -> bool:
        """Return True if all of it is missing, and no part of it is being read."""
        return chunk in self and chunk not in self._pieces

    def blocks(self, chunk: int) -> int:
        """Return how many blocks the chunk has."""
        return self._grid.block_count(chunk)

    def nbytes_of(self, part: Part) -> int:
        """Return the part's payload, without padding."""
        return self._grid.part_nbytes(part.chunk, part.begin, part.end)

    def remove(self, chunk: int) -> None:
        """Remove a chunk all of which is missing."""
        self._remove(chunk)
        self.nbytes -= self._sizes[chunk]

    def give_back(self, part: Part) -> None:
        """Add a part that was cut, and is missing again."""
        at = bisect.bisect_left(self._chunks, part.chunk)
        if at == len(self._chunks) or self._chunks[at] != part.chunk:
            self._chunks.insert(at, part.chunk)
            if part.end - part.begin < self.blocks(part.chunk):
                self._pieces[part.chunk] = [part]
        else:
            self._pieces[part.chunk].append(part)
        self.nbytes += self.nbytes_of(part)

    def cut(self, chunk: int, nbytes: int) -> Part:
        """Remove and return a part at the front of a missing chunk.

        Args:
            chunk: The chunk.
            nbytes: At most so many bytes, in whole blocks, but one block at least.
        """
        pieces = self._pieces.pop(chunk, None)
        if pieces:
            pieces.sort(key=lambda piece: piece.begin, reverse=True)
            part = pieces.pop()
        else:
            pieces, part = [], Part(chunk, 0, self._grid.block_count(chunk))
        if self._wanted is not None and self._wanted.is_aside(part):
            nbytes = min(ASIDE_BYTES, nbytes)
        size = self._grid.part_nbytes(*part)
        if size > nbytes and (end := self._fitting(part, nbytes)) < part.end:
            pieces.append(Part(chunk, end, part.end))
            part = Part(chunk, part.begin, end)
            size = self._grid.part_nbytes(*part)
        if pieces:
            self._pieces[chunk] = pieces
        else:
            self._remove(chunk)
        self.nbytes -= size
        return part

    def _remove(self, chunk: int) -> None:
        if self._chunks[0] == chunk:  # mostly
            self._chunks.popleft()
        else:
            del self._chunks[bisect.bisect_left(self._chunks, chunk)]

    def _fitting(self, part: Part, nbytes: int) -> int:
        """Return the end of the blocks at the front of a larger part that have at most `nbytes`;
        one at least."""
        blocks = self._grid.blocks(part.chunk)
        end = part.begin + 1
        left = nbytes - blocks[part.begin][1]
        while end < part.end and blocks[end][1] <= left:
            left -= blocks[end][1]
            end += 1
        return end
