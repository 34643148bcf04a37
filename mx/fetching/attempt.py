"""What the attempts of a pull have in common: what they work with (`Context`), what one leaves to
the next (`History`), and how a model is delivered, reported, committed or discarded (`Attempt`).

`mx.fetching.from_sources`, `mx.fetching.whole` and `mx.snapshots.pulling` have the kinds, of which
those that transfer what is described share `TransferAttempt`; `mx.fetching.job` decides which one
comes next. An attempt is made for one run, and fills one edition (`mx.fetching.edition`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from mx.core.pages import Pages
from mx.core.planner import Plan
from mx.core.progress import Progress, progress_of
from mx.core.topology import Place
from mx.core.types import Layout, Manifest, ManifestRef, ModelKey, SourceRecord
from mx.errors import MxError
from mx.fetching.chain import Chain
from mx.fetching.delivery import Delivery
from mx.fetching.edition import Edition
from mx.fetching.events import EventLog
from mx.fetching.options import PullOptions
from mx.fetching.paths import plan_paths
from mx.fetching.reads import StorePath
from mx.fetching.report import LeftSource, PathReport, PullReport, VerifiedBy
from mx.runtime import in_thread, uncut
from mx.transport import Transport

if TYPE_CHECKING:
    from mx.core.selection import Subset
    from mx.core.wanted import WantedBlocks
    from mx.cuda.digest_table import DigestTable
    from mx.fetching.exchange import Exchange
    from mx.fetching.transfer import Transfer
    from mx.memory.live import Memory
    from mx.memory.subset import SubsetMemory

log = logging.getLogger(__name__)


@dataclass
class History:
    """What a pull keeps from one attempt to the next. Each attempt adds to it."""

    key: ModelKey  # as far as it is known
    named: ManifestRef | None = None  # what the coordinator has answered
    newest: str = ""  # what the name means to the coordinator, if `key` is older
    causes: list[MxError] = field(default_factory=list)  # why sources and paths failed
    left: list[LeftSource] = field(default_factory=list)  # whose memory was attached, and is wrong
    ranks_met: bool = False  # ranks on one host meet once
    attaches: bool = True  # whether the next attempt may map a source's memory
    written: bool = False  # whether tensors of `into` may hold a part of the new weights


class Context(NamedTuple):
    """What every attempt of one pull works with. `place` is the target's, which is read while the
    coordinator is asked, and takes a millisecond; `closed` is set to make
    work on threads (reading disk, prefilling) stop soon."""

    options: PullOptions
    transports: Mapping[str, Transport]
    place: Future[Place]
    log: EventLog
    chain: Chain
    history: History
    closed: threading.Event

    def plan(self, sources: Sequence[SourceRecord]) -> Plan:
        """Return the paths to these sources, which the chain takes note of."""
        place = self.place.result()
        found = plan_paths(self.options, place, self.transports, sources)
        self.chain.met(found, sources, place.boot_id)
        return found


class Attempt:
    """One attempt to fill an edition; by itself, a pull that has not begun. On the loop."""

    #: True once layers of a source's mapped memory are ready, and others can't be mapped.
    mapped_in_part = False

    def __init__(self, context: Context, edition: Edition) -> None:
        self.edition = edition
        self._context = context
        self._options = context.options
        self._log = context.log
        self._history = context.history
        self._delivery: Delivery | None = None

    def progress(self) -> Progress:
        """Return a snapshot; from any thread."""
        edition, phase = self.edition, self._log.phase
        if edition.layout is None:
            return Progress(*edition.counted, phase=phase)
        return progress_of(edition.layout, None, edition.log.is_ready, phase)

    def written_nbytes(self) -> int:
        """Return the bytes that were written to `out` so far."""
        delivery = self._delivery
        return 0 if delivery is None else delivery.written_nbytes

    def paths(self) -> list[PathReport]:
        """Return the bytes received over each path so far."""
        return []

    def _deliver(self, manifest: Manifest, *, strong: bool) -> Delivery:
        options = self._options
        self._delivery = Delivery(
            manifest,
            self.edition.log,
            strong=strong,
            out=options.out,
            keep=options.resume,
            companions=manifest.packaging.companions if options.companions else (),
            revision=self._history.key.revision,
            layout=self.edition.layout,
            page=self.edition.page,
            writer=options.writer,
        )
        return self._delivery

    def _begin_to_write(self) -> None:
        if not isinstance(self._options.into, memoryview | None):
            self._history.written = True

    # -- ends -------------------------------------------------------------------------------------

    def _report(
        self,
        manifest: Manifest,
        paths: list[PathReport],
        by: VerifiedBy,
        retries: int = 0,
        left: Sequence[LeftSource] = (),
    ) -> PullReport:
        log, ready = self._log, self.edition.log
        return PullReport(
            model=str(self._history.key),
            identity=manifest.ref.identity.hex(),
            pin=manifest.ref.pin.hex(),
            bytes=(self.edition.layout or manifest.layout).payload_nbytes,
            seconds=ready.last_layer_s(),
            first_layer_s=ready.first_layer_s(),
            layers=len(manifest.layout.layers),
            verified=by.value,
            paths=paths,
            retries=retries,
            left=list(left),
            control_s=max(0.0, log.first_read_s - log.started_s),
            newest=self._history.newest,
            notes=manifest.notes,
            stages=self._context.chain.stages,
        )

    async def _commit(self, delivery: Delivery, report: PullReport) -> PullReport:
        if self._options.out is not None:
            if delivery.companions:
                from mx.fetching.companions import pull_companions

                report.companions = await pull_companions(
                    self._context,
                    self._beside(),
                    delivery,
                    self._history.key,
                    list(dict.fromkeys(path.source for path in report.paths if ":" in path.source)),
                )
            self._log.phase = "writing"
            await in_thread(delivery.finish)
            report.seconds = time.monotonic() - self._log.started_s
        if self.edition.log.failure is not None:
            raise self.edition.log.failure
        return report

    def _beside(self) -> PullOptions:
        """Return the options with which companions are pulled."""
        return self._options

    async def leave(self) -> None:
        """End all reads of this attempt's memory by others. Idempotent."""

    async def discard(self) -> str:
        """After a failure, free the memory, and remove what was written unless a pull can go on
        from it. Returns how to go on, or "". Idempotent."""
        await self.leave()
        kept = ""
        if self._delivery is not None:
            delivery, self._delivery = self._delivery, None
            kept = await in_thread(delivery.abort)
        self.edition.release()
        return kept


