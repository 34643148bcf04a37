"""A pull's door to its swarm. Behind it there is nothing until others are to be read from in
coordination, or may find this pull: then a node and a host come into being."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from mx.core.grid import ChunkGrid
from mx.core.holdings import Holdings
from mx.core.pages import Pages
from mx.core.types import Manifest, ModelKey, SourceRecord
from mx.errors import MxError
from mx.memory.live import Memory
from mx.runtime import uncut
from mx.swarm.node import Node, Reads
from mx.swarm.stream import PeerStream
from mx.tasks import end_tasks
from mx.transport import Medium

log = logging.getLogger(__name__)

#: Others may find a pull that should take longer than this, or has run for half of it.
LONG_S = 2.0


class Host(Protocol):
    """Serves what a pull has received so far: `mx.source.relay.Relay`. On the loop."""

    async def start(self, node: Node) -> None:
        """Listen, and relay from the pull's memory. Raises MxError."""

    def record(self) -> SourceRecord | None:
        """Return the record by which others find the pull; None before it listens."""

    async def dial(self, record: SourceRecord) -> PeerStream:
        """Open a stream to a peer. Raises MxError."""

    async def keep_listed(
        self, holdings: Holdings, sources: Callable[[], Sequence[SourceRecord]]
    ) -> None:
        """Report the held layers to the coordinator, if there is one, until all are held.

        Args:
            holdings: The chunks that are verified.
            sources: Returns the known sources, which may serve side files that readers want.
        """

    async def close(self) -> None:
        """End all reads here, and the streams. Idempotent."""


#: Makes the host of a pull from (its source id, model, manifest, pages that are known, arena that
#: is being filled).
MakeHost = Callable[[str, ModelKey, Manifest, Pages, Memory], Host]


