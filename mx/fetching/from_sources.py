"""Reads a model from its sources: resolve, plan, allocate, prefill, transfer, commit. On the loop;
the bytes are moved by `mx.fetching.transfer`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import logging
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from mx import trace
from mx.core.answers import away
from mx.core.connections import Connections, PathEntry
from mx.core.pages import Pages
from mx.core.types import Manifest, SourceRecord
from mx.errors import (
    IncompleteError,
    LocalError,
    MxError,
    NoSourceError,
    SourceError,
    another,
    release_frames,
)
from mx.fetching.attaching import Attacher
from mx.fetching.attempt import TransferAttempt
from mx.fetching.connector import Connector
from mx.fetching.delivery import Delivery
from mx.fetching.files import DocumentCollector, write_files
from mx.fetching.prefill import Fill, prefilling
from mx.fetching.reads import Connection
from mx.fetching.report import (
    PathReport,
    PullReport,
    VerifiedBy,
    final_error,
    none_opened,
    superseded,
)
from mx.fetching.resolver import FoundPaths, fetch_manifest, locate, retry_until_found
from mx.memory.arena import BorrowedArena
from mx.runtime import beside, in_thread, uncut
from mx.transport import Preparing, View
from mx.views import located_spans
from mx.wire.locate import Locator

if TYPE_CHECKING:
    from mx.fetching.connections import ConnectionPool
    from mx.fetching.pages import PageFetcher
    from mx.fetching.transfer import Transfer
    from mx.memory.live import Memory
    from mx.swarm.sharing import Sharing

log = logging.getLogger(__name__)

#: What attaching does without.
_FOR_TRANSFERS = (
    "mx.swarm.sharing",
    "mx.fetching.connections",
    "mx.fetching.pages",
    "mx.fetching.transfer",
)
#: A pull that follows its model waits at least so long for it while it changes.
FOLLOW_S = 10.0
#: How long a pull whose memory others will read waits for pages, once its bytes are there.
REST_S = 10.0


class FromSources(TransferAttempt):
    """One attempt to read the model from sources, and what they do not serve from the stores, if
    those hold the same weights."""

    async def run(self) -> PullReport:
        """Find, read and commit the model.

        Raises:
            MxError: The sources did not serve it, nor the stores what was missing.
        """
        options, context, closing = self._options, self._context, self._closing
        wake = self.edition.log.changed.set
        try:
            locator = Locator(options)
            closing.push_async_callback(locator.close)
            connector = Connector(
                options, context.place.result, context.transports, wake, self.edition.reader_id
            )
            closing.push_async_callback(connector.close)
            forced: object = context.transports.get(options.transport or "")
            if isinstance(forced, Preparing):  # while the coordinator is asked
                prepared = asyncio.create_task(in_thread(forced.prepare), name="mx-prepare")
                closing.push_async_callback(asyncio.wait, (prepared,))
            found = await self._resolve(locator, connector)
            delivery = self._deliver(found.manifest, strong=options.strong)
            if options.strong:
                closing.push_async_callback(in_thread, delivery.settle)
            if options.out is not None:
                await write_files(
                    options,
                    locator,
                    found.located,
                    found.manifest,
                    delivery.side_page,
                    [],
                    self._log.waiting,
                )
            with trace.span("pull.read", nbytes=found.manifest.layout.payload_nbytes) as span:
                try:
                    report = await self._read(locator, connector, found, delivery)
                    span.set(retries=report.retries, paths=len(report.paths))
                finally:
                    transfer = self._transfer
                    if transfer is not None and transfer.retries:
                        span.set(retries=transfer.retries, wrong=transfer.wrong)
        finally:
            await uncut(closing.aclose())
        return await self._commit(delivery, report)

    # -- resolve, plan ----------------------------------------------------------------------------

    async def _resolve(self, locator: Locator, connector: Connector) -> FoundPaths:
        options = self._options
        # A source that changes its weights comes back.
        wait_s = max(options.wait_s, FOLLOW_S) if options.follow else options.wait_s
        found = await retry_until_found(
            lambda: self._find(locator, connector), wait_s, self._log.waiting
        )
        self.edition.manifest = found.manifest
        if options.selection is not None:  # names of 50,000 tensors take a while
            self.edition.subset = await in_thread(options.selection.of, found.manifest.layout)
        self.edition.log.planned(len(found.manifest.layout.layers), found.manifest)
        self.edition.files.described(found.located, found.manifest)
        return found

    async def _find(self, locator: Locator, connector: Connector) -> FoundPaths:
        """Look the model up once, plan, begin to connect, and fetch the manifest meanwhile.

        Raises:
            UnknownModelError, CoordinatorError, SourceError, ManifestError.
        """
        options, history, plan = self._options, self._history, self._context.plan
        located = await locate(locator)
        paths = plan([source for source in located.sources if source.whole])
        history.key, history.named = located.model, located.ref
        history.newest = str(located.newest) if located.newest not in (None, located.model) else ""
        await connector.begin(paths.chosen)
        manifest = await fetch_manifest(locator, located)
        # A manifest is enough with stores, which may hold the weights.
        enough = paths.paths or (options.bound and options.stores)
        if not enough and self.edition.reader_id and not located.is_away:
            enough = plan([source for source in located.sources if not source.whole]).paths
        if not enough and located.newest is not None and located.says_away:
            message, hint = away(located.newest, located.older)
            raise NoSourceError(message, hint=hint)
        if not enough:
            hint = "start one with mx serve, or name one with `peer=HOST:PORT`"
            if options.transport and paths.why_none():
                hint = f"leave out `transport={options.transport}`, or {hint}"
            raise NoSourceError(
                f"no source of {located.model} can be reached from here: "
                + (paths.why_none() or "none is registered"),
                hint=hint,
            )
        if options.hold:  # later readers of this pull may write the side files
            collector = DocumentCollector()
            await locator.write_side_files(manifest, located.sources, collector.write)
            manifest = replace(manifest, documents=manifest.documents | collector.take())
        return FoundPaths(located, manifest, paths)

    # -- prefill ---------------------------------------------------------------------------------

    async def _prefill(self, fill: Fill, transfer: Transfer, fetcher: PageFetcher) -> None:
        options, closed = self._options, self._context.closed
        self._log.phase = "resuming"
        transfer.start()
        if options.reuse:  # which chunks are held is known by their blocks
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(options.stall_timeout_s):
                    await fetcher.run()
        await uncut(in_thread(fill, transfer, transfer.pages, closed.is_set))

    # -- transfer ---------------------------------------------------------------------------------

    async def _read(
        self, locator: Locator, connector: Connector, found: FoundPaths, delivery: Delivery
    ) -> PullReport:
        """Attach a source's memory, or transfer over all paths that go together, and over others
        when those are lost."""
        manifest, options, edition_log = found.manifest, self._options, self.edition.log
        causes, plan = self._history.causes, self._context.plan
        connections = Connections(options.patience_s, local_exempt=not options.coordinate_always)
        connections.add(found.paths.paths)
        attachable = self._history.attaches and any(path.attach for path in found.paths.paths)
        fill = prefilling(delivery, options.reuse, attachable=attachable)

        self._log.phase = "connecting"
        unmapped: tuple[Connection, PathEntry] | None = None  # its memory can still be copied
        if attachable and fill is None:
            attacher = Attacher(connector, connections, manifest, delivery, causes)
            mapped, unmapped = await attacher.run()
            self._history.left += attacher.left
            if mapped is not None:
                await connector.give_back(mapped[0])  # the memory outlives session and lease
                return await self._deliver_attached(manifest, *mapped, delivery)

        for name in (*_FOR_TRANSFERS, *options.host_modules):
            if name not in sys.modules:
                await in_thread(importlib.import_module, name)  # the loop goes on meanwhile
        from mx.fetching.connections import ConnectionPool
        from mx.fetching.pages import PageFetcher
        from mx.memory.live import LiveMemory

        several = len(found.paths.chosen) > 1
        arena, transfer = await self._allocate(manifest, delivery, several_connections=several)
        self.edition.sharing = sharing = self._sharing(found, arena, transfer)
        self._closing.push_async_callback(self._end_reading, sharing)
        fetcher = PageFetcher(
            connector.channel,
            transfer,
            lambda: sharing.sources,
            causes,
            stall_timeout_s=options.stall_timeout_s,
        )
        if fill is not None:
            await self._prefill(fill, transfer, fetcher)

        stores_follow = bool(options.stores) and options.device == "cpu"
        pool = ConnectionPool(
            connections,
            connector,
            transfer,
            sharing,
            locator,
            found.located,
            plan,
            edition_log,
            self._log,
            causes,
            # What the name means by now is looked for anew.
            wait_s=0.0 if options.follow else options.wait_s,
            stores_follow=stores_follow,
        )
        self._closing.push_async_callback(pool.close)
        if unmapped is not None:
            pool.take(*unmapped)
        await beside(pool.run(), pool.look(), _fetch_pages(fetcher, pool))
        if stores_follow and not edition_log.ended:
            await self._complete(manifest, transfer, sharing)
        if (
            not transfer.started
            or edition_log.failure is not None
            or edition_log.causes is not None
        ):
            failure = self._failure(manifest, transfer)
            if type(failure) in (IncompleteError, NoSourceError):  # and not superseded already
                with contextlib.suppress(MxError):
                    await locator.again(found.located)
                if locator.superseded_by is not None:
                    newest, why = locator.superseded_by, failure.message
                    raise superseded(found.located.model, newest, why) from failure
            raise failure
        if isinstance(arena, LiveMemory) and (moved := await in_thread(arena.changed)):
            raise LocalError(f"`into` changed while it was filled: {moved}")
        if options.hold and transfer.pages.missing:  # others will ask for them here
            await fetcher.rest(options.wait_s + REST_S, str(self._history.key))
        report = self._report(
            manifest,
            transfer.paths(),
            delivery.verified_by,
            transfer.retries,
            [*self._history.left, *pool.left()],
        )
        if self._wanted is not None:
            given_nbytes = sum(path.bytes for path in report.paths if path.given)
            report.moved_bytes = self._wanted.nbytes - given_nbytes
        return report

    async def _deliver_attached(
        self, manifest: Manifest, connection: Connection, view: View, delivery: Delivery
    ) -> PullReport:
        """Deliver every layer of the mapped memory."""
        self.edition.arena, self.edition.pages = BorrowedArena(view), Pages(manifest)
        self._log.reading_began(time.monotonic())
        by = VerifiedBy.STRONG if self._options.strong else VerifiedBy.SOURCE
        source = connection.path.source

        def announce() -> None:
            for layer in range(len(manifest.layout.layers)):
                if not self._context.closed.is_set():
                    located_spans(delivery.place(view, layer))  # all of it is mapped after this
                    delivery.announce(view, layer, by)

        # The caller, who is told of each, may take long, and a closed pull waits as for a transfer.
        announcing = asyncio.ensure_future(in_thread(announce))
        patience_s = 2 * self._options.stall_timeout_s
        self._closing.push_async_callback(asyncio.wait, (announcing,), timeout=patience_s)
        try:
            await asyncio.shield(announcing)
        except SourceError as error:  # some of its memory can't be mapped
            self.mapped_in_part, self._history.attaches = True, False
            release_frames(error)  # which refer to the view
            raise another(error.with_traceback(None)) from None  # `announcing` keeps this one
        path = PathReport(
            connection.path.transport,
            connection.peer,
            manifest.layout.payload_nbytes,
            self.edition.log.last_layer_s(),
            attached=True,
            pid=source.place.pid if isinstance(source, SourceRecord) else 0,
        )
        return self._report(manifest, [path], by, left=self._history.left)

    def _sharing(self, found: FoundPaths, arena: Memory, transfer: Transfer) -> Sharing:
        from mx.swarm.sharing import Sharing

        manifest, options, plan = found.manifest, self._options, self._context.plan
        make, reader_id = options.host, self.edition.reader_id
        make_host = None
        if make is not None and reader_id:
            key, pages = self._history.key, transfer.pages
            make_host = functools.partial(make, reader_id, key, manifest, pages, arena)
        rate = found.paths.gb_per_s * 1e9
        sharing = Sharing(
            reader_id,
            manifest.grid,
            transfer,
            make_host,
            lambda source: source.ref.same_weights(manifest.ref) and bool(plan([source]).paths),
            self.edition.log.changed.set,
            expected_s=manifest.layout.payload_nbytes / rate if rate else 0.0,
            alone_because=options.alone_because,
            coordinate_always=options.coordinate_always,
        )
        sharing.met(found.located.sources)
        return sharing

    async def _complete(self, manifest: Manifest, transfer: Transfer, sharing: Sharing) -> None:
        """Read what the sources did not serve from the stores, which have the same weights."""
        chain, edition_log = self._context.chain, self.edition.log
        failure = self._failure(manifest, transfer)
        chain.sources_gave(transfer.paths(), failure)
        sharing.reading_ended()  # peers have no say in what is read from a store
        await chain.complete(manifest, transfer.pages, transfer, edition_log, self._log)
        if edition_log.failure is None and edition_log.causes is not None:
            raise chain.error(failure)

    def _failure(self, manifest: Manifest, transfer: Transfer) -> MxError:
        """Return why the sources did not serve everything."""
        edition_log, causes, key = self.edition.log, self._history.causes, str(self._history.key)
        if not transfer.started:
            return none_opened(key, causes)
        if edition_log.failure is not None:
            return edition_log.failure
        causes += transfer.causes if edition_log.causes is None else edition_log.causes
        came, ready, wanted = transfer.landed_nbytes(), self.edition.log.layers_ready, self._wanted
        total = None if wanted is None else wanted.nbytes
        return final_error(key, manifest.layout, ready, came, causes, total)

    # -- ends -------------------------------------------------------------------------------------

    async def _end_reading(self, sharing: Sharing) -> None:
        sharing.reading_ended()
        if not sharing.begun:
            await self.leave()

    async def leave(self) -> None:
        """Leave the swarm, and end all reads of this attempt's memory. Idempotent."""
        sharing, self.edition.sharing = self.edition.sharing, None
        if sharing is not None:
            await sharing.close()


async def _fetch_pages(fetcher: PageFetcher, pool: ConnectionPool) -> None:
    """Fetch pages, after a path was opened: on a narrow link they would delay that, and all bytes
    with it, and they are needed only for bytes that are there."""
    await pool.tried.wait()
    await fetcher.run()