class TransferAttempt(Attempt):
    """An attempt that fills new memory by a transfer, of which local ranks may each read a part."""

    def __init__(self, context: Context, edition: Edition) -> None:
        super().__init__(context, edition)
        self._closing = AsyncExitStack()  # what is open until the bytes are there
        self._wanted: WantedBlocks | None = None  # of a pull of some tensors
        self._transfer: Transfer | None = None

    def progress(self) -> Progress:
        """Return a snapshot; from any thread."""
        layout, transfer, wanted = self.edition.layout, self._transfer, self._wanted
        if layout is None or transfer is None:
            return super().progress()
        return progress_of(
            layout,
            transfer.progress()[1],
            self.edition.log.is_ready,
            self._log.phase,
            [
                each.peer
                for each in transfer.connections
                if not (each.lost or isinstance(each.path, StorePath))
            ],
            transfer.retries,
            None if wanted is None else wanted.layer_nbytes,
        )

    def paths(self) -> list[PathReport]:
        """Return the bytes received over each path so far."""
        return [] if self._transfer is None else self._transfer.paths()

    async def run(self) -> PullReport:
        """Read, deliver and commit the model. Raises MxError."""
        raise NotImplementedError

    async def _allocate(
        self, manifest: Manifest, delivery: Delivery, *, several_connections: bool
    ) -> tuple[Memory, Transfer]:
        """Return new memory, and the transfer into it, which `_closing` ends."""
        from mx.fetching.transfer import Transfer
        from mx.memory.live import LiveMemory

        options = self._options
        arena = await uncut(self._new_arena(self.edition.layout or manifest.layout))
        if isinstance(arena, LiveMemory):
            delivery.deliver_together(arena.overlapping)
        selected = exchanged = None
        if self.edition.subset is not None:
            selected = await uncut(in_thread(_selected, self.edition.subset, arena, manifest))
            ranks = None if self._history.ranks_met else options.local_ranks
            if ranks is not None:
                self._history.ranks_met = True
                self._log.phase = "waiting for ranks"
                from mx.fetching.ranks import meet_ranks

                exchanged = await meet_ranks(
                    ranks, manifest, selected[1], self._closing, self._context.closed.is_set
                )
        self._wanted = None if selected is None else selected[1]
        self.edition.pages = Pages(manifest, None if self._wanted is None else self._wanted.layers)
        table: DigestTable | None = None
        if options.device != "cpu" and selected is None:
            from mx.memory.device import DeviceArena

            assert isinstance(arena, DeviceArena | LiveMemory)
            table = arena.digest_table(manifest.grid, self.edition.pages.get)
        self._transfer = transfer = Transfer(
            manifest,
            self.edition.pages,
            arena.view if selected is None else selected[0].view,
            delivery,
            arena.hasher,
            several_connections=several_connections,
            in_turn=isinstance(arena, LiveMemory) and bool(arena.overlapping),
            # Who holds the weights for others has verified them against the identity itself.
            shortcut=not (options.strong or options.hold) and options.device == "cpu",
            subset=selected,
            exchange=exchanged,
            table=table,
            streams=options.streams,
        )
        exchange = None if exchanged is None else exchanged[0]
        self._closing.push_async_callback(self._end_transfer, transfer, exchange)
        if exchanged is not None:
            exchanged[0].begin(transfer, exchanged[1], options.stall_timeout_s)
        return arena, transfer

    async def _new_arena(self, layout: Layout) -> Memory:
        # Many tensors take a second; how much memory is free, half the time until leases answer.
        self.edition.arena = await in_thread(self._options.new_arena, layout)
        return self.edition.arena

    async def _end_transfer(self, transfer: Transfer, exchange: Exchange | None) -> None:
        transfer.close()
        for connection in transfer.connections:  # their sources don't wait for what comes now
            connection.lease.end()
        if exchange is not None:
            if transfer.holdings.whole:  # others still get what is being handed to them
                await in_thread(transfer.join_sessions, 2 * self._options.stall_timeout_s)
            await in_thread(exchange.close)
        joined = await in_thread(transfer.join, 2 * self._options.stall_timeout_s)
        if not joined and self._options.into is not None:
            # Another edition fills the caller's memory, and the caller gets it back, only when no
            # transport can write to it any more.
            log.warning("waiting for a transport that may still write to the memory of `into`")
            while not await in_thread(transfer.join, 1.0):
                pass

    async def discard(self) -> str:
        """See `Attempt`."""
        if self._transfer is not None and self._transfer.started:
            self._begin_to_write()
        return await super().discard()


def _selected(
    subset: Subset, arena: Memory, manifest: Manifest
) -> tuple[SubsetMemory, WantedBlocks]:
    """Return the memory of the tensors that are wanted, and the blocks that they need."""
    from mx.memory.subset import SubsetMemory

    return SubsetMemory(subset, arena), subset.wanted(manifest.grid)
