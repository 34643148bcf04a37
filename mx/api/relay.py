"""A pull's memory, served to others while it fills."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from mx.core.types import Manifest, ModelKey, SourceRecord, SourceRole
from mx.errors import MxError
from mx.memory.arena import Arena
from mx.source.model import HeldModel
from mx.source.server import SourceOptions, SourceServer
from mx.swarm.node import Node
from mx.transport import Transport

#: Readers may finish what they are at for so long.
DRAIN_S = 2.0


class Relay:
    """`mx.target.relay.RelayHost` by a source of its own."""

    def __init__(
        self, source_id: str, options: SourceOptions, transports: Mapping[str, Transport]
    ) -> None:
        self._source_id = source_id
        self._server = SourceServer(options, transports)
        self._held: HeldModel | None = None

    async def start(self, key: ModelKey, manifest: Manifest, arena: Arena, node: Node) -> None:
        held = HeldModel(
            key,
            manifest,
            arena,
            SourceRole.RELAY,
            borrowed=True,
            source_id=self._source_id,
            layers=(),
            growing=True,
        )
        await self._server.start()
        await self._server.offer(held, node)
        self._held = held

    def record(self) -> SourceRecord | None:
        return None if self._held is None else self._server.record(self._held.source_id)

    def hold(self, layers: Sequence[tuple[int, int]]) -> None:
        if self._held is not None:
            self._held.layers = layers

    async def register(self, coordinator: str) -> None:
        await self._server.register(coordinator)

    async def advertise(self) -> None:
        await self._server.advertise()

    async def settle(self) -> tuple[SourceServer, HeldModel]:
        """The arena is whole, and sealed: from now on this is a source as any other, which is the
        caller's."""
        assert self._held is not None
        await self._server.settle(self._source_id)
        with contextlib.suppress(MxError):  # it is told with the registration that it renews
            await self._server.advertise()
        return self._server, self._held

    async def close(self) -> None:
        await self._server.drain(DRAIN_S)  # those that read something now
        await self._server.close()
