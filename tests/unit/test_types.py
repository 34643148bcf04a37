"""Chunk arithmetic: chunks cut layers, segments cut chunks, and nothing is lost or doubled."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.core.layout import TensorSpec
from mx.core.manifest import plan_layout
from mx.core.types import BLOCK_BYTES, ChunkGrid, Layer, Layout, Tensor

SIZES = st.sampled_from(
    [0, 1, 255, 256, 257, 1000, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 7]
)


@given(st.lists(SIZES, min_size=1, max_size=8), st.integers(1, 3))
def test_segments_cover_the_payload_once(sizes: list[int], blocks: int) -> None:
    specs = [TensorSpec(f"m.layers.{i % 3}.w.{i}", "U8", (n,)) for i, n in enumerate(sizes)]
    layout = plan_layout(specs)
    grid = ChunkGrid(layout, blocks * BLOCK_BYTES)
    found: list[tuple[int, int]] = []
    for chunk in grid:
        assert grid[chunk.index] == chunk
        assert chunk.index in grid.of_layer(chunk.layer)
        segments = grid.segments(chunk)
        assert segments
        for segment in segments:
            assert chunk.offset <= segment.offset
            assert segment.offset + segment.nbytes <= chunk.offset + chunk.nbytes
            base = layout.layers[chunk.layer].arena_offset
            assert segment.arena_offset == base + segment.offset
            found.append((segment.arena_offset, segment.nbytes))
    joined: list[tuple[int, int]] = []
    for offset, nbytes in found:
        if joined and sum(joined[-1]) == offset:
            joined[-1] = (joined[-1][0], joined[-1][1] + nbytes)
        else:
            joined.append((offset, nbytes))
    runs = [(x.arena_offset + o, n) for x in layout.layers for o, n in x.runs]
    merged: list[tuple[int, int]] = []
    for offset, nbytes in runs:  # layers that fill their last page touch the next one
        if merged and sum(merged[-1]) == offset:
            merged[-1] = (merged[-1][0], merged[-1][1] + nbytes)
        else:
            merged.append((offset, nbytes))
    assert joined == merged


@pytest.mark.parametrize("size", [0, -BLOCK_BYTES, 1, BLOCK_BYTES + 4096])
def test_chunk_sizes_are_multiples_of_a_block(size: int) -> None:
    layout = plan_layout([TensorSpec("a", "U8", (5,))])
    with pytest.raises(ValueError, match="multiple"):
        ChunkGrid(layout, size)


def test_tensors_are_made_once_and_when_asked_for() -> None:
    made = []

    def make() -> list[Tensor]:
        made.append(1)
        return [Tensor("a", "U8", (1,), 0, 0, 1)]

    layers = [Layer(0, "part.0", 1, 0, ((0, 1),))]
    layout = Layout(layers, make)
    assert (layout.arena_nbytes, layout.payload_nbytes, made) == (4096, 1, [])
    assert layout.tensors is layout.tensors
    assert made == [1]
    assert layout == Layout(layers, make())
    assert layout != Layout(layers, [])


def test_no_index_beyond_the_end() -> None:
    grid = ChunkGrid(plan_layout([TensorSpec("a", "U8", (5,))]), BLOCK_BYTES)
    with pytest.raises(IndexError):
        grid[1]
    with pytest.raises(IndexError):
        grid[-1]
