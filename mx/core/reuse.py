"""Which chunks of a model are in memory that holds another model, decided by the manifests alone.

Two chunks are the same if their digests, sizes and byte places are. Two layers are the same,
however they are cut into chunks, if their tensors are: the dtype, shape, place and digest of each,
whatever its name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mx.core.types import Chunk, ChunkGrid, Manifest

#: A layer's tensors, without their names: dtype, shape, offset, blake3.
_Tensors = tuple[tuple[str, tuple[int, ...], int, bytes], ...]
#: What two equal chunks have in common: the digest, and the runs of bytes as (offset from the
#: chunk's begin, nbytes).
_Content = tuple[bytes, tuple[tuple[int, int], ...]]


@dataclass(frozen=True)
class Held:
    """Weights in this process's memory: `view` is laid out like an arena of the manifest. The
    memory lives as long as `view`."""

    manifest: Manifest
    view: memoryview


@dataclass(frozen=True, slots=True)
class Copy:
    """Where the bytes of chunk `index` are: at `offset` of `view`."""

    index: int
    view: memoryview
    offset: int


def same_chunks(manifest: Manifest, held: Iterable[Held]) -> dict[int, Copy]:
    """Return where each chunk of the manifest is held, by its index; chunks that are not held are
    left out. Takes time linear in chunks and tensors."""
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
    """Return where the chunk begins in an arena."""
    return grid.layout.layers[chunk.layer].arena_offset + chunk.offset
