"""A pull among others of the same model: it can be found and read from while it still receives,
and reads from those. Ties a `Member` to the pull's crew and engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Sequence

import grpc.aio

from mx.core.holdings import Holdings, HoldingsListener
from mx.core.planner import Plan
from mx.core.types import ModelKey, SourceRecord
from mx.errors import MxError
from mx.memory.arena import Arena
from mx.swarm.node import Node
from mx.swarm.stream import PeerStream
from mx.target.connections import ConnectionPool
from mx.target.locator import side_files
from mx.target.options import PullOptions
from mx.target.relay import RelayHost
from mx.target.transfer import Transfer
from mx.wire.address import host_of
from mx.wire.channel import Remote, Role, cut, dial
from mx.wire.rpc import Stub
from mx.wire.v1 import peer_pb2

log = logging.getLogger(__name__)

#: The coordinator is told of new layers this often.
ADVERTISE_S = 1.0


class Trading:
    """One pull's, on the loop; outlives the reading, so that others can go on reading here."""

    def __init__(
        self,
        own_id: str,
        options: PullOptions,
        host: RelayHost,
        transfer: Transfer,
        pool: ConnectionPool,
        plan: Callable[[Sequence[SourceRecord]], Plan],
    ) -> None:
        """`plan` finds the ways to read from sources."""
        self._options = options
        self._host = host
        self._manifest = manifest = transfer.manifest
        self._transfer: Transfer | None = transfer
        self._pool: ConnectionPool | None = pool
        self._holdings = transfer.holdings
        self._plan = plan
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._ending: set[asyncio.Task[None]] = set()  # channels of talks that are over
        self._key = options.key
        self._sources: Sequence[SourceRecord] = ()
        self._task: asyncio.Task[None] | None = None
        grid = manifest.grid
        self.node = Node(own_id, len(grid), grid.chunk_nbytes, self, host.record, self._dial)
        pool.source_lost = lambda source_id: self.node.lost(
            source_id, for_good=pool.bans(source_id)
        )
        pool.expecting = lambda: self.node.hopeful

    def begin(self, key: ModelKey, arena: Arena, sources: Sequence[SourceRecord]) -> None:
        """Be found, and get to know these and others. A pull goes on alone where that fails."""
        self._key, self._sources = key, sources
        self._task = asyncio.create_task(self._run(arena), name="mx-swarm")

    def met(self, sources: Sequence[SourceRecord]) -> None:
        """These hold the model now, or parts of it."""
        self._sources = sources
        self.node.peers.met(sources)

    async def _run(self, arena: Arena) -> None:
        try:
            await self._host.start(self._key, self._manifest, arena, self.node)
        except MxError as error:
            log.warning("others can't read here: %s", str(error))
            self.node.read_freely()
            return
        self.node.peers.met(self._sources)
        if self._options.coordinator is not None:
            await self._advertise(self._options.coordinator)

    async def _advertise(self, coordinator: str) -> None:
        """Until all is held and the coordinator knows."""
        whole = ((0, len(self._manifest.layout.layers)),)
        told: tuple[tuple[int, int], ...] | None = None
        while told != whole:
            held = self.node.holdings.layers()
            if held == whole:  # what is listed as whole gives the side files too
                await self._get_side_files()
            with contextlib.suppress(MxError):  # it is told again, and nobody needs it to read
                self._host.hold(held)
                if told is None:
                    await self._host.register(coordinator)
                elif held != told:
                    await self._host.advertise()
                told = held
            await asyncio.sleep(ADVERTISE_S)

    async def _get_side_files(self) -> None:
        """Have those that this pull had no use for, so that those that read here can."""
        manifest, key, channel = self._manifest, self._key, self._channel
        if all(side.digest in manifest.documents for side in manifest.packaging.side_files):
            return
        sources = random.sample(self._sources, len(self._sources))
        try:
            sides = await side_files(key, manifest, sources, channel)
        except MxError as error:
            log.info("side files can't be passed on: %s", str(error))
            return
        manifest.documents.update(sides)  # the very ones that are served

    @property
    def listening_host(self) -> RelayHost | None:
        return None if self._host.record() is None else self._host

    def reading_ended(self) -> None:
        """Engine and crew are about to end: from now on this only gives."""
        self._transfer = self._pool = None

    # -- what the member wants of the pull --------------------------------------------------------

    @property
    def holdings(self) -> Holdings:
        return self._holdings

    def subscribe(self, listener: HoldingsListener) -> int:
        assert self._transfer is not None
        return self._transfer.subscribe(listener)

    def coordinate(self) -> None:
        if self._pool is not None and self._transfer is not None:
            self._pool.coordinate()
            self._transfer.coordinate()

    def read_freely(self) -> None:
        if self._pool is not None and self._transfer is not None:
            self._pool.read_freely()
            self._transfer.read_freely()

    def allow(self, source_id: str, chunk: int) -> bool:
        return self._transfer is not None and self._transfer.allow(source_id, chunk)

    def withdraw(self, source_id: str, chunk: int) -> None:
        if self._transfer is not None:
            self._transfer.withdraw(source_id, chunk)

    def reaches(self, source: SourceRecord) -> bool:
        return bool(self._plan([source]).paths)

    def connect(self, source: SourceRecord) -> None:
        if self._pool is not None:
            self._pool.join(source.source_id, self._plan([source]).paths)

    def disconnect(self, source_id: str) -> None:
        if self._pool is not None:
            self._pool.leave(source_id)

    # ----------------------------------------------------------------------------------------------

    def _channel(self, endpoint: str) -> grpc.aio.Channel:
        if endpoint not in self._channels:
            self._channels[endpoint] = dial(
                endpoint, tls=self._options.tls, insecure=self._options.insecure
            )
        return self._channels[endpoint]

    async def _dial(self, record: SourceRecord) -> PeerStream:
        endpoint = record.endpoint
        service = peer_pb2.DESCRIPTOR.services_by_name["Peer"]
        # One for each talk, since others name whom to dial: what has no end here ends with it.
        channel = dial(endpoint, tls=self._options.tls, insecure=self._options.insecure)
        call = Stub(channel, service, Remote(Role.SOURCE, endpoint)).Trade()

        def end() -> None:
            cut(call)
            ending = asyncio.create_task(channel.close(None), name="mx-talk-channel")
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

        return PeerStream(endpoint, call.read, call.write, end, address=host_of(endpoint))

    async def close(self) -> None:
        """Leave the others, and let nobody read any more. Idempotent."""
        self.reading_ended()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.node.close()
        await self._host.close()
        await asyncio.gather(*self._ending)
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close(None)
