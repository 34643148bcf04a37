"""How a model is cut into blocks and chunks. Pure arithmetic.

A *block* is 1 MiB of one tensor's bytes, a tensor's last block being shorter: the leaf of the hash
tree. A *chunk* is a run of whole blocks of one layer, in layer order: the unit of request,
verification and retry. Where chunks begin follows from the layout and the chunk size alone: a chunk
takes blocks for as long as its payload stays within the chunk size.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mx.units import MIB, align_up

BLOCK_BYTES = MIB
#: The chunk size is this part of the model, within the next two.
CHUNKS = 64
LEAST_CHUNK_BYTES = MIB
MOST_CHUNK_BYTES = 16 * MIB

#: Grids keep the blocks of so many chunks.
_KEPT = 256


def chunk_nbytes_of(payload_nbytes: int) -> int:
    """Return the chunk size of a model with so many bytes: a 64th, within 1 to 16 MiB."""
    wanted = align_up(-(-payload_nbytes // CHUNKS), BLOCK_BYTES)
    return min(max(wanted, LEAST_CHUNK_BYTES), MOST_CHUNK_BYTES)


def block_count(nbytes: int) -> int:
    """Return how many blocks a tensor of this length has."""
    return -(-nbytes // BLOCK_BYTES)


class Range(NamedTuple):
    """Bytes [begin, end) of a layer space, from the start of one block to the end of another.

    It may hold padding between tensors.
    """

    layer: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer: the unit of readiness. `arena_offset` is its place in an arena, `nbytes` the size
    of its space.

    `extents` are the (offset, nbytes) of its tensors in order, empty ones too; the bytes between
    them are padding. `first_tensor` is the index of the first one in `Layout.tensors`.
    """

    index: int
    name: str
    nbytes: int
    arena_offset: int
    extents: tuple[tuple[int, int], ...]
    first_tensor: int


