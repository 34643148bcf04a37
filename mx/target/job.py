"""One pull, from a model's name to layers that are ready: resolve, plan, allocate, prefill,
transfer, commit. On the loop; the bytes are moved by `mx.target.transfer`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

from mx import trace
from mx.core.connections import Connections, Entry
from mx.core.local_ranks import Shares
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
    NotAllowedError,
    PeerUntrustedError,
    StaleGenerationError,
)
from mx.memory.arena import BorrowedArena
from mx.memory.in_place import InPlace
from mx.memory.live import LiveMemory, Memory
from mx.memory.subset import SubsetMemory
from mx.runtime import beside, in_thread, uncut, unexpected
from mx.swarm.node import Node
from mx.swarm.sharing import Sharing
from mx.swarm.stream import StreamDialer
from mx.target import disk
from mx.target.caching import ask_cache
from mx.target.connections import ConnectionPool
from mx.target.connector import Connector
from mx.target.delivery import Delivery
from mx.target.events import EventLog, Outcome
from mx.target.exchange import Exchange
from mx.target.files import SideFiles
from mx.target.options import PullOptions
from mx.target.pages import PageFetcher
from mx.target.paths import plan_paths, target_place
from mx.target.prefill import prefilling
from mx.target.ranks import meet
from mx.target.reads import Connection
from mx.target.report import (
    LeftSource,
    PathReport,
    PullReport,
    VerifiedBy,
    again,
    final_error,
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
        #: Whether tensors of `into` may hold a part of the new weights, also of an attempt before.
        self._written = False
        self._closed = False

    @property
    def layout(self) -> Layout | None:
        """The layout of `arena`; None until the manifest is known."""
        if self.subset is not None:
            return self.subset.layout
        return None if self.manifest is None else self.manifest.layout

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
            if self.options.disk is not None and not self.options.fall_back_to_disk:
                report = await self._from_disk()
            else:
                report = await self._from_peers_or_disk()
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

    async def _from_peers_or_disk(self) -> PullReport:
        if self.options.cache:
            self._log.phase = "waiting for the cache"
            held = await ask_cache(self.options, self._count)
            self.cached_at = "" if held is None else held.endpoint
        try:
            return await self._from_newest_peers()
        except MxError as error:
            if not self.options.fall_back_to_disk or self.options.disk is None:
                raise
            if isinstance(error, LocalError) or (isinstance(error, ConfigError) and self.manifest):
                raise  # reading from disk would fail too
            if not self._log.begin_again():
                raise
        await self._forget()
        report = await self._from_disk()
        report.fallback = "disk"
        return report

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
        self.subset = self._wanted = None
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
            self.key = located.key
            connector.begin(paths.chosen)

        found = await retry_until_found(
            lambda: find(
                locator,
                self._plan,
                begin,
                relays_do=bool(self.reader_id),
                side_files=options.hold,
                tried=self._tried,
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
        return plan_paths(self.options, self._place, self._transports, sources)

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

        await retry_until_found(attempt, self.options.wait_s, self._log.waiting)

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
        for entry in connections.attachable() if fill is None else ():
            connection, view = await self._attach(connector, connections, entry, manifest)
            if connection is not None and view is not None:
                lie = await self._check_attached(connection, view, delivery)
                if lie is None:
                    return await self._deliver_attached(manifest, connection, view, delivery)
                del view
                connections.opened(entry)
                connections.lost(entry, lie, time.monotonic(), lease_runs=True)
                await connector.give_back(connection)
                continue
            if connection is not None:
                unmapped = connection, entry
                break

        arena = await uncut(self._allocate(self.layout or manifest.layout))
        selected = exchanged = None
        if self.subset is not None:
            selected = await uncut(in_thread(_selected, self.subset, arena, manifest))
            exchanged = await self._meet_ranks(manifest, selected[1], closing)
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
        )
        closing.push_async_callback(pool.close)
        if unmapped is not None:
            pool.take(*unmapped)
        await beside(pool.run(), resolver.run(), pool.tick(), _fetch_pages(fetcher, pool))
        self._raise_failure(manifest, transfer, outcome)
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

    def _raise_failure(self, manifest: Manifest, transfer: Transfer, outcome: Outcome) -> None:
        if not transfer.started:
            raise _none_opened(str(self.key), self._causes)
        if outcome.failure is not None:
            raise outcome.failure
        if outcome.causes is not None:
            self._causes += outcome.causes
            causes, came = self._causes, transfer.progress()[0]
            ready, wanted = self._log.layers_ready, self._wanted
            total = None if wanted is None else wanted.nbytes
            raise final_error(str(self.key), manifest.layout, ready, came, causes, total)

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

    async def _meet_ranks(
        self, manifest: Manifest, wanted: Wanted, closing: AsyncExitStack
    ) -> tuple[Exchange, Shares] | None:
        """Meet the ranks on this host that want blocks of the same weights, once."""
        ranks, self._ranks = self._ranks, None
        if ranks is None:
            return None
        ref, grid = manifest.ref, manifest.grid
        self._log.phase = "waiting for ranks"

        async def met() -> Exchange | None:
            found = await in_thread(meet, ranks, ref, grid, wanted, lambda: self._closed)
            if found is not None:
                closing.push_async_callback(in_thread, found.close)
            return found

        exchange = await uncut(met())  # it is closed also if this is cancelled meanwhile
        if exchange is None:
            return None
        return exchange, await in_thread(exchange.shares, ranks.rank, wanted)

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

    # -- attaching --------------------------------------------------------------------------------

    async def _attach(
        self, connector: Connector, connections: Connections, entry: Entry, manifest: Manifest
    ) -> tuple[Connection | None, Span | None]:
        """Return a connection if one could be opened, and the source's memory if it could be
        mapped. The causes say why not."""
        nbytes = manifest.layout.arena_nbytes
        connections.begin(entry)
        connection: Connection | None = None
        try:
            connection = await connector.open(entry.path, manifest.layout)
            return connection, await connector.attach(connection, nbytes)
        except NotAllowedError as error:
            failure: MxError = error
        except (ConfigError, LocalError) as error:
            if connection is not None or isinstance(error, ConfigError):
                raise  # it would be no better elsewhere
            failure = error
        except MxError as error:
            failure, connection = error, None
        self._causes.append(failure)
        if connection is None:
            connections.failed(entry, failure, time.monotonic())
        return connection, None

    async def _check_attached(
        self, connection: Connection, view: Span, delivery: Delivery
    ) -> DigestError | None:
        """With `strong`, hash all of a source's mapped memory before anything of it is delivered.
        Returns the error if it is wrong."""
        try:
            await uncut(in_thread(delivery.check_attached, view))
        except DigestError as error:
            peer = connection.peer
            lie = DigestError(f"{peer}: {error.message}", peer=peer, hint=error.hint)
            self._causes.append(lie)
            self._left.append(LeftSource(peer, lie.message))
            return lie
        return None

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

    # -- from disk --------------------------------------------------------------------------------

    async def _from_disk(self) -> PullReport:
        self._log.phase = "reading disk"

        # Uncut: once the pull is closed no thread may write to `into`.
        loop = asyncio.get_running_loop()
        loaded = await uncut(
            in_thread(
                disk.load,
                self.options,
                opened=lambda found: loop.call_soon_threadsafe(self.files.opened, found),
                began=self._begin_to_write,
                progress=self._count,
                cancelled=lambda: self._closed,
            )
        )
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
        path = PathReport("disk", str(self.options.disk), nbytes, seconds)
        # The identity was computed from these bytes: `strong` needs no further check.
        by = VerifiedBy.STRONG if self.options.strong else VerifiedBy.DIGEST
        return await self._commit(delivery, outcome, self._report(manifest, [path], by))

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


def _none_opened(model: str, causes: list[MxError]) -> MxError:
    """Return the error of a pull that could not open any path to a source."""
    if causes and all(isinstance(cause, LocalError) for cause in causes):
        return causes[-1]
    lies = [cause for cause in causes if isinstance(cause, DigestError)]
    if lies:
        return lies[-1]
    untrusted = causes and all(isinstance(cause, PeerUntrustedError) for cause in causes)
    kind = PeerUntrustedError if untrusted else NoSourceError
    return kind(
        f"no source of {model} could be opened: "
        + "; ".join(dict.fromkeys(str(cause) for cause in causes)),
        hint="mx sources shows who is registered",
    )
