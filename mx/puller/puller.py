"""One pull, from "I need this model" to "every layer is ready": the control side.

Runs on the loop. Finds the manifest and the sources, ranks the ways, makes the arena, opens one
source after the other until one works, and again when one is lost. The bytes are the engine's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from mx import discovery
from mx.core import manifest as manifests
from mx.core.planner import Plan, plan
from mx.core.topology import Place
from mx.core.types import Manifest, ModelKey
from mx.errors import (
    ClosedError,
    ConfigError,
    MxError,
    NoSourceError,
    NotAllowedError,
    SourceError,
)
from mx.memory.arena import Arena, BorrowedArena, HostArena, MemfdArena
from mx.puller.engine import Engine, Lane
from mx.puller.links import Link, Links
from mx.puller.locate import Located, Locator
from mx.puller.options import PullOptions
from mx.puller.output import Output
from mx.puller.report import (
    LayerEvent,
    PathReport,
    Progress,
    PullReport,
    VerifiedBy,
    final_error,
    progress_of,
)
from mx.puller.state import PullState
from mx.puller.verify import Verifier
from mx.storage.load import load_checkpoint
from mx.transport import Path as TransportPath
from mx.transport import Transport, Unavailable


class Puller:
    """Make one per pull, run `run` on the loop. `arena` and `manifest` are there once known."""

    def __init__(
        self, options: PullOptions, transports: Mapping[str, Transport], state: PullState
    ) -> None:
        self.options = options
        self.state = state
        self.manifest: Manifest | None = None
        self.key = ModelKey(options.name.partition("@")[0], options.revision, options.variant)
        self.arena: Arena | None = None
        self.phase = "resolving"
        self._transports = transports
        self._place = discovery.here()
        self._engine: Engine | None = None
        self._locator: Locator | None = None
        self._links = Links(options, self._place, transports, self._lease_lost)
        self._given_up: set[str] = set()
        self._output: Output | None = None
        self._verifier: Verifier | None = None
        self._causes: list[MxError] = []
        self._lost = asyncio.Event()
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._disk_done = 0
        self._attached: PathReport | None = None
        self._side_files: dict[str, bytes] = {}
        self._closed = False

    # -- asked from any thread ------------------------------------------------------------------

    def progress(self) -> Progress:
        manifest = self.manifest
        if manifest is None:
            return Progress(bytes_done=self._disk_done, phase=self.phase)
        layout = manifest.layout
        done = None if self._engine is None else self._engine.progress()[1]
        return progress_of(layout, done, self.state.is_ready, self.phase)

    # -- the run --------------------------------------------------------------------------------

    async def run(self) -> None:
        """To the end; the outcome is in `state`. Never raises an MxError."""
        try:
            try:
                if self.options.disk is not None and not self.options.fall_back_to_disk:
                    report = await self._from_disk(None)
                else:
                    report = await self._from_peers_or_disk()
                if self._output is not None:
                    self.phase = "writing"
                    await asyncio.to_thread(self._output.finish, self._side_files)
            finally:
                await self._release_network()
            self.phase = "complete"
            self.state.finished(report)
        except MxError as error:
            await self._discard()
            self.state.failed(error)
        except asyncio.CancelledError:
            await self._discard()
            self.state.failed(ClosedError("the pull was closed before it was complete"))
            raise

    async def _from_peers_or_disk(self) -> PullReport:
        try:
            return await self._from_peers()
        except MxError as error:
            if not self.options.fall_back_to_disk or self.options.disk is None:
                raise
            if self.state.layers_ready or isinstance(error, ClosedError):
                raise  # layers were handed out already: their memory cannot be swapped
            await self._release_network()
            self._release_arena()
            return await self._from_disk(str(error))

    async def _from_peers(self) -> PullReport:
        options = self.options
        self._locator = Locator(options)
        located = await self._locator.locate()
        self.key = located.key
        manifest = await self._fetch_manifest(located)
        self.manifest = manifest
        self.state.planned(len(manifest.layout.layers))
        ways = self._plan(located)
        if not ways.ways:
            raise NoSourceError(
                f"no source of {self.key} can be reached from here: "
                + ("; ".join(ways.explain()) or "none is registered"),
                hint="start one with mx serve, or name one with --from peer=HOST:PORT",
            )
        if options.out is not None:
            self._output = Output(options.out, manifest, self._abort_from_thread)
            self._side_files = await self._locator.side_files(manifest, located)
        if options.strong:
            self._verifier = Verifier(manifest)
        await self._read(manifest, ways)
        return self._make_report(manifest, None)

    async def _fetch_manifest(self, located: Located) -> Manifest:
        assert self._locator is not None
        documents = await self._locator.documents(located)
        # JSON of 50,000 tensors takes a while: off the loop, which has leases to renew.
        return await asyncio.to_thread(manifests.decode, located.ref, documents)

    def _plan(self, located: Located) -> Plan:
        def reach(name: str, there: Place) -> tuple[float, bool, str] | str:
            transport = self._transports[name]
            viable = transport.probe()
            if isinstance(viable, Unavailable):
                return viable.reason
            path: TransportPath | None = transport.reach(self._place, there)
            if path is None:
                return "it does not reach from here to there"
            return path.gb_per_s, path.attach, path.detail

        return plan(
            located.sources,
            sorted(self._transports),
            reach,
            forced=self.options.transport,
            attach=self.options.attach and not self.options.hold and self.options.into is None,
        )

    async def _read(self, manifest: Manifest, ways: Plan) -> None:
        """Open way after way until the pull has ended. Raises what it failed with."""
        for way in ways.ways:
            if way.source.source_id in self._given_up:
                continue
            self.phase = "connecting"
            if not way.attach and self.arena is None:
                # Now, so that its first pages are populated while the source is asked.
                self.arena = self._new_arena(manifest.layout.arena_nbytes)
            try:
                link = await self._links.open(way, manifest.layout.arena_nbytes)
            except SourceError as error:
                self._causes.append(error)
                continue
            if way.attach and self._engine is None and await self._attach(manifest, link):
                return
            await self._add_lane(manifest, link)
            self.phase = "reading"
            if await self._until_lost_or_ended():
                break
            self._given_up.add(way.source.source_id)
        if self._engine is None:
            raise NoSourceError(
                f"no source of {self.key} could be opened: "
                + "; ".join(str(cause) for cause in self._causes),
                hint="mx sources shows who is registered",
            )
        self._engine.no_more_lanes()
        await self._ended.wait()
        if self.state.error is not None:
            raise self.state.error

    async def _add_lane(self, manifest: Manifest, link: Link) -> None:
        try:
            if self.arena is None:
                self.arena = await asyncio.to_thread(self._new_arena, manifest.layout.arena_nbytes)
        except BaseException:
            link.session.close()
            await asyncio.to_thread(link.session.join, self.options.stall_timeout_s)
            raise
        if self._engine is None:
            self._engine = Engine(manifest, self.arena.view, self)
            self._engine.start()
        # What is not populated by now is faulted by the threads that write there: beside them,
        # a populating thread only takes their cores and memory bandwidth.
        self.arena.settle()
        self._lost.clear()
        now_s = time.monotonic()
        self.state.first_read_s = self.state.first_read_s or now_s
        endpoint = link.way.source.endpoint
        self._engine.add_lane(Lane(link.way.transport, endpoint, link.session, link.lease, now_s))

    def _new_arena(self, nbytes: int) -> Arena:
        into = self.options.into
        if into is not None:
            if into.nbytes < nbytes:
                raise ConfigError(f"the model needs {nbytes} bytes, `into` has {into.nbytes}")
            return BorrowedArena(into[:nbytes])
        if self.options.hold:
            return MemfdArena(nbytes, name=f"pull:{self.key}")
        return HostArena(nbytes)

    async def _attach(self, manifest: Manifest, link: Link) -> bool:
        """Map the source's sealed memory; the map outlives session, lease and source. False,
        with the session left open, where it can only be copied."""
        try:
            view = await asyncio.to_thread(link.session.attach, 0)
        except NotAllowedError as error:
            self._causes.append(error)
            return False
        except BaseException:
            link.session.close()
            raise
        link.session.close()
        self.arena = BorrowedArena(view)
        by = VerifiedBy.SOURCE
        self.state.first_read_s = time.monotonic()
        for index in range(len(manifest.layout.layers)):
            if self._verifier is not None:
                by = VerifiedBy.STRONG
                await asyncio.to_thread(self._verifier.check_all, view, index)
            self._announce(index, by)
        self._attached = PathReport(
            link.way.transport,
            link.way.source.endpoint,
            manifest.layout.payload_nbytes,
            self.state.last_layer_s(),
            attached=True,
        )
        await asyncio.to_thread(link.session.join, self.options.stall_timeout_s)
        return True

    async def _until_lost_or_ended(self) -> bool:
        """True when the pull has ended, False when the lane was lost before."""
        ended = asyncio.create_task(self._ended.wait())
        lost = asyncio.create_task(self._lost.wait())
        try:
            await asyncio.wait((ended, lost), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (ended, lost):
                task.cancel()
            await asyncio.gather(ended, lost, return_exceptions=True)
        return self._ended.is_set()

    async def _from_disk(self, fallback: str | None) -> PullReport:
        path = self.options.disk
        assert path is not None
        self.phase = "reading disk"

        def tell(done: int, _: int) -> None:
            self._disk_done = done

        manifest, self.arena = await asyncio.to_thread(
            load_checkpoint,
            path,
            self._new_arena,
            chunk_nbytes=self.options.chunk_nbytes,
            threads=2,
            progress=tell,
            cancelled=lambda: self._closed,
        )
        self.manifest = manifest
        self.state.planned(len(manifest.layout.layers))
        if self.options.out is not None:
            self._output = Output(self.options.out, manifest, self._abort_from_thread)
            self._side_files = {
                side.path: manifest.documents[side.digest] for side in manifest.packaging.side_files
            }
        for index in range(len(manifest.layout.layers)):
            self._announce(index, VerifiedBy.DIGEST)
        report = self._make_report(manifest, fallback if fallback is None else "disk")
        report.paths = [
            PathReport("disk", str(path), manifest.layout.payload_nbytes, report.seconds)
        ]
        return report

    # -- the engine's listener: on any thread -----------------------------------------------------

    def layer_ready(self, layer: int) -> None:
        if self._verifier is None:
            self._announce(layer, VerifiedBy.DIGEST)
            return
        assert self.arena is not None
        self._verifier.submit(
            self.arena.view,
            layer,
            lambda: self._announce(layer, VerifiedBy.STRONG),
            self._abort_from_thread,
        )

    def lane_lost(self, lane: int, error: MxError) -> None:
        self._call_on_loop(self._lost.set)

    def complete(self) -> None:
        pass  # the last layer's announcement ends the pull; strong checks may still run

    def failed(self, causes: Sequence[MxError]) -> None:
        manifest, engine = self.manifest, self._engine
        assert manifest is not None and engine is not None
        self.state.failed(
            final_error(
                str(self.key),
                manifest.layout,
                self.state.layers_ready,
                engine.progress()[0],
                [*self._causes, *causes],
            )
        )
        self._call_on_loop(self._ended.set)

    def _announce(self, layer: int, by: VerifiedBy) -> None:
        manifest, arena = self.manifest, self.arena
        assert manifest is not None and arena is not None
        place = manifest.layout.layers[layer]
        if self._output is not None:
            start = place.arena_offset
            self._output.layer_ready(layer, arena.view[start : start + place.nbytes])
        at_s = time.monotonic() - self.state.started_s
        event = LayerEvent(layer, place.name, place.nbytes, by.value, at_s)
        if self.state.layer_ready(event):
            self._call_on_loop(self._ended.set)

    def _lease_lost(self, error: MxError) -> None:
        """On the loop. The engine's sinks see it too; this is for a pull that only waits."""
        engine = self._engine
        if engine is None:
            return
        for number, lane in enumerate(engine.lanes):
            if lane.lease.check() is not None:
                engine.lane_lost(number, error)

    def _abort_from_thread(self, error: MxError) -> None:
        self.state.failed(error)
        if self._engine is not None:
            self._engine.abort(error)
        self._call_on_loop(self._ended.set)

    def _call_on_loop(self, function: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    # -- ends -------------------------------------------------------------------------------------

    def _make_report(self, manifest: Manifest, fallback: str | None) -> PullReport:
        engine = self._engine
        paths = [
            PathReport(lane.transport, lane.peer, lane.nbytes, lane.last_at_s - lane.opened_at_s)
            for lane in (engine.lanes if engine else [])
            if lane.nbytes
        ]
        if self._attached is not None:
            paths = [self._attached]
        verified = VerifiedBy.STRONG if self.options.strong else VerifiedBy.DIGEST
        if self._attached is not None and not self.options.strong:
            verified = VerifiedBy.SOURCE
        return PullReport(
            model=str(self.key),
            manifest=manifest.ref.identity.hex(),
            bytes=manifest.layout.payload_nbytes,
            seconds=self.state.last_layer_s(),
            first_layer_s=self.state.first_layer_s(),
            layers=len(manifest.layout.layers),
            verified=verified.value,
            paths=paths,
            retries=engine.retries if engine else 0,
            fallback=fallback,
            control_s=max(0.0, self.state.first_read_s - self.state.started_s),
        )

    async def _release_network(self) -> None:
        if self._engine is not None:
            self._engine.close()
            await asyncio.to_thread(self._engine.join, 2 * self.options.stall_timeout_s)
        if self._verifier is not None:
            await asyncio.to_thread(self._verifier.close)
        await self._links.close()
        if self._locator is not None:
            await self._locator.close()
        if self.arena is not None:
            await asyncio.to_thread(self.arena.settle)

    async def _discard(self) -> None:
        """After a failure: nothing half-done stays, on disk or in memory."""
        if self._output is not None:
            output, self._output = self._output, None
            await asyncio.to_thread(output.abort)
        self._release_arena()

    def _release_arena(self) -> None:
        if self.arena is not None:
            self.arena.release()
            self.arena = None

    def close(self) -> None:
        """On the loop: give up, if it is still running."""
        self._closed = True
