"""From parts that have landed to layers that are ready. Pure: events in, commands out.

The digests of a part's blocks are compared with the page of its layer, as soon as that is known. A
part that is right is *settled* when it is in its place, and other ranks on this host have what they
want of it. A chunk all of whose wanted blocks are settled is verified, and a layer all of whose
chunks are is ready.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mx.core.digest import DIGEST_BYTES
from mx.core.grid import ChunkGrid
from mx.core.holdings import Holdings
from mx.core.local_ranks import Shares
from mx.core.striping import ConnectionLoad, Part
from mx.core.transfer_commands import Command, CopyOut, HandOut, LayerReady
from mx.core.wanted import WantedBlocks


class Verdict(NamedTuple):
    """Whether a part that has landed is right; `load` is that of the connection that brought it."""

    part: Part
    load: ConnectionLoad
    right: bool


class Verification:
    """One pull's. It owns the set of verified chunks, `holdings`. Methods return commands as those
    of the transfer machine do."""

    def __init__(
        self,
        grid: ChunkGrid,
        page_of: Callable[[int], bytes | None],
        wanted: WantedBlocks | None = None,
        shares: Shares | None = None,
    ) -> None:
        """
        Args:
            grid: How the model is cut into chunks.
            page_of: Returns the digests that a layer's blocks must have, None while they are not
                known.
            wanted: The blocks to read; None: all.
            shares: Which of these other ranks on this host read; None: none.
        """
        self.holdings = Holdings(grid, None if wanted is None else wanted.bits)
        #: The payload bytes of each layer that have landed, and were not found wrong.
        self.landed_nbytes = [0] * len(grid.layers)
        self._grid = grid
        self._page_of = page_of
        self._wanted = wanted
        self._shares = shares
        self._needed = grid.block_count if wanted is None else wanted.block_count
        # Layer -> parts that wait for its page, with the digests of their blocks.
        self._waiting: dict[int, dict[Part, tuple[ConnectionLoad, bytes]]] = {}
        self._unsettled: set[Part] = set()  # right, but not in their place, or not handed out
        self._settled_blocks: dict[int, int] = {}  # chunk -> how many are, while not all are
        self._shortcuts: set[int] = set()  # layers with parts that were verified by the shortcut
        self._given: set[int] = set()  # layers with parts that another rank has verified

    @property
    def waits(self) -> bool:
        """True while parts have landed that wait for the page of their layer."""
        return bool(self._waiting)

    def start(self) -> list[Command]:
        """Return the commands for layers without bytes, which are ready at once."""
        layers = range(len(self._grid.layers))
        return [LayerReady(layer) for layer in layers if self.holdings.has_layer(layer)]

    def prefilled(self, chunk: int) -> list[Command]:
        """Record that all of a chunk is in place, and right."""
        self.landed_nbytes[self._grid.layer_of[chunk]] += self._grid.sizes[chunk]
        return self._verified(chunk)

    def landed(
        self, part: Part, nbytes: int, load: ConnectionLoad, block_digests: bytes | None
    ) -> bool | None:
        """Record that all bytes of a part, `nbytes`, are there. Returns whether they are right;
        None: the page of its layer is not known, and `judge` says it once it is."""
        layer = self._grid.layer_of[part.chunk]
        self.landed_nbytes[layer] += nbytes
        if block_digests is None:  # the shortcut has found them right
            self._shortcuts.add(layer)
            return True
        page = self._page_of(layer)
        if page is None:
            self._waiting.setdefault(layer, {})[part] = (load, block_digests)
            return None
        return self._is_right(part, page, block_digests)

    def can_judge(self, layer: int) -> bool:
        """Return True if the layer's page is known."""
        return self._page_of(layer) is not None

    def judge(self, layer: int) -> list[Verdict]:
        """Compare the parts that wait for a layer's page, if it is known."""
        page = self._page_of(layer)
        if page is None:
            return []
        return [
            Verdict(part, load, self._is_right(part, page, digests))
            for part, (load, digests) in self._waiting.pop(layer, {}).items()
        ]

    def _is_right(self, part: Part, page: bytes, block_digests: bytes) -> bool:
        chunk, begin, end = part
        first = self._grid.first_block[chunk]
        return page[DIGEST_BYTES * (first + begin) : DIGEST_BYTES * (first + end)] == block_digests

    def right(self, part: Part) -> list[Command]:
        """Record that a part is right: it is settled, unless the commands are to settle it."""
        if self._wanted is None and self._shares is None:
            return self._settle(part)
        shared = self._shares is not None and self._shares.pieces(part)
        commands: list[Command] = [HandOut(part)] if shared else []
        if self._reads_aside(part):
            commands.append(CopyOut(part))
        if not commands:
            return self._settle(part)
        self._unsettled.add(part)
        return commands

    def wrong(self, part: Part, source: str) -> None:
        """Record that a part from this source is not right: it has not landed."""
        self._count(part, -1)
        self.holdings.corrupt(part.chunk, source)

    def copied_out(self, part: Part) -> list[Command]:
        """Record that the wanted bytes of a part that was read aside are in their place."""
        if part not in self._unsettled:
            return []
        self._unsettled.remove(part)
        return self._settle(part)

    def handed_out(self, part: Part) -> list[Command]:
        """Record that other ranks have what they want of a part, or need it no more. Only then may
        its layer be ready: the caller may change a ready layer, and they would get the change."""
        return [] if self._reads_aside(part) else self.copied_out(part)

    def given(self, part: Part) -> list[Command]:
        """Record that another rank has handed over a part: it is right, and in its place."""
        self._count(part, 1)
        self._given.add(self._grid.layer_of[part.chunk])
        return self._settle(part)

    def _count(self, part: Part, sign: int) -> None:
        nbytes = self._grid.part_nbytes(part.chunk, part.begin, part.end)
        self.landed_nbytes[self._grid.layer_of[part.chunk]] += sign * nbytes

    def _reads_aside(self, part: Part) -> bool:
        return self._wanted is not None and self._wanted.is_aside(part)

    def _settle(self, part: Part) -> list[Command]:
        chunk, begin, end = part
        blocks = self._settled_blocks.pop(chunk, 0) + end - begin
        if blocks == self._needed(chunk):
            return self._verified(chunk)
        self._settled_blocks[chunk] = blocks
        return []

    def _verified(self, chunk: int) -> list[Command]:
        if not self.holdings.add(chunk):
            return []
        layer = self._grid.layer_of[chunk]
        return [LayerReady(layer, layer in self._shortcuts, layer in self._given)]
