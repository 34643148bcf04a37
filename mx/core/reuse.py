"""Which chunks of a model are in memory that holds another model, decided by block digests alone.

Two blocks are the same if their digests are, wherever they are in a tensor, a layer or a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mx.core.digest import DIGEST_BYTES
from mx.core.grid import BLOCK_BYTES
from mx.core.pages import Pages
from mx.core.types import Manifest
from mx.views import View


class ReusableWeights(NamedTuple):
    """Weights in memory of this process, the host's or a GPU's: `view` is laid out like an arena of
    the manifest. The memory lives as long as `view`. Layers whose pages are not known are not
    found."""

    manifest: Manifest
    pages: Pages
    view: View


@dataclass(frozen=True, slots=True)
class ChunkCopy:
    """Where the bytes of chunk `index` are: of each of its blocks, in order, a view and the offset
    in it."""

    index: int
    blocks: tuple[tuple[View, int], ...]


def same_chunks(
    manifest: Manifest, pages: Pages, held: Iterable[ReusableWeights]
) -> dict[int, ChunkCopy]:
    """Return where the chunks of a model are held, by index.

    Takes time linear in blocks.

    Args:
        manifest: The model's manifest.
        pages: Its pages; layers whose pages are not known are left out.
        held: What this process holds. Where several hold a block, it is taken from the first.

    Returns:
        The chunks all of whose blocks are held.
    """
    places: dict[bytes, tuple[View, int]] = {}
    for each in held:
        for digest, offset in _blocks(each):
            places.setdefault(digest, (each.view, offset))
    grid = manifest.grid
    found: dict[int, ChunkCopy] = {}
    for layer in range(len(manifest.layout.layers)):
        page = pages.get(layer)
        if page is None:
            continue
        for index in grid.of_layer(layer):
            first = grid.first_block[index]
            there = [
                places.get(_digest(page, number))
                for number in range(first, first + grid.block_count(index))
            ]
            blocks = tuple(place for place in there if place is not None)
            if len(blocks) == len(there):
                found[index] = ChunkCopy(index, blocks)
    return found


def _blocks(held: ReusableWeights) -> Iterator[tuple[bytes, int]]:
    """Yield the digest of each block that is held, and its offset in the arena."""
    for layer in held.manifest.layout.layers:
        page = held.pages.get(layer.index)
        if page is None:
            continue
        number = 0
        for begin, nbytes in layer.extents:
            for at in range(begin, begin + nbytes, BLOCK_BYTES):
                yield _digest(page, number), layer.arena_offset + at
                number += 1


def _digest(page: bytes, number: int) -> bytes:
    return page[DIGEST_BYTES * number : DIGEST_BYTES * (number + 1)]
