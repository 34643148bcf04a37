"""The digests of a model in an arena, computed in the simplest way."""

from __future__ import annotations

from mx.core.digest import block_digest, shortcut_digest, tensor_root
from mx.core.grid import BLOCK_BYTES
from mx.core.types import Layout


def blocks_of(layout: Layout, arena: memoryview, layer: int) -> list[list[memoryview]]:
    """Return the blocks of each tensor of a layer."""
    place = layout.layers[layer]
    return [
        [
            arena[place.arena_offset + at : place.arena_offset + min(at + BLOCK_BYTES, end)]
            for at in range(offset, end, BLOCK_BYTES)
        ]
        for offset, nbytes in place.extents
        for end in [offset + nbytes]
    ]


def roots_of(layout: Layout, arena: memoryview) -> dict[str, bytes]:
    """Return the root of each tensor by name."""
    found = {}
    for tensor in layout.tensors:
        index = layout.tensors.index(tensor) - layout.layers[tensor.layer].first_tensor
        blocks = blocks_of(layout, arena, tensor.layer)[index]
        found[tensor.name] = tensor_root(tensor.nbytes, b"".join(map(block_digest, blocks)))
    return found


def pages_of(layout: Layout, arena: memoryview) -> list[bytes]:
    """Return the page of each layer."""
    return [
        b"".join(block_digest(b) for blocks in blocks_of(layout, arena, i) for b in blocks)
        for i in range(len(layout.layers))
    ]


def shortcuts_of(layout: Layout, arena: memoryview) -> bytes:
    """Return the shortcut digests of all blocks."""
    return b"".join(
        shortcut_digest(b)
        for i in range(len(layout.layers))
        for blocks in blocks_of(layout, arena, i)
        for b in blocks
    )
