"""Which blocks of a model a pull of some of its tensors needs, chunk by chunk. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from mx.core.grid import BLOCK_BYTES, ChunkGrid, block_count
from mx.core.striping import Part

#: The most bytes of a part that is read aside: its buffer.
ASIDE_BYTES = 4 * BLOCK_BYTES


class BlockRange(NamedTuple):
    """Blocks `begin` to `end` (half-open), in one numbering. With `aside` they do not lie whole in
    the destination: they are read into a buffer, and copied from there once they are right."""

    begin: int
    end: int
    aside: bool


class WantedBlocks:
    """The blocks that a pull needs of each chunk. Immutable."""

    def __init__(self, grid: ChunkGrid, ranges: Mapping[int, Sequence[BlockRange]]) -> None:
        """
        Args:
            grid: The chunks.
            ranges: The blocks by chunk, numbered within it, ascending, without overlaps; ranges
                that touch differ in `aside`.
        """
        self._ranges = ranges
        self._aside = {c for c, found in ranges.items() if any(each.aside for each in found)}
        #: The chunks of which something is wanted, as a bit set.
        self.bits = sum(1 << chunk for chunk in ranges)
        #: The bytes of the wanted blocks, by layer.
        self.layer_nbytes = [0] * len(grid.layers)
        for chunk, found in ranges.items():
            self.layer_nbytes[grid.layer_of[chunk]] += sum(
                grid.part_nbytes(chunk, each.begin, each.end) for each in found
            )

    @property
    def chunks(self) -> list[int]:
        """The chunks of which something is wanted, ascending."""
        return sorted(self._ranges)

    @property
    def layers(self) -> list[int]:
        """The layers of which something is wanted, ascending."""
        return [layer for layer, nbytes in enumerate(self.layer_nbytes) if nbytes]

    @property
    def nbytes(self) -> int:
        """The bytes of the wanted blocks."""
        return sum(self.layer_nbytes)

    def parts(self, chunk: int) -> list[Part]:
        """Return the wanted blocks of a chunk, those read aside and others in parts of their
        own."""
        return [Part(chunk, each.begin, each.end) for each in self._ranges[chunk]]

    def mask(self, chunk: int) -> int:
        """Return the wanted blocks of a chunk as a bit set."""
        return sum((1 << each.end) - (1 << each.begin) for each in self._ranges.get(chunk, ()))

    def within(self, chunk: int, begin: int, end: int) -> list[BlockRange]:
        """Return the wanted ones of blocks `begin` to `end` of a chunk."""
        return [
            BlockRange(max(begin, each.begin), min(end, each.end), each.aside)
            for each in self._ranges.get(chunk, ())
            if each.begin < end and begin < each.end
        ]

    def block_count(self, chunk: int) -> int:
        """Return how many blocks of a chunk are wanted."""
        return sum(each.end - each.begin for each in self._ranges.get(chunk, ()))

    def needs_aside(self, chunk: int) -> bool:
        """Return True if some blocks of the chunk are read aside."""
        return chunk in self._aside

    def is_aside(self, part: Part) -> bool:
        """Return True if a part, of wanted blocks of one kind, is read aside."""
        if part.chunk not in self._aside:
            return False
        return any(
            each.aside and each.begin <= part.begin < each.end for each in self._ranges[part.chunk]
        )


def wanted_of(
    grid: ChunkGrid, layers: Mapping[int, Sequence[tuple[int, Sequence[BlockRange]]]]
) -> WantedBlocks:
    """Return the wanted blocks, chunk by chunk.

    Args:
        grid: The chunks.
        layers: For each layer of which something is wanted the tensors: their offsets in layer
            space, ascending, and their wanted blocks, numbered within the tensor.
    """
    ranges: dict[int, list[BlockRange]] = {}
    for layer, tensors in layers.items():
        extents = grid.layers[layer].extents
        before = list(accumulate((block_count(nbytes) for _, nbytes in extents), initial=0))
        chunks = grid.of_layer(layer)
        firsts = grid.first_block[chunks.start : chunks.stop]
        at = 0
        for offset, found in tensors:
            if not found:
                continue
            while extents[at][0] != offset or not extents[at][1]:
                at += 1
            for begin, end, aside in found:
                begin, end = before[at] + begin, before[at] + end
                while begin < end:
                    number = bisect_right(firsts, begin) - 1
                    chunk, first = chunks.start + number, firsts[number]
                    until = min(end, first + grid.block_count(chunk))
                    append(
                        ranges.setdefault(chunk, []),
                        BlockRange(begin - first, until - first, aside),
                    )
                    begin = until
    return WantedBlocks(grid, ranges)


def append(ranges: list[BlockRange], new: BlockRange) -> None:
    """Add a range behind the others."""
    if ranges and (ranges[-1].end, ranges[-1].aside) == (new.begin, new.aside):
        ranges[-1] = ranges[-1]._replace(end=new.end)
    else:
        ranges.append(new)
