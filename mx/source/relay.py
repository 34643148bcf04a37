"""Serves a pull's memory to other pulls while it is filled."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Mapping, Sequence

from mx.core.holdings import Holdings
from mx.core.pages import Pages
from mx.core.types import Manifest, ModelKey, SourceRecord, SourceRole
from mx.errors import MxError, NotAllowedError
from mx.memory.live import Memory
from mx.source.model import SourceModel
from mx.source.server import SourceOptions, SourceServer
from mx.swarm.node import Node
from mx.swarm.stream import PeerStream, StreamDialer
from mx.transport import Transport
from mx.wire.channel import Remote, Role, dial
from mx.wire.documents import fetch

log = logging.getLogger(__name__)

#: How long readers have to finish their reads.
DRAIN_S = 2.0
#: Pause between reports of new layers to the coordinator.
ADVERTISE_S = 1.0
#: The longest pause after the coordinator has refused that.
REFUSED_S = 60.0


class Relay:
    """A source in the pull's process: see `mx.swarm.sharing.Host`."""

    def __init__(
        self,
        source_id: str,
        options: SourceOptions,
        transports: Mapping[str, Transport],
        coordinator: str | None,
        key: ModelKey,
        manifest: Manifest,
        pages: Pages,
        arena: Memory,
    ) -> None:
        """
        Args:
            source_id: The id by which others know the pull.
            options: How to serve.
            transports: The transports by name.
            coordinator: Where to register; None: nowhere.
            key: The model.
            manifest: The model's manifest. Side files are added to its documents.
            pages: The model's pages, as the pull learns them.
            arena: The memory that is filled. The caller releases it, after `close`.
        """
        self._options = options
        self._coordinator = coordinator
        self._server = SourceServer(options, transports)
        self._held = SourceModel(
            key,
            manifest,
            arena,
            pages,
            role=SourceRole.RELAY,
            borrowed=True,
            source_id=source_id,
            layers=(),
            growing=True,
        )
        self._streams = StreamDialer(options.tls, options.insecure)
        self._landed = asyncio.Event()  # its node's, once it has started
        self._listens = False
        #: Why the coordinator does not list it, where that is a policy's word.
        self._refused: NotAllowedError | None = None

    async def start(self, node: Node) -> None:
        """See `mx.swarm.sharing.Host`."""
        await self._server.start()
        await self._server.offer(self._held, node)
        self._landed = node.landed
        self._listens = True

    def record(self) -> SourceRecord | None:
        """See `mx.swarm.sharing.Host`."""
        return self._server.record(self._held) if self._listens else None

    async def dial(self, record: SourceRecord) -> PeerStream:
        """See `mx.swarm.sharing.Host`."""
        return await self._streams.dial(record)

    async def keep_listed(
        self, holdings: Holdings, sources: Callable[[], Sequence[SourceRecord]]
    ) -> None:
        """See `mx.swarm.sharing.Host`. Side files are fetched before the pull is listed as
        whole."""
        if self._coordinator is None:
            return
        reported: tuple[tuple[int, int], ...] | None = None
        whole, pause_s = False, ADVERTISE_S
        while not whole:
            self._landed.clear()
            whole, held = holdings.whole, holdings.layers()
            if whole:  # a source that is listed as whole serves the side files too
                await self._get_side_files(sources())
            try:
                self._held.layers = held
                if reported is None:
                    await self._server.register(self._coordinator)
                elif held != reported:
                    await self._server.advertise()
                reported, self._refused = held, None
                pause_s = ADVERTISE_S
            except MxError as error:  # tried again below, and reading does not depend on it
                whole = False
                self._landed.set()
                # Without the right to serve it is refused each time, until there is a new policy.
                refused = error if isinstance(error, NotAllowedError) else None
                pause_s = min(2 * pause_s, REFUSED_S) if refused else ADVERTISE_S
                if refused and not self._refused:
                    log.info("other pulls are not told of this one: %s", error)
                self._refused = refused
            if not whole:
                await asyncio.sleep(pause_s)  # a report follows after no less than this
                await self._landed.wait()

    async def _get_side_files(self, sources: Sequence[SourceRecord]) -> None:
        """Fetch the side files that the pull did not need, since its readers may."""
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
                manifest.documents.update(documents)  # the server sends these to readers
                return
            finally:
                await channel.close(None)

    async def settle(self) -> tuple[SourceServer, SourceModel]:
        """Become an ordinary source. Called when the arena is whole and sealed.

        Returns:
            The server and the model, which the caller owns from now on.

        Raises:
            LocalError: It was withdrawn: this process has written to it.
            NotAllowedError: The coordinator's policy does not let it be listed.
        """
        if self._refused:
            raise self._refused
        await self._server.settle(self._held.source_id)
        with contextlib.suppress(MxError):  # the next renewal of the registration reports it too
            await self._server.advertise()
        return self._server, self._held

    async def close(self) -> None:
        """End all reads here: running ones may finish within `DRAIN_S`. The streams have ended."""
        await self._server.drain(DRAIN_S)
        await self._server.close()
        await self._streams.close()
