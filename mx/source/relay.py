"""A pull's memory, served to others while it fills."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Mapping, Sequence

from mx.core.holdings import Holdings
from mx.core.types import Manifest, ModelKey, SourceRecord, SourceRole
from mx.errors import MxError
from mx.memory.arena import Arena
from mx.source.model import HeldModel
from mx.source.server import SourceOptions, SourceServer
from mx.swarm.node import Node
from mx.transport import Transport
from mx.wire.channel import Remote, Role, dial
from mx.wire.documents import fetch

log = logging.getLogger(__name__)

#: Readers may finish what they are at for so long.
DRAIN_S = 2.0
#: The coordinator is told of new layers this often.
ADVERTISE_S = 1.0


class Relay:
    """`mx.swarm.sharing.Host`: a source of its own in the pull's process."""

    def __init__(
        self,
        source_id: str,
        options: SourceOptions,
        transports: Mapping[str, Transport],
        coordinator: str | None,
        key: ModelKey,
        manifest: Manifest,
        arena: Arena,
    ) -> None:
        """
        Args:
            source_id: By which others know the pull.
            options: How to serve.
            transports: By name.
            coordinator: Where to be listed, or None.
            key: The model.
            manifest: Its manifest, to whose documents side files may be added.
            arena: Fills meanwhile. It stays the caller's, who releases it after `close`.
        """
        self._options = options
        self._coordinator = coordinator
        self._server = SourceServer(options, transports)
        self._held = HeldModel(
            key,
            manifest,
            arena,
            SourceRole.RELAY,
            borrowed=True,
            source_id=source_id,
            layers=(),
            growing=True,
        )
        self._listens = False

    async def start(self, node: Node) -> None:
        await self._server.start()
        await self._server.offer(self._held, node)
        self._listens = True

    def record(self) -> SourceRecord | None:
        return self._server.record(self._held.source_id) if self._listens else None

    async def keep_listed(
        self, holdings: Holdings, sources: Callable[[], Sequence[SourceRecord]]
    ) -> None:
        if self._coordinator is None:
            return
        told: tuple[tuple[int, int], ...] | None = None
        whole = False
        while not whole:
            whole, held = holdings.whole, holdings.layers()
            if whole:  # what is listed as whole gives the side files too
                await self._get_side_files(sources())
            try:
                self._held.layers = held
                if told is None:
                    await self._server.register(self._coordinator)
                elif held != told:
                    await self._server.advertise()
                told = held
            except MxError:  # it is tried again, and reading does not depend on it
                whole = False
            await asyncio.sleep(ADVERTISE_S)

    async def _get_side_files(self, sources: Sequence[SourceRecord]) -> None:
        """Fetch those that the pull had no use for: its readers may have."""
        manifest, options = self._held.manifest, self._options
        sides = {(side.digest, side.nbytes) for side in manifest.packaging.side_files}
        refs = [ref for ref in sides if ref[0] not in manifest.documents]
        for source in random.sample(sources, len(sources)) if refs else ():
            if source.source_id == self._held.source_id:
                continue
            channel = dial(source.endpoint, tls=options.tls, insecure=options.insecure)
            try:
                remote = Remote(Role.SOURCE, source.endpoint)
                documents = await fetch(channel, refs, who=remote)
            except MxError as error:
                log.info("side files can't be passed on: %s", str(error))
            else:
                manifest.documents.update(documents)  # the very ones that are served
                return
            finally:
                await channel.close(None)

    async def settle(self) -> tuple[SourceServer, HeldModel]:
        """The arena is whole, and sealed: from now on this is a source as any other, which is the
        caller's."""
        await self._server.settle(self._held.source_id)
        with contextlib.suppress(MxError):  # the registration that is renewed tells it too
            await self._server.advertise()
        return self._server, self._held

    async def close(self) -> None:
        await self._server.drain(DRAIN_S)  # those that read something now
        await self._server.close()
