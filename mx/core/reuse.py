"""Which chunks of a model are in memory that holds another one, as the manifests alone tell.

A chunk is the same if its digest, its size and the places of its bytes are; a layer is, however it
is cut into chunks, if its tensors are: dtype, shape, place and digest of each, not their names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mx.core.types import Chunk, ChunkGrid, Manifest

#: A layer's tensors but for their names: dtype, shape, offset, blake3.
_Tensors = tuple[tuple[str, tuple[int, ...], int, bytes], ...]
#: What two chunks have in common that hold the same: digest, and runs of bytes as (offset from the
#: chunk's begin, nbytes).
_Content = tuple[bytes, tuple[tuple[int, int], ...]]


@dataclass(frozen=True)
class Held:
    """Weights in this process's memory: `view` is laid out as an arena of the manifest is, and is
    kept by being referred to."""

    manifest: Manifest
    view: memoryview


@dataclass(frozen=True, slots=True)
class Copy:
    """Chunk `index` of the new arena has the bytes that begin at `offset` of `view`."""

    index: int
    view: memoryview
    offset: int


def same_chunks(manifest: Manifest, held: Iterable[Held]) -> dict[int, Copy]:
    """For each chunk of the manifest that is held, where. O(chunks and tensors)."""
    found: dict[int, Copy] = {}
    grid = manifest.grid
    for each in held:
        layers = {tensors: i for i, tensors in enumerate(_layers(each.manifest))}
        for layer, tensors in enumerate(_layers(manifest)):
            if tensors not in layers:
                continue
            base = each.manifest.layout.layers[layers[tensors]].arena_offset
            for index in grid.of_layer(layer):
                found.setdefault(index, Copy(index, each.view, base + grid[index].offset))
        theirs = each.manifest.grid
        chunks = {_content(each.manifest, chunk): chunk for chunk in theirs}
        for chunk in grid:
            twin = None if chunk.index in found else chunks.get(_content(manifest, chunk))
            if twin is not None:
                found[chunk.index] = Copy(chunk.index, each.view, arena_offset(theirs, twin))
    return found


def _layers(manifest: Manifest) -> list[_Tensors]:
    tensors: list[list[tuple[str, tuple[int, ...], int, bytes]]] = [
        [] for _ in manifest.layout.layers
    ]
    for t in manifest.layout.tensors:
        tensors[t.layer].append((t.dtype, t.shape, t.offset, manifest.tensor_digests[t.name]))
    return [tuple(each) for each in tensors]


def _content(manifest: Manifest, chunk: Chunk) -> _Content:
    start = arena_offset(manifest.grid, chunk)
    runs = tuple((s.arena_offset - start, s.nbytes) for s in manifest.grid.segments(chunk))
    return manifest.chunking.digest(chunk.index), runs


def arena_offset(grid: ChunkGrid, chunk: Chunk) -> int:
    return grid.layout.layers[chunk.layer].arena_offset + chunk.offset
