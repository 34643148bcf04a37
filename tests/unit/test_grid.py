"""Chunk arithmetic, compared with an enumeration of all blocks that knows no arithmetic."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mx.core.grid import (
    BLOCK_BYTES,
    ChunkGrid,
    Range,
    block_count,
    chunk_nbytes_of,
    runs_of,
)
from mx.core.layout import build_layout
from mx.core.types import Layout
from mx.units import MIB
from tests.support import naive_identity as naive
from tests.support.identity_vectors import stored

VECTORS = stored()

# Lengths about every border, of blocks and of the places of tensors.
LENGTHS = st.sampled_from(
    [0, 0, 1, 255, 256, 257, 1000, MIB // 2, MIB - 256, MIB - 1, MIB, MIB + 1, 2 * MIB, 3 * MIB + 7]
) | st.integers(0, 5 * MIB)
LAYERS = st.lists(st.lists(LENGTHS, min_size=1, max_size=8), min_size=1, max_size=4)
CHUNK_SIZES = st.integers(1, 5).map(lambda n: n * MIB) | st.just(16 * MIB)


def layout_of(layers: list[list[int]]) -> Layout:
    """Return a layout with tensors of these lengths."""
    lengths = [length for members in layers for length in members]
    named = [(f"layer.{i}", len(members)) for i, members in enumerate(layers)]
    kinds = [("U8", (length,), ()) for length in lengths]
    names = [f"tensor.{i}" for i in range(len(lengths))]
    return build_layout(named, names, kinds, list(range(len(lengths))), ())


def grid_of(layers: list[list[int]], chunk_nbytes: int) -> ChunkGrid:
    return ChunkGrid(layout_of(layers).layers, chunk_nbytes)


def joined(blocks: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the blocks as runs without gaps: (offset, nbytes)."""
    runs: list[tuple[int, int]] = []
    for offset, nbytes in blocks:
        if runs and sum(runs[-1]) == offset:
            runs[-1] = (runs[-1][0], runs[-1][1] + nbytes)
        else:
            runs.append((offset, nbytes))
    return runs


