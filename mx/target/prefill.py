"""What a pull need not move: chunks that this process holds already, of the same model before an
update, or of another one that shares layers with it.

Which chunks are the same is told by the manifests alone. A chunk is if its digest, its size and
the places of its bytes are; a layer is, however it is cut into chunks, if its tensors are: dtype,
shape, place and blake3 of each, whatever their names. What is copied is hashed in its new place
like anything that comes from elsewhere: held memory may have been written to since.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from mx.core.digest import ChunkHasher
from mx.core.types import BLOCK_BYTES, Chunk, ChunkGrid, Manifest
from mx.storage.spans import copy_bytes
from mx.target.delivery import Delivery
from mx.target.transfer import Transfer
from mx.transport import host_view

#: Copying and hashing, one thread is no faster than a fast network.
THREADS = 2

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


def prefilling(
    delivery: Delivery | None, held: list[Held], *, attachable: bool
) -> Callable[[Transfer, Callable[[], bool]], None] | None:
    """How to begin a pull with what is here: with what an earlier one has written to disk, or with
    what is held in memory (unless the source's memory is attachable, which costs nothing). None if
    there is nothing. To be called with the engine, before it has lanes, and with what says that
    the pull was cancelled; blocks. `held` is emptied as soon as it is of no more use, so that the
    pull does not keep others' memory."""
    resumable = delivery is not None and delivery.resumable
    if attachable:
        held.clear()
    if not resumable and not held:
        return None

    def fill(transfer: Transfer, cancelled: Callable[[], bool]) -> None:
        if resumable and delivery is not None:
            delivery.resume(transfer, cancelled)
        try:
            if held:
                reuse(transfer, held, cancelled)
        finally:
            held.clear()

    return fill


def reuse(transfer: Transfer, held: Sequence[Held], cancelled: Callable[[], bool]) -> None:
    """Copy what is the same into the engine's arena, layer by layer, and tell it what of that was
    right."""
    grid = transfer.manifest.grid
    copies = same_chunks(transfer.manifest, held)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="mx-reuse") as pool:
        for layer in range(len(transfer.manifest.layout.layers)):
            if cancelled():
                return
            began_s = time.monotonic()
            here = [copies[index] for index in grid.of_layer(layer) if index in copies]
            right = pool.map(lambda copy: _copied(transfer, copy), here)
            chunks = [copy.index for copy, good in zip(here, right, strict=True) if good]
            transfer.prefill("reuse", "local", chunks, time.monotonic() - began_s)


def _copied(transfer: Transfer, copy: Copy) -> bool:
    manifest, arena = transfer.manifest, host_view(transfer.arena)
    segments = manifest.grid.segments(manifest.grid[copy.index])
    start = _arena_offset(manifest.grid, manifest.grid[copy.index])
    views = [arena[s.arena_offset : s.arena_offset + s.nbytes] for s in segments]
    hasher = ChunkHasher(segments, views)
    landed = 0
    for segment, view in zip(segments, views, strict=True):
        there = copy.view[copy.offset + segment.arena_offset - start :][: segment.nbytes]
        for at in range(0, segment.nbytes, BLOCK_BYTES):
            copy_bytes(view[at : at + BLOCK_BYTES], there[at : at + BLOCK_BYTES])
            landed += min(BLOCK_BYTES, segment.nbytes - at)
            hasher.landed(landed)  # while it is in the cache
    return hasher.digest() == manifest.chunking.digest(copy.index)


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
                found[chunk.index] = Copy(chunk.index, each.view, _arena_offset(theirs, twin))
    return found


def _layers(manifest: Manifest) -> list[_Tensors]:
    tensors: list[list[tuple[str, tuple[int, ...], int, bytes]]] = [
        [] for _ in manifest.layout.layers
    ]
    for t in manifest.layout.tensors:
        tensors[t.layer].append((t.dtype, t.shape, t.offset, manifest.tensor_digests[t.name]))
    return [tuple(each) for each in tensors]


def _content(manifest: Manifest, chunk: Chunk) -> _Content:
    start = _arena_offset(manifest.grid, chunk)
    runs = tuple((s.arena_offset - start, s.nbytes) for s in manifest.grid.segments(chunk))
    return manifest.chunking.digest(chunk.index), runs


def _arena_offset(grid: ChunkGrid, chunk: Chunk) -> int:
    return grid.layout.layers[chunk.layer].arena_offset + chunk.offset
