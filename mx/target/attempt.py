"""What the attempts of a pull have in common: what they work with (`Context`), what one leaves to
the next (`History`), and how a model is delivered, reported, committed or discarded (`Attempt`).

`mx.target.from_sources` and `mx.target.whole` have the two kinds; `mx.target.job` decides which one
comes next. An attempt is made for one run, and what it knows of the model ends with it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mx.core.pages import Pages
from mx.core.planner import Plan
from mx.core.progress import Progress, progress_of
from mx.core.selection import Subset
from mx.core.topology import Place
from mx.core.types import Layout, Manifest, ManifestRef, ModelKey, SourceRecord
from mx.errors import MxError
from mx.memory.in_place import InPlace
from mx.memory.live import Memory
from mx.runtime import in_thread
from mx.swarm.node import Node
from mx.target.chain import Chain
from mx.target.delivery import Delivery
from mx.target.events import EventLog, Outcome
from mx.target.files import SideFiles
from mx.target.options import PullOptions
from mx.target.paths import plan_paths
from mx.target.report import LeftSource, PathReport, PullReport, VerifiedBy
from mx.transport import Transport


@dataclass
class History:
    """What a pull keeps from one attempt to the next. Each attempt adds to it."""

    key: ModelKey  # as far as it is known
    named: ManifestRef | None = None  # what the name means to the coordinator
    causes: list[MxError] = field(default_factory=list)  # why sources and paths failed
    tried: list[ManifestRef] = field(default_factory=list)  # whose sources have lied
    left: list[LeftSource] = field(default_factory=list)  # whose memory was attached, and is wrong
    ranks_met: bool = False  # ranks on one host meet once
    written: bool = False  # whether tensors of `into` may hold a part of the new weights
    #: (bytes so far, bytes in total) that were read, shown while no layout is known.
    counted: tuple[int, int] = (0, 0)

    def count(self, done: int, total: int) -> None:
        """Record how many bytes were read; from any thread."""
        self.counted = (done, total)


@dataclass(frozen=True)
class Context:
    """What every attempt of one pull works with. `place` is the target's; `closed` is set to make
    work on threads (reading disk, prefilling) stop soon."""

    options: PullOptions
    transports: Mapping[str, Transport]
    place: Place
    log: EventLog
    chain: Chain
    files: SideFiles
    history: History
    closed: threading.Event

    def plan(self, sources: Sequence[SourceRecord]) -> Plan:
        """Return the paths to these sources, which the chain takes note of."""
        found = plan_paths(self.options, self.place, self.transports, sources)
        self.chain.met(found, sources, self.place.boot_id)
        return found


class Attempt:
    """One attempt to read the model; by itself, a pull that has not begun. On the loop; other
    threads may look at its public attributes, which are None until they are known."""

    def __init__(self, context: Context) -> None:
        self.manifest: Manifest | None = None
        self.pages: Pages | None = None
        self.arena: Memory | None = None
        self.subset: Subset | None = None  # of a pull of some tensors, with the manifest
        self.node: Node | None = None
        self._context = context
        self._options = context.options
        self._log = context.log
        self._history = context.history
        self._outcome = Outcome()
        self._delivery: Delivery | None = None

    @property
    def layout(self) -> Layout | None:
        """The layout of `arena`; None until the manifest is known."""
        if self.subset is not None:
            return self.subset.layout
        return None if self.manifest is None else self.manifest.layout

    def progress(self) -> Progress:
        """Return a snapshot; from any thread."""
        layout, log = self.layout, self._log
        if layout is None:
            return Progress(*self._history.counted, phase=log.phase)
        return progress_of(layout, None, log.is_ready, log.phase)

    def paths(self) -> list[PathReport]:
        """Return what has come over each path so far."""
        return []

    def _deliver(self, manifest: Manifest, *, strong: bool) -> Delivery:
        options = self._options
        self._delivery = Delivery(
            manifest,
            self._log,
            self._outcome,
            strong=strong,
            out=options.out,
            keep=options.resume and options.device == "cpu",
            revision=self._history.key.revision,
            layout=self.layout,
        )
        return self._delivery

    def _begin_to_write(self) -> None:
        if isinstance(self._options.into, InPlace):
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
        log = self._log
        return PullReport(
            model=str(self._history.key),
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
        )

    async def _commit(self, delivery: Delivery, report: PullReport) -> PullReport:
        if self._options.out is not None:
            self._log.phase = "writing"
            await in_thread(delivery.finish)
        if self._outcome.failure is not None:
            raise self._outcome.failure
        return report

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
        if self.arena is not None:
            self.arena.release()
            self.arena = None
        return kept
