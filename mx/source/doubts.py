"""Hashes again what readers found wrong in a source's memory, which its own process may have
written to.

A reader's word is not believed, and costs little: one chunk is hashed for it, readers take turns by
their address, and hashing takes no more than a part of the time.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Awaitable, Callable

from mx.core.digest import DIGEST_BYTES
from mx.memory.live import LentMemory
from mx.source.model import SourceModel
from mx.source.served import ExposedModel, MemoryFaults
from mx.text import listed
from mx.transport import contiguous
from mx.views import cut

#: Hashing for readers takes no more than this part of the time: a reader may lie.
_HASHING_PART = 0.1
#: The most chunks of which the readers at one address may complain at a time.
_MOST_OF_ADDRESS = 8


class Doubts:
    """The complaints about what one process serves; on the loop."""

    def __init__(self, is_right: Callable[[ExposedModel, int], Awaitable[bool]]) -> None:
        """
        Args:
            is_right: Returns True if a chunk is right; else its source is withdrawn.
        """
        self._is_right = is_right
        self._waiting: dict[str, deque[tuple[ExposedModel, int, Callable[[], None]]]] = {}
        self._some = asyncio.Event()

    def add(
        self, address: str, served: ExposedModel, chunk: int, right: Callable[[], None]
    ) -> None:
        """Have a chunk hashed again, unless the source does not serve it, or readers at this
        address wait for many already.

        Args:
            address: Where the reader is that found it wrong.
            served: The source.
            chunk: The chunk.
            right: Called once the chunk was found right.
        """
        grid = served.held.manifest.grid
        waiting = self._waiting.get(address, ())
        if (
            chunk < len(grid)
            and served.participant.gives(chunk)
            and len(waiting) < _MOST_OF_ADDRESS
            and all((each, number) != (served, chunk) for each, number, _ in waiting)
        ):
            self._waiting.setdefault(address, deque()).append((served, chunk, right))
            self._some.set()

    async def run(self) -> None:
        """Run forever: hash what is waiting, with pauses."""
        while True:
            await self._some.wait()
            address, waiting = next(iter(self._waiting.items()))
            del self._waiting[address]  # others come first the next time
            served, chunk, right = waiting.popleft()
            if waiting:
                self._waiting[address] = waiting
            elif not self._waiting:
                self._some.clear()
            began_s = time.monotonic()
            if await self._is_right(served, chunk):
                right()
            await asyncio.sleep((time.monotonic() - began_s) / _HASHING_PART)


def looked_at(held: SourceModel, chunk: int) -> MemoryFaults:
    """Hash a chunk again, where it is in memory, unless its tensors are elsewhere by now: an engine
    may have freed what it was in.

    Blocks.

    Args:
        held: A model that holds the chunk.
        chunk: The chunk.

    Raises:
        MxError: The memory was released, or a GPU fails.
    """
    moved = ""
    if isinstance(held.arena, LentMemory):
        if not held.arena.is_here:
            return MemoryFaults()
        moved = held.arena.changed()
    return MemoryFaults(moved=moved) if moved else MemoryFaults(wrong=wrong_tensors(held, chunk))


def wrong_tensors(held: SourceModel, chunk: int) -> str:
    """Hash a chunk again, where it is in memory.

    Blocks.

    Args:
        held: A model that holds the chunk, in memory that is still there.
        chunk: The chunk.

    Returns:
        The names of the tensors that are not what was registered; "" if all of it is right.

    Raises:
        MxError: The memory was released, or a GPU fails.
    """
    grid, layout = held.manifest.grid, held.manifest.layout
    layer = layout.layers[grid.layer_of[chunk]]
    page = held.pages.get(layer.index)
    if page is None:  # as long as a chunk was not verified here
        return ""
    places = grid.blocks(chunk)
    blocks = [contiguous(block) for block in cut(held.view(), places, layer.arena_offset)]
    hasher = held.arena.hasher(blocks)
    hasher.landed(sum(map(len, blocks)))
    digests = hasher.block_digests()
    first = grid.first_block[chunk]
    begins = [begin for begin, _ in layer.extents]
    names: dict[str, None] = {}
    for number, (offset, _) in enumerate(places):
        wanted = page[DIGEST_BYTES * (first + number) : DIGEST_BYTES * (first + number + 1)]
        if digests[DIGEST_BYTES * number : DIGEST_BYTES * (number + 1)] != wanted:
            index = layer.first_tensor + bisect_right(begins, offset) - 1
            names[layout.tensors[index].name] = None
    return listed(list(names))