class ChunkGrid:
    """Chunk arithmetic of one layout and chunk size. Building it costs O(chunks + tensors)."""

    def __init__(self, layers: Sequence[Layer], chunk_nbytes: int) -> None:
        """
        Args:
            layers: Those of the layout.
            chunk_nbytes: The chunk size, a positive multiple of `BLOCK_BYTES`.
        """
        if chunk_nbytes <= 0 or chunk_nbytes % BLOCK_BYTES:
            raise ValueError(f"chunk size {chunk_nbytes} is not a multiple of {BLOCK_BYTES}")
        self.layers = layers
        self.chunk_nbytes = chunk_nbytes
        #: first_chunk[i] is layer i's first chunk; the last entry is the number of chunks.
        self.first_chunk: list[int] = [0]
        #: layer_of[i] is the layer of chunk i.
        self.layer_of: list[int] = []
        #: sizes[i] is the number of payload bytes of chunk i, without padding.
        self.sizes: list[int] = []
        #: first_block[i] is the number of blocks that chunk i's layer has before it.
        self.first_block: list[int] = []
        #: layer_blocks[i] is the number of blocks of layer i.
        self.layer_blocks: list[int] = []
        #: first_of_layer[i] is the number of blocks before layer i; the last entry is that of all.
        self.first_of_layer: list[int] = [0]
        self._begins: list[int] = []  # of each chunk, in layer space
        self._ends: list[int] = []
        self._counts: list[int] = []  # of each chunk's blocks
        self._blocks: dict[int, tuple[tuple[int, int], ...]] = {}
        for layer in layers:
            self.layer_blocks.append(self._cut(layer.extents))
            self.layer_of += [layer.index] * (len(self.sizes) - len(self.layer_of))
            self.first_chunk.append(len(self.sizes))
            self.first_of_layer.append(self.first_of_layer[-1] + self.layer_blocks[-1])
            firsts = self.first_block[self.first_chunk[-2] :]
            self._counts += map(int.__sub__, [*firsts[1:], self.layer_blocks[-1]], firsts)

    def _cut(self, extents: Iterable[tuple[int, int]]) -> int:
        """Append the chunks of one layer. Returns the number of its blocks."""
        begins, ends, sizes, first_block = self._begins, self._ends, self.sizes, self.first_block
        block = room = size = end = 0  # `size` and `end` are those of the chunk that is open
        for at, nbytes in extents:
            while nbytes > room:
                # The chunk takes the whole blocks that it has room for; then it is full.
                take = room - room % BLOCK_BYTES
                if take:
                    at += take
                    nbytes -= take
                    block += take // BLOCK_BYTES
                    size += take
                    end = at
                if size:
                    sizes.append(size)
                    ends.append(end)
                begins.append(at)
                first_block.append(block)
                room, size = self.chunk_nbytes, 0
            if nbytes:
                room -= nbytes
                block -= -nbytes // BLOCK_BYTES
                size += nbytes
                end = at + nbytes
        if size:
            sizes.append(size)
            ends.append(end)
        return block

    def __len__(self) -> int:
        return len(self.sizes)

    def of_layer(self, layer: int) -> range:
        """Return the indices of a layer's chunks."""
        return range(self.first_chunk[layer], self.first_chunk[layer + 1])

    def chunk(self, index: int) -> Range:
        """Return the place of a chunk."""
        return Range(self.layer_of[index], self._begins[index], self._ends[index])

    def chunks_of(self, layer: int, begin: int, end: int) -> range:
        """Return the chunks that bytes [begin, end) of a layer's space touch."""
        chunks = self.of_layer(layer)
        if begin >= end or not chunks:
            return range(0)
        first = bisect_right(self._ends, begin, chunks.start, chunks.stop)
        return range(first, bisect_left(self._begins, end, first, chunks.stop))

    def blocks(self, index: int) -> tuple[tuple[int, int], ...]:
        """Return the blocks of a chunk, as (offset in layer space, nbytes), ascending."""
        found = self._blocks.get(index)
        if found is None:
            found = tuple(self._cut_blocks(index))
            if len(self._blocks) >= _KEPT:
                self._blocks.clear()
            self._blocks[index] = found
        return found

    def block_count(self, index: int) -> int:
        """Return how many blocks a chunk has."""
        return self._counts[index]

    def part(self, index: int, begin: int, end: int) -> Range:
        """Return the place of blocks `begin` to `end` (half-open) of a chunk."""
        if begin == 0 and end == self._counts[index]:
            return self.chunk(index)
        blocks = self.blocks(index)
        return Range(self.layer_of[index], blocks[begin][0], sum(blocks[end - 1]))

    def row(self, index: int, block: int) -> int:
        """Return the number of a chunk's block among all blocks of the model."""
        return self.first_of_layer[self.layer_of[index]] + self.first_block[index] + block

    def follows(self, before: tuple[int, int, int], part: tuple[int, int, int]) -> bool:
        """Return True if a part, (chunk, begin, end), begins where another one ends."""
        last, _, end = before
        index, begin, _ = part
        if index == last:
            return begin == end
        return index == last + 1 and begin == 0 and end == self._counts[last]

    def part_nbytes(self, index: int, begin: int, end: int) -> int:
        """Return the payload bytes of blocks `begin` to `end` of a chunk."""
        if begin == 0 and end == self._counts[index]:
            return self.sizes[index]
        return sum(nbytes for _, nbytes in self.blocks(index)[begin:end])

    def _cut_blocks(self, index: int) -> list[tuple[int, int]]:
        begin, end = self._begins[index], self._ends[index]
        extents = self.layers[self.layer_of[index]].extents
        found = []
        for at in range(bisect_right(extents, (begin, 1 << 62)) - 1, len(extents)):
            offset, nbytes = extents[at]
            if offset >= end:
                break
            low, high = max(offset, begin), min(offset + nbytes, end)
            while high - low > BLOCK_BYTES:
                found.append((low, BLOCK_BYTES))
                low += BLOCK_BYTES
            if low < high:
                found.append((low, high - low))
        return found


def runs_of(blocks: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the bytes of ascending blocks, as (offset, nbytes), in as few pieces as possible."""
    found: list[tuple[int, int]] = []
    start = until = -1
    for offset, nbytes in blocks:
        if offset != until:
            if start < until:
                found.append((start, until - start))
            start = offset
        until = offset + nbytes
    if start < until:
        found.append((start, until - start))
    return found
