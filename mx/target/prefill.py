"""What a pull need not move: chunks that this process holds already, of the same model before an
update, or of another one that shares layers with it.

Which chunks are the same is in `mx.core.reuse`. What is copied is hashed in its new place like
anything that comes from elsewhere: held memory may have been written to since.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from mx.core.digest import ChunkHasher
from mx.core.reuse import Copy, Held, arena_offset, same_chunks
from mx.core.types import BLOCK_BYTES
from mx.storage.spans import copy_bytes
from mx.target.delivery import Delivery
from mx.target.transfer import Transfer
from mx.transport import host_view

#: Copying and hashing, one thread is no faster than a fast network.
THREADS = 2


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
    start = arena_offset(manifest.grid, manifest.grid[copy.index])
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
