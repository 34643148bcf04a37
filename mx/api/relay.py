"""Serves a pull's memory to other peers while it fills."""

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

#: Seconds for which readers may finish their current reads when the relay closes.
DRAIN_S = 2.0


class Relay:
    """Implements `mx.target.relay.RelayHost` with a source server of its own."""

    def __init__(
        self, source_id: str, options: SourceOptions, transports: Mapping[str, Transport]
    ) -> None:
        """Prepare a server, which does not listen before `start`.

        Args:
            source_id: The id under which the coordinator lists this source.
            options: How the server listens and what bounds it keeps.
            transports: Transports by name.
        """
        self._source_id = source_id
        self._server = SourceServer(options, transports)
        self._held: HeldModel | None = None

    async def start(self, key: ModelKey, manifest: Manifest, arena: Arena, node: Node) -> None:
        """Listen, and offer the arena, which holds no verified layer yet.

        Args:
            key: The model that is pulled.
            manifest: The manifest of its weights.
            arena: The pull's memory. The pull owns it; it must outlive this relay.
            node: Trades the pull's chunks with other peers.

        Raises:
            LocalError: The server can't listen.
        """
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
        """Return how other peers find this source; None before it listens."""
        return None if self._held is None else self._server.record(self._held.source_id)

    def hold(self, layers: Sequence[tuple[int, int]]) -> None:
        """Record the layers that are ready, as half-open ranges of indices."""
        if self._held is not None:
            self._held.layers = layers

    async def register(self, coordinator: str) -> None:
        """Register this source with the coordinator at HOST:PORT. Raises CoordinatorError."""
        await self._server.register(coordinator)

    async def advertise(self) -> None:
        """Report the layers that are ready to the coordinator. Raises CoordinatorError."""
        await self._server.advertise()

    async def settle(self) -> tuple[SourceServer, HeldModel]:
        """Become an ordinary source, once the arena is whole and sealed.

        Returns:
            The server and the model that it holds; the caller owns them from then on.
        """
        assert self._held is not None
        await self._server.settle(self._source_id)
        with contextlib.suppress(MxError):  # the renewed registration reports it too
            await self._server.advertise()
        return self._server, self._held

    async def close(self) -> None:
        """Wait up to `DRAIN_S` for the current readers, then close the server."""
        await self._server.drain(DRAIN_S)  # those that read something now
        await self._server.close()
