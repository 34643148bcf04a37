"""Fills a pull's arena with chunks that this process holds already: of the same model before an
update, or of another one that shares tensors with it.

`mx.core.reuse` finds equal chunks. Copies are hashed in their new place, like chunks from
elsewhere: held memory may have been written to since.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from mx.buffers import copy_bytes
from mx.core.digest import DIGEST_BYTES, BlockHasher, block_digest
from mx.core.grid import BLOCK_BYTES
from mx.core.pages import Pages, check_page
from mx.core.types import Manifest
from mx.errors import DigestError
from mx.fetching.delivery import Delivery
from mx.threads import Threads
from mx.transport import DeviceView, View, contiguous, host_view

if TYPE_CHECKING:
    from mx.core.reuse import ChunkCopy, ReusableWeights
    from mx.fetching.transfer import Transfer
    from mx.memory.device import HostReader

#: One thread copies and hashes no faster than a fast network.
THREADS = 2
#: Prefills a transfer, see `prefilling`.
Fill: TypeAlias = "Callable[[Transfer, Pages, Callable[[], bool]], None]"


class Prefillable(Protocol):
    """What `reuse` needs of a `Transfer`."""

    @property
    def manifest(self) -> Manifest: ...
    @property
    def arena(self) -> View: ...
    def prefill(self, label: str, source: str, chunks: Iterable[int], seconds: float) -> int: ...


def prefilling(delivery: Delivery, held: list[ReusableWeights], *, attachable: bool) -> Fill | None:
    """Return a function that prefills a transfer, or None if there is nothing to do it with.

    It takes layers that an earlier pull wrote to disk, and chunks in `held`. It blocks. Call it
    with the transfer, before that has connections, the pages of the model, and a function that
    returns True once the pull is cancelled.

    Args:
        delivery: The pull's delivery.
        held: What this process holds. It is emptied as soon as possible, so that the pull does not
            keep others' memory.
        attachable: Whether a source's memory can be attached. That costs nothing, and `held` is not
            used then.
    """
    resumable = delivery.resumable
    if attachable:
        held.clear()
    if not resumable and not held:
        return None

    def fill(transfer: Transfer, pages: Pages, cancelled: Callable[[], bool]) -> None:
        if resumable:
            delivery.resume(transfer, cancelled)
        try:
            if held:
                reuse(transfer, pages, held, cancelled)
        finally:
            held.clear()

    return fill


def reuse(
    transfer: Prefillable,
    pages: Pages,
    held: Sequence[ReusableWeights],
    cancelled: Callable[[], bool],
) -> None:
    """Copy equal chunks into the transfer's arena, layer by layer, and prefill the right ones.

    Args:
        transfer: The transfer.
        pages: The model's pages; layers whose pages are not known are left out.
        held: What this process holds.
        cancelled: Returns True once the pull is cancelled.
    """
    grid = transfer.manifest.grid
    from mx.core.reuse import same_chunks  # most pulls hold nothing
    from mx.memory.device import HostReader

    with contextlib.closing(HostReader()) as reader, Threads(THREADS, "mx-reuse") as pool:
        for each in held:
            _learn_pages(each, reader)
        copies = same_chunks(transfer.manifest, pages, held)
        for layer in range(len(transfer.manifest.layout.layers)):
            here = [copies[index] for index in grid.of_layer(layer) if index in copies]
            page = pages.get(layer)
            if page is None or not here:
                continue
            if cancelled():
                return
            began_s = time.monotonic()
            right = pool.map(lambda copy, page=page: _copied(transfer, page, copy, reader), here)
            chunks = [copy.index for copy, good in zip(here, right, strict=True) if good]
            transfer.prefill("reuse", "local", chunks, time.monotonic() - began_s)


def _learn_pages(held: ReusableWeights, reader: HostReader) -> None:
    """Hash the layers whose pages are not known, as of memory that was attached. Pages of layers
    that were written to since stay unknown."""
    layout = held.manifest.layout
    for layer in held.pages.missing:
        place = layout.layers[layer]
        space = held.view[place.arena_offset : place.arena_offset + place.nbytes]
        page = b"".join(
            block_digest(_host(reader, space[at : min(at + BLOCK_BYTES, offset + nbytes)]))
            for offset, nbytes in place.extents
            for at in range(offset, offset + nbytes, BLOCK_BYTES)
        )
        with contextlib.suppress(DigestError):
            check_page(held.manifest, layer, page)
            held.pages.put(layer, page)


def _copied(transfer: Prefillable, page: bytes, copy: ChunkCopy, reader: HostReader) -> bool:
    """Copy a chunk and hash the copy, in host memory. Returns True if it is what the page says."""
    arena, grid = transfer.arena, transfer.manifest.grid
    base = transfer.manifest.layout.layers[grid.layer_of[copy.index]].arena_offset
    places = grid.blocks(copy.index)
    views = [contiguous(arena[base + offset : base + offset + nbytes]) for offset, nbytes in places]
    here = [view if isinstance(view, memoryview) else _buffer(len(view)) for view in views]
    hasher, landed = BlockHasher(here), 0
    for view, (held, offset) in zip(here, copy.blocks, strict=True):
        copy_bytes(view, _host(reader, held[offset : offset + len(view)]))
        landed += len(view)
        hasher.landed(landed)  # while the bytes are in the cache
    digests, first = hasher.block_digests(), DIGEST_BYTES * grid.first_block[copy.index]
    right = digests == page[first : first + len(digests)]
    for place, data in zip(views, here, strict=True):
        if right and isinstance(place, DeviceView):
            reader.write(place, data)
    return right


def _buffer(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))


def _host(reader: HostReader, view: View) -> memoryview:
    return host_view(reader.whole(view))
