"""How ranks that each fill a GPU divide the chunks of a model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mx.snapshots.gpu_ranks import shares_of
from tests.support.transfer_machine import grid_of


@given(
    st.lists(st.integers(1, 11), min_size=1, max_size=40), st.sets(st.integers(0, 9), min_size=1)
)
def test_each_chunk_has_one_rank_that_reads_it_and_none_has_much_more(
    blocks: list[int], ranks: set[int]
) -> None:
    grid = grid_of(blocks)
    shares = shares_of(grid, ranks)
    assert shares == shares_of(grid, sorted(ranks))  # each rank finds the same
    assert sum(shares.values()) == (1 << len(grid)) - 1
    read = {
        rank: sum(size for chunk, size in enumerate(grid.sizes) if share >> chunk & 1)
        for rank, share in shares.items()
    }
    assert max(read.values()) - min(read.values()) <= max(grid.sizes)
    assert len(shares) == len(ranks)
