"""What the attempts of a pull have in common: what they work with (`Context`), what one leaves to
the next (`History`), and how a model is delivered, reported, committed or discarded (`Attempt`).

`mx.fetching.from_sources` and `mx.fetching.whole` have the two kinds; `mx.fetching.job` decides
which one comes next. An attempt is made for one run, and fills one edition (`mx.fetching.edition`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from mx.core.planner import Plan
from mx.core.progress import Progress, progress_of
from mx.core.topology import Place
from mx.core.types import Manifest, ManifestRef, ModelKey, SourceRecord
from mx.errors import MxError
from mx.fetching.chain import Chain
from mx.fetching.delivery import Delivery
from mx.fetching.edition import Edition
from mx.fetching.events import EventLog
from mx.fetching.options import PullOptions
from mx.fetching.paths import plan_paths
from mx.fetching.report import LeftSource, PathReport, PullReport, VerifiedBy
from mx.runtime import in_thread
from mx.transport import Transport


@dataclass
class History:
    """What a pull keeps from one attempt to the next. Each attempt adds to it."""

    key: ModelKey  # as far as it is known
    named: ManifestRef | None = None  # what the coordinator has answered
    newest: str = ""  # what the name means to the coordinator, if `key` is older
    causes: list[MxError] = field(default_factory=list)  # why sources and paths failed
    left: list[LeftSource] = field(default_factory=list)  # whose memory was attached, and is wrong
    ranks_met: bool = False  # ranks on one host meet once
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