@given(LAYERS, CHUNK_SIZES)
@example([[0], [0, 0, 5], [0]], MIB)
@example([[MIB // 2, MIB // 2 + 1, MIB // 2]], MIB)
@example([[1] * 8], MIB)
def test_chunks_are_those_of_the_enumeration(layers: list[list[int]], chunk_nbytes: int) -> None:
    grid = grid_of(layers, chunk_nbytes)
    index = 0
    for layer, lengths in enumerate(layers):
        first, before = index, 0
        for blocks in naive.layer_chunks(lengths, chunk_nbytes):
            assert grid.chunk(index) == Range(layer, blocks[0][0], sum(blocks[-1]))
            assert list(grid.blocks(index)) == blocks
            assert grid.block_count(index) == len(blocks)
            assert grid.sizes[index] == naive.payload(blocks)
            assert grid.first_block[index] == before
            assert grid.layer_of[index] == layer
            before += len(blocks)
            index += 1
        assert grid.of_layer(layer) == range(first, index)
        assert grid.layer_blocks[layer] == before == sum(map(block_count, lengths))
    assert len(grid) == len(grid.sizes) == len(grid.layer_of) == len(grid.first_block) == index
    assert grid.first_chunk == [*(grid.of_layer(i).start for i in range(len(layers))), index]


@given(LAYERS, CHUNK_SIZES)
def test_chunks_are_whole_blocks_and_hold_every_byte_once(
    layers: list[list[int]], chunk_nbytes: int
) -> None:
    """The same by properties, in case the enumeration errs."""
    layout = layout_of(layers)
    grid = ChunkGrid(layout.layers, chunk_nbytes)
    assert sum(grid.sizes) == layout.payload_nbytes
    for layer in layout.layers:
        blocks = [block for chunk in grid.of_layer(layer.index) for block in grid.blocks(chunk)]
        assert blocks == [
            (offset + at, min(BLOCK_BYTES, nbytes - at))
            for offset, nbytes in layer.extents
            for at in range(0, nbytes, BLOCK_BYTES)
        ]
        sizes = [grid.sizes[chunk] for chunk in grid.of_layer(layer.index)]
        assert all(0 < size <= chunk_nbytes for size in sizes)
        assert all(a + b > chunk_nbytes for a, b in pairwise(sizes))


@given(LAYERS, CHUNK_SIZES, st.data())
def test_parts_and_segments(
    layers: list[list[int]], chunk_nbytes: int, data: st.DataObject
) -> None:
    layout = layout_of(layers)
    grid = ChunkGrid(layout.layers, chunk_nbytes)
    if not len(grid):
        return
    index = data.draw(st.integers(0, len(grid) - 1))
    begin = data.draw(st.integers(0, grid.block_count(index) - 1))
    end = data.draw(st.integers(begin + 1, grid.block_count(index)))
    blocks = list(grid.blocks(index)[begin:end])
    place = grid.part(index, begin, end)
    assert place == Range(grid.layer_of[index], blocks[0][0], sum(blocks[-1]))
    assert grid.part_nbytes(index, begin, end) == naive.payload(blocks)
    assert runs_of(blocks) == joined(blocks)
    assert grid.part(index, 0, grid.block_count(index)) == grid.chunk(index)
    assert grid.part_nbytes(index, 0, grid.block_count(index)) == grid.sizes[index]


@given(LAYERS, CHUNK_SIZES)
def test_the_segments_of_all_chunks_are_the_tensors(
    layers: list[list[int]], chunk_nbytes: int
) -> None:
    layout = layout_of(layers)
    grid = ChunkGrid(layout.layers, chunk_nbytes)
    segments = [
        (layout.layers[grid.layer_of[i]].arena_offset + offset, nbytes)
        for i in range(len(grid))
        for offset, nbytes in runs_of(grid.blocks(i))
    ]
    tensors = [
        (layout.layers[t.layer].arena_offset + t.offset, t.nbytes)
        for t in layout.tensors
        if t.nbytes
    ]
    assert joined(segments) == joined(tensors)


@given(LAYERS, CHUNK_SIZES, st.data())
def test_the_chunks_that_bytes_touch(
    layers: list[list[int]], chunk_nbytes: int, data: st.DataObject
) -> None:
    layout = layout_of(layers)
    grid = ChunkGrid(layout.layers, chunk_nbytes)
    layer = data.draw(st.sampled_from(layout.layers))
    places = {i: grid.chunk(i) for i in grid.of_layer(layer.index)}
    borders = sorted({0, layer.nbytes} | {at for p in places.values() for at in (p.begin, p.end)})
    beside = st.sampled_from([0, 0, -1, 1, 255, MIB])
    begin, end = (max(0, data.draw(st.sampled_from(borders)) + data.draw(beside)) for _ in "be")
    touched = [i for i, p in places.items() if begin < end and p.begin < end and begin < p.end]
    assert list(grid.chunks_of(layer.index, begin, end)) == touched


@pytest.mark.parametrize("vector", VECTORS["cuts"])
def test_published_cuts(vector: dict[str, Any]) -> None:
    grid = grid_of(vector["layers"], vector["chunk_nbytes"])
    found = []
    for index in range(len(grid)):
        place = grid.chunk(index)
        count = grid.block_count(index)
        found.append([place.layer, place.begin, place.end, grid.sizes[index], count])
    assert found == vector["chunks"]


@pytest.mark.parametrize(("payload", "expected"), VECTORS["chunk_nbytes"])
def test_published_chunk_sizes(payload: int, expected: int) -> None:
    assert chunk_nbytes_of(payload) == expected


@given(st.integers(0, 2 << 30) | st.integers(0, 1 << 48))
def test_the_chunk_size(payload: int) -> None:
    size = chunk_nbytes_of(payload)
    assert size == naive.chunk_size(payload)
    assert size % BLOCK_BYTES == 0 and MIB <= size <= 16 * MIB


@pytest.mark.parametrize("size", [0, -BLOCK_BYTES, 1, BLOCK_BYTES - 1, BLOCK_BYTES + 4096])
def test_chunk_sizes_are_multiples_of_a_block(size: int) -> None:
    with pytest.raises(ValueError, match="multiple"):
        grid_of([[5]], size)


def test_blocks_are_the_same_when_asked_for_again_much_later() -> None:
    grid = grid_of([[300 * MIB + 5, 7, 300 * MIB]], MIB)
    first = [grid.blocks(index) for index in range(len(grid))]
    assert [grid.blocks(index) for index in range(len(grid))] == first
    assert len(first) == 601 and first[300] == ((300 * MIB, 5), (300 * MIB + 256, 7))


def test_there_is_no_chunk_beyond_the_last() -> None:
    grid = grid_of([[5], [MIB + 1]], MIB)
    for ask in (grid.chunk, grid.blocks, grid.block_count):
        with pytest.raises(IndexError):
            ask(3)


def test_a_grid_needs_no_tensor_objects() -> None:
    """To make 50,000 of them takes longer than all else before the first read."""
    made = layout_of([[MIB, 5], [0, 3]])

    def refuse() -> list[Any]:
        raise AssertionError("the tensors were made")

    grid = ChunkGrid(Layout(made.layers, refuse).layers, MIB)
    for index in range(len(grid)):
        assert grid.part(index, 0, 1) and grid.blocks(index)
    assert grid.chunks_of(1, 0, 3) == range(2, 3)
