"""Fills a pull's arena with chunks that this process holds already: of the same model before an
update, or of another one that shares layers with it.

`mx.core.reuse` finds equal chunks. Copies are hashed in their new place, like chunks from
elsewhere: held memory may have been written to since.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from mx.buffers import copy_bytes
from mx.core.digest import ChunkHasher
from mx.core.reuse import Copy, Held, arena_offset, same_chunks
from mx.core.types import BLOCK_BYTES
from mx.target.delivery import Delivery
from mx.target.transfer import Transfer
from mx.transport import host_view

#: One thread copies and hashes no faster than a fast network.
THREADS = 2


def prefilling(
    delivery: Delivery, held: list[Held], *, attachable: bool
) -> Callable[[Transfer, Callable[[], bool]], None] | None:
    """Return a function that prefills a transfer with layers that an earlier pull wrote to disk,
    and with chunks in `held`; None if there are none. A source's memory that is `attachable` costs
    nothing: `held` is not used then. The function blocks; call it with the transfer, before it has
    connections, and a function that returns True once the pull is cancelled. `held` is emptied as
    soon as possible, so that the pull does not keep others' memory."""
    resumable = delivery.resumable
    if attachable:
        held.clear()
    if not resumable and not held:
        return None

    def fill(transfer: Transfer, cancelled: Callable[[], bool]) -> None:
        if resumable:
            delivery.resume(transfer, cancelled)
        try:
            if held:
                reuse(transfer, held, cancelled)
        finally:
            held.clear()

    return fill


def reuse(transfer: Transfer, held: Sequence[Held], cancelled: Callable[[], bool]) -> None:
    """Copy equal chunks into the transfer's arena, layer by layer, and prefill the right ones."""
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
    start = arena_offset(manifest.grid, manifest.grid[copy.index])
    views = [arena[s.arena_offset : s.arena_offset + s.nbytes] for s in segments]
    hasher = ChunkHasher(segments, views)
    landed = 0
    for segment, view in zip(segments, views, strict=True):
        there = copy.view[copy.offset + segment.arena_offset - start :][: segment.nbytes]
        for at in range(0, segment.nbytes, BLOCK_BYTES):
            copy_bytes(view[at : at + BLOCK_BYTES], there[at : at + BLOCK_BYTES])
            landed += min(BLOCK_BYTES, segment.nbytes - at)
            hasher.landed(landed)  # while the bytes are in the cache
    return hasher.digest() == manifest.chunking.digest(copy.index)
