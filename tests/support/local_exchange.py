"""What ranks of one host need to meet."""

from __future__ import annotations

from mx.core.grid import ChunkGrid
from mx.core.types import ManifestRef
from mx.core.wanted import BlockRange, WantedBlocks

TIMEOUT_S = 60.0


def all_of(grid: ChunkGrid) -> WantedBlocks:
    """Return all blocks, each to be read aside."""
    return WantedBlocks(
        grid, {c: [BlockRange(0, grid.block_count(c), True)] for c in range(len(grid))}
    )


def ref_of(name: str) -> ManifestRef:
    """Return a manifest of this name."""
    return ManifestRef(name.encode().ljust(32), bytes(32), b"", (1, 1, 0))
