"""What ranks of one host need to meet."""

from __future__ import annotations

from mx.core.grid import ChunkGrid
from mx.core.wanted import BlockRange, WantedBlocks

TIMEOUT_S = 60.0


def all_of(grid: ChunkGrid) -> WantedBlocks:
    """Return all blocks, each to be read aside."""
    return WantedBlocks(
        grid, {c: [BlockRange(0, grid.block_count(c), True)] for c in range(len(grid))}
    )


def content_of(name: str) -> bytes:
    """Return what tells weights of this name from others."""
    return name.encode().ljust(64)
