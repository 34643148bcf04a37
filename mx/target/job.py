"""One pull, from "I need this model" to "every layer is ready": the control side.

Runs on the loop. Finds the manifest and the sources, ranks the ways, makes the arena, opens one
source after the other until one works, and again when one is lost. The bytes are the engine's.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence

from mx import trace
from mx.core.planner import Plan
from mx.core.types import Manifest, SourceRecord
from mx.errors import ConfigError, LocalError, MxError
from mx.memory.arena import Arena, BorrowedArena
from mx.runtime import in_thread, uncut
from mx.target import disk
from mx.target.attach import attach, deliver_attached, none_opened
from mx.target.connections import ConnectionPool
from mx.target.connector import Connector, OpenPath, plan_paths
from mx.target.delivery import Delivery
from mx.target.events import EventLog
from mx.target.locator import Located, Locator
from mx.target.memory import new_arena
from mx.target.options import PullOptions
from mx.target.planning import target_place
from mx.target.prefill import prefilling
from mx.target.report import (
    PathReport,
    Progress,
    PullReport,
    VerifiedBy,
    again,
    final_error,
    progress_of,
    unexpected,
)
from mx.target.resolver import Found, Resolver, SideFiles, find, patiently, write_side_files
from mx.target.sharing import Sharing
from mx.target.transfer import Transfer
from mx.transport import Medium, Span, Transport


class Job:
    """Make one per pull, run `run` on the loop. `arena` and `manifest` are there once known."""

    def __init__(
        self, options: PullOptions, transports: Mapping[str, Transport], state: EventLog
    ) -> None:
        self.options = options
        self.state = state
        self.manifest: Manifest | None = None
        self.key = options.key
        self.arena: Arena | None = None
        self.phase = "resolving"
        self.kept = ""  # how to go on from what a pull that failed has left
        self._transports = transports
        self._place = target_place(options)
        self._loop = asyncio.get_running_loop()
        self._transfer: Transfer | None = None
        self._locator: Locator | None = None
        self.sharing = Sharing(options, self._plan)
        reader_id = self.sharing.reader_id
        self._connector = Connector(options, self._place, transports, self._lease_lost, reader_id)
        self._delivery: Delivery | None = None
        self._pool: ConnectionPool | None = None
        self._resolver: Resolver | None = None
        self._several = False  # are several ways to be used at once?
        self._causes: list[MxError] = []
        self._disk_done = (0, 0)
        self._closed = False
        self._ended = False  # this and the next are written on the loop only
        self._failure: MxError | None = None

    # -- asked from any thread ------------------------------------------------------------------

    def progress(self) -> Progress:
        manifest, transfer = self.manifest, self._transfer
        if manifest is None:
            return Progress(*self._disk_done, phase=self.phase)
        return progress_of(manifest.layout, transfer, self.state.is_ready, self.phase)

    # -- the run --------------------------------------------------------------------------------

    async def run(self) -> None:
        """To the end; the outcome, whatever it is, is in `state`. Raises only if cancelled."""
        try:
            try:
                if self.options.disk is not None and not self.options.fall_back_to_disk:
                    report = await self._from_disk(fallback=False)
                else:
                    report = await self._from_peers_or_disk()
            finally:
                await uncut(self._release_network())
            if self.options.out is not None and self._delivery is not None:
                self.phase = "writing"
                await in_thread(self._delivery.finish)
            if self._failure is not None:
                raise self._failure
            self.phase = "complete"
            self.state.finished(report)
        except BaseException as error:  # nobody may be left waiting for a pull that is over
            failure = unexpected(error)
            self.state.failing(failure)
            try:
                self.kept = await uncut(self._discard())
            finally:
                self.state.failed(again(failure, self.kept))
            if not isinstance(error, Exception):
                raise

    async def _from_peers_or_disk(self) -> PullReport:
        try:
            return await self._from_peers()
        except MxError as error:
            if not self.options.fall_back_to_disk or self.options.disk is None:
                raise
            if self.state.layers_ready:
                raise  # layers were handed out already: their memory cannot be swapped
            if isinstance(error, LocalError) or (isinstance(error, ConfigError) and self.manifest):
                raise  # it would be no better from disk
            await uncut(self._start_over())
            return await self._from_disk(fallback=True)

    async def _start_over(self) -> None:
        await self._release_network()
        await self._discard()
        self.manifest = self._transfer = self._failure = self._pool = None
        self._ended = False

    async def _from_peers(self) -> PullReport:
        self._locator = locator = Locator(self.options)
        options, relays_do = self.options, bool(self.sharing.reader_id)
        found = await patiently(
            lambda: find(
                locator, self._plan, self._located, relays_do=relays_do, side_files=options.hold
            ),
            options.wait_s,
            self._waiting,
        )
        self.manifest = manifest = found.manifest
        self.state.planned(len(manifest.layout.layers))
        self._delivery = delivery = self._new_delivery(manifest, strong=self.options.strong)
        if self.options.out is not None:
            sides = SideFiles(locator, found, delivery.side_page)
            await patiently(sides.fetch, self.options.wait_s, self._waiting)
        with trace.span("pull.read", nbytes=manifest.layout.payload_nbytes) as span:
            report = await self._read(found)
            span.set(retries=report.retries, paths=len(report.paths))
        return report

    def _located(self, located: Located, paths: Plan) -> None:
        self.key = located.key
        self.sharing.sources = located.sources
        self._connector.begin(paths.chosen)

    def _waiting(self) -> None:
        self.phase = "waiting for a source"

    def _new_delivery(self, manifest: Manifest, *, strong: bool) -> Delivery:
        return Delivery(
            manifest,
            self.state,
            strong=strong,
            out=self.options.out,
            keep=self.options.resume and self.options.device == "cpu",
            on_last=lambda: self._on_loop(self._end),
            on_error=self.broken,
        )

    async def _read(self, found: Found) -> PullReport:
        """Attach, or read over all ways that go together and others when those are lost, until
        the pull has ended. Raises what it failed with."""
        manifest, paths = found.manifest, found.paths
        self._several = len(paths.chosen) > 1
        nbytes = manifest.layout.arena_nbytes
        self._pool = pool = ConnectionPool(
            paths,
            self._connector,
            lambda path: self._connector.open(path, nbytes),
            lambda opened: self._add_connection(manifest, opened),
            self._causes,
            self.options.patience_s,
        )
        self.phase = "connecting"
        begun = await self._prefill(manifest, attachable=any(path.attach for path in paths.paths))
        for path in [path for path in paths.paths if path.attach and not begun]:
            opened, view = await attach(self._connector, path, nbytes, self._causes)
            if opened is None:
                pool.leave_out(path)
            elif view is not None:
                return await self._deliver_attached(manifest, opened, view)
            else:
                pool.take(opened)  # it can be copied still
                break
        if self.arena is None:
            self.arena = new_arena(self.options, nbytes)
        pool.none_left = lambda: self._swarm(coordinated=True, if_others_give=True)
        if not paths.paths:
            self._swarm(coordinated=True)
        else:
            seconds = manifest.layout.payload_nbytes / (paths.gb_per_s * 1e9)
            self.sharing.expect(seconds, self._swarm, lambda: self._transfer is not None)
        assert self._locator is not None
        self._resolver = Resolver(
            self._locator,
            found.located,
            pool,
            self._plan,
            wait_s=self.options.wait_s,
            on_sources=self.sharing.met,
            on_wait=self._waiting,
            came=lambda: self.progress().bytes_done,
            causes=self._causes,
        )
        await pool.run(lambda: self._ended, lambda: self._transfer)
        if self._transfer is None:
            raise none_opened(str(self.key), self._causes)
        if self._failure is not None:
            raise self._failure
        by = VerifiedBy.STRONG if self.options.strong else VerifiedBy.DIGEST
        return self._report(manifest, self._transfer.paths(), by)

    async def _prefill(self, manifest: Manifest, *, attachable: bool) -> bool:
        """Begin with what is here already, before anything is read. False if nothing is."""
        fill = prefilling(self._delivery, self.options.reuse, attachable=attachable)
        if fill is None:
            return False
        self.phase = "resuming"
        self._transfer = transfer = self._new_engine(manifest)
        await uncut(in_thread(fill, transfer, lambda: self._closed))
        return True

    async def _deliver_attached(
        self, manifest: Manifest, opened: OpenPath, view: Span
    ) -> PullReport:
        """The map outlives session, lease and source."""
        assert self._delivery is not None
        opened.session.close()
        self._release_arena()
        self.arena = BorrowedArena(view)
        self.state.first_read_s = time.monotonic()
        path = await deliver_attached(
            manifest, opened.path, view, self._delivery, self.state, strong=self.options.strong
        )
        by = VerifiedBy.STRONG if self.options.strong else VerifiedBy.SOURCE
        return self._report(manifest, [path], by)

    def _new_engine(self, manifest: Manifest) -> Transfer:
        if self.arena is None:
            self.arena = new_arena(self.options, manifest.layout.arena_nbytes)
        make_hasher = self.arena.hasher
        transfer = Transfer(
            manifest, self.arena.view, self, make_hasher, several_connections=self._several
        )
        transfer.start()
        return transfer

    def _add_connection(self, manifest: Manifest, opened: OpenPath) -> int:
        if self._transfer is None:
            self._transfer = self._new_engine(manifest)
        assert self.arena is not None
        by = opened.path.source.source_id
        if opened.path.medium is Medium.NETWORK:  # else there is no link to share out
            opened.lease.when_coordinated(lambda: self._swarm(coordinated=True, by=by))
        self.state.first_read_s = self.state.first_read_s or time.monotonic()
        opened.session.adopt(self.arena.view)
        self.phase = "reading"
        return self._transfer.add_connection(opened.connection(time.monotonic()))

    def _swarm(
        self, *, coordinated: bool = False, by: str = "", if_others_give: bool = False
    ) -> None:
        if self._ended or (if_others_give and not self.sharing.others_give):
            return
        if coordinated and self._transfer is None and self.manifest is not None:
            self._transfer = self._new_engine(self.manifest)
        transfer, pool, arena = self._transfer, self._pool, self.arena
        if transfer is not None and pool is not None and arena is not None:
            self.sharing.begin(self.key, transfer, pool, arena, coordinated=coordinated, by=by)

    def _plan(self, sources: Sequence[SourceRecord]) -> Plan:
        return plan_paths(self.options, self._place, self._transports, sources)

    async def _from_disk(self, *, fallback: bool) -> PullReport:
        self.phase = "reading disk"

        def tell(done: int, total: int) -> None:
            self._disk_done = (done, total)

        # Uncut: no thread may write to `into` any more once the pull is closed.
        manifest, arena = await uncut(
            in_thread(disk.load, self.options, progress=tell, cancelled=lambda: self._closed)
        )
        self.arena = arena
        self.manifest = manifest
        self.state.planned(len(manifest.layout.layers))
        self._delivery = self._new_delivery(manifest, strong=False)
        await in_thread(write_side_files, manifest, self._delivery.side_page)
        for index in range(len(manifest.layout.layers)):
            self._delivery.announce(arena.view, index, VerifiedBy.DIGEST)
        nbytes, seconds = manifest.layout.payload_nbytes, self.state.last_layer_s()
        path = PathReport("disk", str(self.options.disk), nbytes, seconds)
        # Its identity was computed from these very bytes: `strong` has nothing to add.
        by = VerifiedBy.STRONG if self.options.strong else VerifiedBy.DIGEST
        report = self._report(manifest, [path], by)
        report.fallback = "disk" if fallback else None
        return report

    # -- the engine's listener: on any thread -----------------------------------------------------

    def layer_ready(self, layer: int) -> None:
        arena, delivery = self.arena, self._delivery
        assert arena is not None and delivery is not None
        delivery.landed(arena.view, layer)

    def connection_lost(self, connection: int, error: MxError) -> None:
        pool = self._pool
        if pool is not None:
            self._on_loop(lambda: pool.connection_lost(connection, error))

    def failed(self, causes: Sequence[MxError]) -> None:
        manifest, transfer = self.manifest, self._transfer
        assert manifest is not None and transfer is not None
        self.broken(
            final_error(
                str(self.key),
                manifest.layout,
                self.state.layers_ready,
                transfer.progress()[0],
                [*self._causes, *causes],
            )
        )

    def broken(self, error: MxError) -> None:
        self._on_loop(lambda: self._end(error))

    # -- on the loop ------------------------------------------------------------------------------

    def _on_loop(self, change: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits
            self._loop.call_soon_threadsafe(change)

    def _end(self, error: MxError | None = None) -> None:
        self._failure = self._failure or error
        self._ended = True
        if self._pool is not None:
            self._pool.wake()

    def _lease_lost(self, error: MxError) -> None:
        """The engine's sinks see it too; this is for a pull that only waits."""
        if self._transfer is None:
            return
        for number, connection in enumerate(self._transfer.connections):
            if connection.lease.check() is not None:
                self._transfer.connection_lost(number, error)

    # -- ends -------------------------------------------------------------------------------------

    def _report(self, manifest: Manifest, paths: list[PathReport], by: VerifiedBy) -> PullReport:
        retries = self._transfer.retries if self._transfer else 0
        report = self.state.report_of(str(self.key), manifest, paths, by, retries)
        report.left = self._pool.left() if self._pool else []
        return report

    async def _release_network(self) -> None:
        self.sharing.reading_ended()
        if self._resolver is not None:
            await self._resolver.close()
        if self._pool is not None:
            await self._pool.close()
        if self._transfer is not None:
            self._transfer.close()
            await in_thread(self._transfer.join, 2 * self.options.stall_timeout_s)
        if self._delivery is not None:
            await in_thread(self._delivery.settle)
        await self._connector.close()
        if self._locator is not None:
            await self._locator.close()

    async def _discard(self) -> str:
        """After a failure: nothing half-done stays in memory, or on disk where nothing could go on
        from it. Returns how to go on, or ""."""
        await self.sharing.leave()
        kept = ""
        if self._delivery is not None:
            delivery, self._delivery = self._delivery, None
            kept = await in_thread(delivery.abort)
        self._release_arena()
        return kept

    def _release_arena(self) -> None:
        if self.arena is not None:
            self.arena.release()
            self.arena = None

    def close(self) -> None:
        """On the loop: give up, if it is still running."""
        self._closed = True
