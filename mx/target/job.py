"""One pull, from a model's name to layers that are ready: resolve, plan, allocate, prefill,
transfer, commit. On the loop; the bytes are moved by `mx.target.transfer`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack

from mx import trace
from mx.core.connections import Connections, Entry
from mx.core.pages import Pages
from mx.core.planner import Plan
from mx.core.progress import Progress, progress_of
from mx.core.reuse import Held
from mx.core.selection import Subset
from mx.core.types import Layout, Manifest, ManifestRef, SourceRecord
from mx.core.wanted import Wanted
from mx.errors import (
    ConfigError,
    CoordinatorError,
    DigestError,
    IncompleteError,
    LocalError,
    MxError,
    NoSourceError,
    StaleGenerationError,
)
from mx.memory.arena import BorrowedArena
from mx.memory.in_place import InPlace
from mx.memory.live import LiveMemory, Memory
from mx.memory.subset import SubsetMemory
from mx.runtime import beside, in_thread, uncut, unexpected
from mx.storage.stores import Opening, Store
from mx.swarm.node import Node
from mx.swarm.sharing import Sharing
from mx.swarm.stream import StreamDialer
from mx.target import whole
from mx.target.attaching import Attacher
from mx.target.caching import ask_cache
from mx.target.chain import Chain
from mx.target.connections import ConnectionPool
from mx.target.connector import Connector
from mx.target.delivery import Delivery
from mx.target.events import EventLog, Outcome
from mx.target.exchange import Exchange
from mx.target.files import SideFiles, write_documents
from mx.target.opening import stored_files
from mx.target.options import PullOptions
from mx.target.pages import PageFetcher
from mx.target.paths import plan_paths, target_place
from mx.target.prefill import prefilling
from mx.target.ranks import meet_ranks
from mx.target.reads import Connection
from mx.target.report import (
    LeftSource,
    PathReport,
    PullReport,
    VerifiedBy,
    again,
    final_error,
    none_opened,
)
from mx.target.resolver import Found, Resolver, find, retry_until_found
from mx.target.transfer import Transfer
from mx.transport import Span, Transport
from mx.views import host_bytes
from mx.wire.locate import Located, Locator, write_side_files

log = logging.getLogger(__name__)

#: A pull that follows its model waits at least so long for it while it changes.
FOLLOW_S = 10.0
#: How long a pull whose memory others will read waits for pages, once its bytes are there.
REST_S = 10.0


#: What the error of a failed pull into a module says.
UNUSABLE = "`into` holds a part of the new weights: do not use it before a pull into it succeeds"


class Job:
    """One pull; call `run` on the loop. `manifest`, `pages` and `arena` are None until they are
    known."""

    def __init__(
        self, options: PullOptions, transports: Mapping[str, Transport], log: EventLog
    ) -> None:
        self.options = options
        self.key = options.key
        self.manifest: Manifest | None = None
        self.pages: Pages | None = None
        self.arena: Memory | None = None
        self.subset: Subset | None = None  # of a pull of some tensors, with the manifest
        self.node: Node | None = None
        self.cached_at = ""  # where this host's cache holds the model, as it says
        self.kept = ""  # how to go on from what a failed pull has left on disk
        self.files = SideFiles(options, log)
        #: The source id by which others know this pull; "" if others can't read from it.
        self.reader_id = ""
        in_place = options.into is None or isinstance(options.into, InPlace)
        gives = options.selection is None  # whole chunks
        if options.host is not None and options.device == "cpu" and in_place and gives:
            self.reader_id = str(uuid.uuid4())
        self._transports = transports
        self._log = log
        self._place = target_place(options)
        self._transfer: Transfer | None = None
        self._wanted: Wanted | None = None
        self._ranks = options.local_ranks  # to meet
        self._delivery: Delivery | None = None
        self._streams = StreamDialer(options.tls, options.insecure)
        self._causes: list[MxError] = []
        self._tried: list[ManifestRef] = []  # whose sources have lied
        self._left: list[LeftSource] = []  # whose memory was attached, and is wrong
        self._disk_done = (0, 0)
        self._chain = Chain(options)
        self._early_layout: Layout | None = (
            None  # of what is delivered before the manifest is known
        )
        self._named: ManifestRef | None = None  # what the name means to the coordinator
        #: Whether tensors of `into` may hold a part of the new weights, also of an attempt before.
        self._written = False
        self._closed = False

    @property
    def layout(self) -> Layout | None:
        """The layout of `arena`; None until the manifest is known."""
        if self.subset is not None:
            return self.subset.layout
        return self._early_layout if self.manifest is None else self.manifest.layout

    def progress(self) -> Progress:
        """Return a snapshot; from any thread."""
        layout = self.layout
        if layout is None:
            return Progress(*self._disk_done, phase=self._log.phase)
        transfer, log, wanted = self._transfer, self._log, self._wanted
        if transfer is None:
            return progress_of(layout, None, log.is_ready, log.phase)
        sources = [each.peer for each in transfer.connections if not each.lost]
        done_nbytes = transfer.progress()[1]
        return progress_of(
            layout,
            done_nbytes,
            log.is_ready,
            log.phase,
            sources,
            transfer.retries,
            None if wanted is None else wanted.layer_nbytes,
        )

    # -- the run ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run to the end; the log gets the report or the error. Raises only if cancelled."""
        try:
            report = await self._from_chain()
            report.steps = self._chain.report() if self.options.bound else []
            self._log.phase = "complete"
            self._log.finished(report)
        except BaseException as error:  # callers that wait on the log need any error
            failure = unexpected(error)
            self._log.failing(failure)
            try:
                self.kept = await uncut(self._discard())
            finally:
                self._log.failed(again(failure, self.kept))
            if not isinstance(error, Exception):
                raise

    async def _from_chain(self) -> PullReport:
        """Pull from the sources, and complete it from the stores; if no source has described the
        model, or nothing was delivered, from the first store that holds it."""
        chain, begin_again = self._chain, self._log.begin_again
        if not self.options.from_sources:
            return await chain.whole(None, self._from_store, begin_again)
        if self.options.cache:
            self._log.phase = "waiting for the cache"
            held = await ask_cache(self.options, self._count)
            self.cached_at = "" if held is None else held.endpoint
        try:
            report = await self._from_newest_peers()
        except MxError as error:
            chain.sources_gave((), error)
            if not chain.goes_on(error, described=self.manifest is not None) or not begin_again():
                if (failure := chain.failure(error)) is not error:
                    raise failure from error
                raise
            failure = error
        else:
            chain.sources_gave(report.paths, None)
            report.fallback = chain.completed or None
            return report
        return await chain.whole(failure, self._from_store, begin_again)

    async def _from_newest_peers(self) -> PullReport:
        """Pull; with `follow`, when the sources are gone or hold other weights by now, go over to
        what the name means then, and keep what is equal."""
        while True:
            try:
                return await self._from_honest_peers()
            except MxError as error:
                lasting = isinstance(error, LocalError | ConfigError | CoordinatorError)
                if not self.options.follow or lasting or not self._may_follow(error):
                    raise
                manifest, pages, arena = self.manifest, self.pages, self.arena
            if manifest is not None and pages is not None and arena is not None:
                self.options.reuse.append(Held(manifest, pages, host_bytes(arena.view)))
            del arena
            self._log.begin_anew()
            await self._begin_anew()
            self._causes.clear()
            self.key = self.options.key

    def _may_follow(self, error: MxError) -> bool:
        """Return True if the last attempt's source was updated, or sources have brought bytes of
        which none were wrong: what is not there yet may come from another one."""
        if any(isinstance(cause, StaleGenerationError) for cause in self._causes):
            return True
        if isinstance(error, DigestError) or self._transfer is None:
            return False
        return any(path.bytes for path in self._transfer.paths() if path.source != "local")

    async def _begin_anew(self) -> None:
        await self._forget()
        if self.reader_id:  # the coordinator may still know the other one, with its secret
            self.reader_id = str(uuid.uuid4())

    async def _from_honest_peers(self) -> PullReport:
        """Pull from those that hold the weights in one layout and chunk size; if they have lied,
        and nothing of it was delivered, from those that hold them in another."""
        lies: DigestError | None = None
        while True:
            try:
                return await self._from_peers()
            except DigestError as error:
                if self.manifest is None or not self._log.begin_again():
                    raise
                lies = error
                self._tried.append(self.manifest.ref)
            except (CoordinatorError, NoSourceError):
                if lies is None:
                    raise
                raise lies from None
            await self._begin_anew()

    async def _forget(self) -> None:
        """Undo what was begun, to begin again."""
        await uncut(self._discard())
        self.manifest = self.pages = self._transfer = None
        self.subset = self._wanted = self._early_layout = None
        self.files.unknown()

    async def _from_peers(self) -> PullReport:
        outcome, closing = Outcome(), AsyncExitStack()
        try:
            locator = Locator(self.options)
            closing.push_async_callback(locator.close)
            connector = Connector(
                self.options, self._place, self._transports, outcome.changed.set, self.reader_id
            )
            closing.push_async_callback(connector.close)
            found = await self._resolve(locator, connector)
            delivery = self._deliver(found.manifest, outcome, strong=self.options.strong)
            closing.push_async_callback(in_thread, delivery.settle)
            if self.options.out is not None:
                await self._write_side_files(locator, found, delivery)
            with trace.span("pull.read", nbytes=found.manifest.layout.payload_nbytes) as span:
                report = await self._read(locator, connector, found, delivery, outcome, closing)
                span.set(retries=report.retries, paths=len(report.paths))
        finally:
            await uncut(closing.aclose())
        return await self._commit(delivery, outcome, report)

    async def _resolve(self, locator: Locator, connector: Connector) -> Found:
        options = self.options

        def begin(located: Located, paths: Plan) -> None:
            self.key, self._named = located.key, located.ref
            connector.begin(paths.chosen)

        found = await retry_until_found(
            lambda: find(
                locator,
                self._plan,
                begin,
                relays_do=bool(self.reader_id),
                side_files=options.hold,
                tried=self._tried,
                stores_do=options.bound and bool(options.stores),
            ),
            0.0 if self._tried else self._wait_s,
            self._log.waiting,
        )
        self.manifest = found.manifest
        if options.selection is not None:  # names of 50,000 tensors take a while
            self.subset = await in_thread(options.selection.of, found.manifest.layout)
        self._log.planned(len(found.manifest.layout.layers), found.manifest)
        self.files.described(found.located, found.manifest)
        return found

    @property
    def _wait_s(self) -> float:
        """How long to wait for a first source: one that changes its weights comes back."""
        return max(self.options.wait_s, FOLLOW_S) if self.options.follow else self.options.wait_s

    def _plan(self, sources: Sequence[SourceRecord]) -> Plan:
        found = plan_paths(self.options, self._place, self._transports, sources)
        self._chain.met(found, sources, self._place.boot_id)
        return found

    def _deliver(self, manifest: Manifest, outcome: Outcome, *, strong: bool) -> Delivery:
        self._delivery = Delivery(
            manifest,
            self._log,
            outcome,
            strong=strong,
            out=self.options.out,
            keep=self.options.resume and self.options.device == "cpu",
            revision=self.key.revision,
            layout=self.layout,
        )
        return self._delivery

    async def _write_side_files(self, locator: Locator, found: Found, delivery: Delivery) -> None:
        sources: Sequence[SourceRecord] | None = found.located.sources

        async def attempt() -> None:
            nonlocal sources
            known, sources = sources, None  # after a failure, those that are listed then
            known = await locator.again(found.located) if known is None else known
            await locator.write_side_files(found.manifest, known, delivery.side_page)

        try:
            await retry_until_found(attempt, self.options.wait_s, self._log.waiting)
        except MxError as error:
            if isinstance(error, LocalError):
                raise
            stored = await stored_files(self.options, found.manifest.packaging)
            if stored is None:
                raise
            await uncut(
                in_thread(write_documents, found.manifest.packaging, stored[1], delivery.side_page)
            )

    async def _read(
        self,
        locator: Locator,
        connector: Connector,
        found: Found,
        delivery: Delivery,
        outcome: Outcome,
        closing: AsyncExitStack,
    ) -> PullReport:
        """Attach a source's memory, or transfer over all paths that go together, and over others
        when those are lost."""
        manifest, options, paths = found.manifest, self.options, found.paths
        connections = Connections(options.patience_s)
        connections.add(paths.paths)
        attachable = any(path.attach for path in paths.paths)
        fill = prefilling(delivery, options.reuse, attachable=attachable)

        self._log.phase = "connecting"
        unmapped: tuple[Connection, Entry] | None = None  # its memory can still be copied
        if fill is None:
            attacher = Attacher(connector, connections, manifest, delivery, self._causes)
            mapped, unmapped = await attacher.run()
            self._left += attacher.left
            if mapped is not None:
                return await self._deliver_attached(manifest, *mapped, delivery)

        arena = await uncut(self._allocate(self.layout or manifest.layout))
        selected = exchanged = None
        if self.subset is not None:
            selected = await uncut(in_thread(_selected, self.subset, arena, manifest))
            ranks, self._ranks = self._ranks, None
            if ranks is not None:  # once
                self._log.phase = "waiting for ranks"
                exchanged = await meet_ranks(
                    ranks, manifest, selected[1], closing, lambda: self._closed
                )
        self._wanted = wanted = None if selected is None else selected[1]
        self.pages = pages = Pages(manifest, None if wanted is None else wanted.layers)
        self._transfer = transfer = Transfer(
            manifest,
            pages,
            arena.view if selected is None else selected[0].view,
            delivery,
            arena.hasher,
            several_connections=len(paths.chosen) > 1,
            # Who holds the weights for others has verified them against the identity itself.
            shortcut=not (options.strong or options.hold) and options.device == "cpu",
            subset=selected,
            exchange=exchanged,
        )
        del selected
        exchange = None if exchanged is None else exchanged[0]
        closing.push_async_callback(self._end_transfer, transfer, exchange)
        if exchanged is not None:
            exchanged[0].begin(transfer, exchanged[1], options.stall_timeout_s)
        sources = found.located.sources
        fetcher = PageFetcher(
            connector.channel,
            transfer,
            lambda: sources if self.node is None else self.node.sharing.sources,
            self._causes,
            stall_timeout_s=options.stall_timeout_s,
        )
        if fill is not None:
            self._log.phase = "resuming"
            transfer.start()
            if options.reuse:  # which chunks are held is known by their blocks
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(options.stall_timeout_s):
                        await fetcher.run()
            await uncut(in_thread(fill, transfer, pages, lambda: self._closed))

        self.node = node = self._join_swarm(found, arena, transfer, outcome)
        closing.push_async_callback(self._end_reading, node)
        resolver = Resolver(
            locator,
            found.located,
            connections,
            self._plan,
            node.met,
            lambda: transfer.progress()[0],
            outcome,
            self._log,
            self._causes,
            # What the name means by now is looked for anew.
            wait_s=0.0 if options.follow else options.wait_s,
        )
        stores_follow = bool(options.stores) and options.device == "cpu"
        pool = ConnectionPool(
            connections,
            connector,
            transfer,
            node,
            resolver,
            self._plan,
            outcome,
            self._log,
            self._causes,
            stores_follow=stores_follow,
        )
        closing.push_async_callback(pool.close)
        if unmapped is not None:
            pool.take(*unmapped)
        await beside(pool.run(), resolver.run(), pool.tick(), _fetch_pages(fetcher, pool))
        if stores_follow and not outcome.ended:
            failure = self._failure(manifest, transfer, outcome)
            self._chain.sources_gave(transfer.paths(), failure)
            node.reading_ended()  # peers have no say in what is read from a store
            await self._chain.complete(manifest, pages, transfer, outcome, self._log)
            if outcome.failure is None and outcome.causes is not None:
                raise self._chain.error(failure)
        if not transfer.started or outcome.failure is not None or outcome.causes is not None:
            raise self._failure(manifest, transfer, outcome)
        if isinstance(arena, LiveMemory) and (moved := await in_thread(arena.changed)):
            raise LocalError(f"`into` changed while it was filled: {moved}")
        if options.hold and pages.missing:  # others will ask for them here
            await self._fetch_rest(fetcher)
        return self._report(
            manifest,
            transfer.paths(),
            delivery.verified_by,
            transfer.retries,
            [*self._left, *pool.left()],
        )

    async def _fetch_rest(self, fetcher: PageFetcher) -> None:
        """Wait for the pages that verifying did not need. Raises the last cause why one is not to
        be had."""
        try:
            async with asyncio.timeout(self.options.wait_s + REST_S):
                await fetcher.run()
        except TimeoutError:
            raise (
                self._causes[-1]
                if self._causes
                else IncompleteError(f"no source gives all block digests of {self.key}")
            ) from None

    def _failure(self, manifest: Manifest, transfer: Transfer, outcome: Outcome) -> MxError:
        """Return why the sources did not give everything."""
        if not transfer.started:
            return none_opened(str(self.key), self._causes)
        if outcome.failure is not None:
            return outcome.failure
        self._causes += transfer.causes if outcome.causes is None else outcome.causes
        causes, came = self._causes, transfer.progress()[0]
        ready, wanted = self._log.layers_ready, self._wanted
        total = None if wanted is None else wanted.nbytes
        return final_error(str(self.key), manifest.layout, ready, came, causes, total)

    def _join_swarm(
        self, found: Found, arena: Memory, transfer: Transfer, outcome: Outcome
    ) -> Node:
        manifest, options = found.manifest, self.options
        host = None
        if options.host is not None and self.reader_id:
            host = options.host(self.reader_id, self.key, manifest, transfer.pages, arena)
        rate = found.paths.gb_per_s * 1e9
        expected_s = manifest.layout.payload_nbytes / rate if rate else 0.0
        node = Node(
            self.reader_id,
            len(manifest.grid),
            manifest.grid.chunk_nbytes,
            transfer,
            Sharing(host, expected_s=expected_s, alone_because=options.alone_because),
            lambda source: (
                source.ref.same_chunks(manifest.ref) and bool(self._plan([source]).paths)
            ),
            self._streams.dial,
            outcome.changed.set,
            coordinate_always=options.coordinate_always,
        )
        node.met(found.located.sources)
        return node

    async def _end_reading(self, node: Node) -> None:
        node.reading_ended()
        if not node.sharing.begun:
            await self.leave()

    async def _end_transfer(self, transfer: Transfer, exchange: Exchange | None) -> None:
        transfer.close()
        if exchange is not None:
            if transfer.holdings.whole:  # others still get what is being handed to them
                await in_thread(transfer.join_sessions, 2 * self.options.stall_timeout_s)
            await in_thread(exchange.close)
        joined = await in_thread(transfer.join, 2 * self.options.stall_timeout_s)
        if not joined and isinstance(self.arena, LiveMemory):
            # The caller gets its tensors back only when no transport can write to them any more.
            log.warning("waiting for a transport that may still write to the tensors of `into`")
            while not await in_thread(transfer.join, 1.0):
                pass

    async def _allocate(self, layout: Layout) -> Memory:
        if isinstance(self.options.into, InPlace):  # of many tensors that takes a second
            self.arena = await in_thread(self.options.new_arena, layout)
        else:
            self.arena = self.options.new_arena(layout)
        return self.arena

    async def _deliver_attached(
        self, manifest: Manifest, connection: Connection, view: Span, delivery: Delivery
    ) -> PullReport:
        """Deliver every layer of the mapped memory, which outlives session, lease and source."""
        connection.session.close()
        self.arena, self.pages = BorrowedArena(view), Pages(manifest)
        self._log.reading_began(time.monotonic())
        by = VerifiedBy.STRONG if self.options.strong else VerifiedBy.SOURCE
        for layer in range(len(manifest.layout.layers)):
            delivery.announce(view, layer, by)
        path = PathReport(
            connection.path.transport,
            connection.peer,
            manifest.layout.payload_nbytes,
            self._log.last_layer_s(),
            attached=True,
        )
        return self._report(manifest, [path], by, left=self._left)

    # -- from a store -----------------------------------------------------------------------------

    async def _from_store(self, store: Store, last: bool) -> PullReport:
        """Read all of the model from a store; `last`: no other one follows."""
        self._log.phase = f"reading {store.step}"
        await self._forget()
        options, expected = self.options, self._named if self.options.bound else None
        # What is delivered can't be taken back: a later step, a pin or `out` needs all of it first.
        alone = not (options.pin or expected or options.out or options.selection)
        early = last and alone and options.device == "cpu"

        # Uncut: once the pull is closed no thread may write to `into`.
        loop = asyncio.get_running_loop()
        loaded = await uncut(
            in_thread(
                whole.load,
                store,
                options,
                Opening(lambda: self._closed, loop, options.store_timeout_s),
                expected=expected,
                opened=lambda found: loop.call_soon_threadsafe(self.files.opened, found),
                began=self._begin_to_write,
                progress=self._count,
                early=self._early if early else None,
            )
        )
        self._early_layout = None
        manifest, arena = loaded.manifest, loaded.arena
        if isinstance(arena, SubsetMemory):
            self.subset, arena = arena.subset, arena.memory
        self.arena, self.manifest, self.pages = arena, manifest, loaded.pages
        self._log.planned(len(manifest.layout.layers), manifest)
        self.files.loaded(manifest)
        outcome = Outcome()
        delivery = self._deliver(manifest, outcome, strong=False)
        await in_thread(write_side_files, manifest, delivery.side_page)
        for index in range(len(manifest.layout.layers)):
            delivery.announce(arena.view, index, VerifiedBy.DIGEST)
        nbytes, seconds = manifest.layout.payload_nbytes, self._log.last_layer_s()
        path = PathReport(store.step, store.place, nbytes, seconds)
        # The identity was computed from these bytes: `strong` needs no further check.
        by = VerifiedBy.STRONG if self.options.strong else VerifiedBy.DIGEST
        report = self._report(manifest, [path], by)
        report.defined_by = "" if options.pin or expected else store.step
        return await self._commit(delivery, outcome, report)

    def _early(self, layout: Layout, arena: Memory) -> Callable[[int], None]:
        """Deliver layers as they land, of weights that nothing but the store describes. On a
        thread."""
        self.arena, self._early_layout = arena, layout
        self._log.planned(len(layout.layers))

        def landed(layer: int) -> None:
            self._log.layer_ready(self._log.event(layout.layers[layer], VerifiedBy.DIGEST))

        return landed

    def _count(self, done: int, total: int) -> None:
        self._disk_done = (done, total)

    def _begin_to_write(self) -> None:
        self._written = self._written or isinstance(self.options.into, InPlace)

    # -- ends -------------------------------------------------------------------------------------

    async def _commit(self, delivery: Delivery, outcome: Outcome, report: PullReport) -> PullReport:
        if self.options.out is not None:
            self._log.phase = "writing"
            await in_thread(delivery.finish)
        if outcome.failure is not None:
            raise outcome.failure
        return report

    def _report(
        self,
        manifest: Manifest,
        paths: list[PathReport],
        by: VerifiedBy,
        retries: int = 0,
        left: Sequence[LeftSource] = (),
    ) -> PullReport:
        log = self._log
        return PullReport(
            model=str(self.key),
            manifest=manifest.ref.identity.hex(),
            pin=manifest.ref.pin.hex(),
            bytes=(self.layout or manifest.layout).payload_nbytes,
            seconds=log.last_layer_s(),
            first_layer_s=log.first_layer_s(),
            layers=len(manifest.layout.layers),
            verified=by.value,
            paths=paths,
            retries=retries,
            left=list(left),
            control_s=max(0.0, log.first_read_s - log.started_s),
            moved_bytes=None
            if self._wanted is None
            else self._wanted.nbytes - sum(path.bytes for path in paths if path.given),
        )

    async def leave(self) -> None:
        """Leave the swarm, and end all reads of this pull's memory. Idempotent."""
        node, self.node = self.node, None
        if node is not None:
            await node.close()
            await self._streams.close()

    async def _discard(self) -> str:
        """After a failure, free the memory, and remove what was written unless a pull can go on
        from it. Returns how to go on, or ""."""
        await self.leave()
        kept = ""
        if self._delivery is not None:
            delivery, self._delivery = self._delivery, None
            kept = await in_thread(delivery.abort)
        if self._transfer is not None and self._transfer.started:
            self._begin_to_write()
        if self.arena is not None:
            self.arena.release()
            self.arena = None
        return "; ".join(filter(None, [UNUSABLE, kept])) if self._written else kept

    def close(self) -> None:
        """Make work on threads (reading disk, prefilling) stop soon; then cancel `run`."""
        self._closed = True


async def _fetch_pages(fetcher: PageFetcher, pool: ConnectionPool) -> None:
    """Fetch pages, after a path was opened: on a narrow link they would delay that, and all bytes
    with it, and they are needed only for bytes that are there."""
    await pool.tried.wait()
    await fetcher.run()


def _selected(subset: Subset, arena: Memory, manifest: Manifest) -> tuple[SubsetMemory, Wanted]:
    """Return the memory of the tensors that are wanted, and the blocks that they need."""
    return SubsetMemory(subset, arena), subset.wanted(manifest.grid)