class Sharing:
    """One pull's; on the loop."""

    def __init__(
        self,
        own_id: str,
        grid: ChunkGrid,
        reads: Reads,
        make_host: Callable[[], Host] | None,
        reaches: Callable[[SourceRecord], bool],
        changed: Callable[[], None],
        *,
        expected_s: float = 0.0,
        alone_because: str = "",
        coordinate_always: bool = False,
    ) -> None:
        """
        Args:
            own_id: The source id by which others know this pull.
            grid: How the model is cut into chunks.
            reads: The pull's transfer.
            make_host: Makes what lets others read here; None: the pull takes no part in swarms.
            reaches: Returns True if there is a path to a source.
            changed: Called when `coordinated` or `reading_from` change, or when `waits_until_s`
                comes nearer, or lies ahead again.
            expected_s: How many seconds the pull should take.
            alone_because: Why there is no host, to be logged where the user may not expect that.
            coordinate_always: Coordinate on every medium (see `shared`).
        """
        self.sources: Sequence[SourceRecord] = ()  # as found last
        self._own_id = own_id
        self._grid = grid
        self._reads: Reads | None = reads
        self._make_host = make_host
        self._reaches = reaches
        self._changed = changed
        self._alone_because = alone_because
        self._coordinate_always = coordinate_always
        self._due_s = time.monotonic() + (0.0 if expected_s > LONG_S else LONG_S / 2)
        self._timer: asyncio.TimerHandle | None = None
        self._node: Node | None = None
        self._host: Host | None = None
        self._task: asyncio.Task[None] | None = None
        self._supplied = False
        self._untold: list[Callable[[Node], None]] = []  # news from before there is a node

    # -- what there is ----------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """Return True if others can read here, or will be able to soon."""
        return self._node is not None

    @property
    def host(self) -> Host | None:
        """The host of this pull; None before it listens."""
        return None if self.record() is None else self._host

    def record(self) -> SourceRecord | None:
        """Return the record by which others find this pull; None before they can."""
        return None if self._host is None else self._host.record()

    @property
    def coordinated(self) -> bool:
        """True while chunks are read only from peers that allow them."""
        return self._node is not None and self._node.coordinated

    @property
    def reading_from(self) -> Mapping[str, tuple[object, SourceRecord]]:
        """The peers to read from, by key; a changed first item means to connect anew."""
        return {} if self._node is None else self._node.reading_from

    @property
    def waits_until_s(self) -> float:
        """The time until which peers may serve what is missing, if nothing happens before."""
        return -math.inf if self._node is None else self._node.waits_until_s

    # -- how it begins ----------------------------------------------------------------------------

    def met(self, sources: Sequence[SourceRecord]) -> None:
        """Take note of the sources that hold the model, or parts of it, now."""
        self.sources = sources
        if self._node is not None:
            self._node.peers.met(sources)

    def shared(self, medium: Medium) -> None:
        """Act on a source's word that other pulls read there too: coordinate, where they share a
        link with this one. Within a machine there is none, unless `coordinate_always`. Repeated
        while it holds."""
        if self._coordinate_always or medium is Medium.NETWORK:
            self.coordinate()

    def is_own(self, link: str, shared: Collection[str]) -> bool:
        """Return True if what is read over a link (`Connection.link`) takes nothing from other
        pulls: it stays within this host, or others share other links."""
        within = not link and not self._coordinate_always
        return within or bool(link and shared and link not in shared)

    @property
    def rivals(self) -> int:
        """How many other pulls of the model are known, with which links may be shared."""
        return sum(not each.whole and each.source_id != self._own_id for each in self.sources)

    def supplied(self, supplied: bool) -> None:
        """Request no chunks from peers while `supplied`: this pull's own links are enough."""
        if supplied != self._supplied:
            self._supplied = supplied
            self._tell(lambda node: node.supply(supplied))

    def no_whole_source(self) -> None:
        """Read from sources that hold parts, if any: none is left that holds everything."""
        others = [each for each in self.sources if each.source_id != self._own_id]
        if any(not each.whole for each in others):
            self.coordinate()

    def coordinate(self) -> None:
        """Request chunks before reading them, from now on."""
        self.begin()
        if self._node is not None:
            self._node.coordinate()

    def reading_began(self) -> None:
        """Plan to `begin` as soon as the pull turns out to take long: a connection is open."""
        if self._timer is None:
            delay_s = max(0.0, self._due_s - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._due)

    def _due(self) -> None:
        self.begin()
        if self._make_host is None and self._alone_because:
            log.warning("%s", self._alone_because)

    def begin(self) -> None:
        """Listen, register with the coordinator, and meet the other pulls. Idempotent."""
        if self._make_host is None or self._reads is None or self._node is not None:
            return
        self._host = host = self._make_host()
        self._node = node = Node(
            self._own_id,
            self._grid,
            self._reads,
            host.record,
            host.dial,
            self._reaches,
            self._changed,
        )
        for tell in self._untold:
            tell(node)
        self._task = asyncio.create_task(self._run(node, host), name="mx-sharing")
        self._changed()

    async def _run(self, node: Node, host: Host) -> None:
        try:
            # Uncut: what a host that is cancelled half-way has opened, `close` would not know.
            await uncut(host.start(node))
        except MxError as error:
            log.warning("other pulls can't read from this one: %s", str(error))
            node.read_freely()
            self._make_host = self._node = None
            await uncut(node.close())
            return
        node.peers.met(self.sources)
        await host.keep_listed(node.holdings, lambda: self.sources)

    # -- news of sources --------------------------------------------------------------------------

    def lost(self, key: str, *, for_good: bool) -> None:
        """Leave this peer: no path to it is left; `for_good`: nor will there be one."""
        self._tell(lambda node: node.lost(key, for_good=for_good))

    def gives_no_more(self, key: str) -> None:
        """Request nothing from this peer any more, which may go on reading here."""
        self._tell(lambda node: node.gives_no_more(key))

    def _tell(self, tell: Callable[[Node], None]) -> None:
        if self._node is None:
            self._untold.append(tell)
        else:
            tell(self._node)

    # -- the end ----------------------------------------------------------------------------------

    def reading_ended(self) -> None:
        """Only serve others from now on, if they read here: the pull's transfer is about to end."""
        self._reads = None
        if self._timer is not None:
            self._timer.cancel()
        if self._node is not None:
            self._node.reading_ended()

    async def close(self) -> None:
        """Leave the swarm, and end all reading here. Idempotent."""
        self.reading_ended()
        await end_tasks(self._task)
        if self._node is not None:
            await self._node.close()
        host, self._host = self._host, None
        if host is not None:
            await host.close()
        self._make_host = None  # and the memory that it serves
