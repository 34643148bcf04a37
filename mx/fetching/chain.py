"""The chain of a pull: peers, then each store. What peers have brought, and was verified, stays."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mx.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    DigestError,
    IntegrityError,
    LocalError,
    MxError,
    OutputError,
    another,
)
from mx.fetching.opening import open_store, stoppable
from mx.fetching.reads import Connection, StorePath, StoreSource
from mx.fetching.report import (
    FAILED,
    PARTLY,
    SKIPPED,
    UNUSED,
    USED,
    PathReport,
    PullReport,
    StageReport,
    StepReport,
)
from mx.runtime import in_thread, uncut
from mx.units import format_bytes

if TYPE_CHECKING:
    from mx.core.pages import Pages
    from mx.core.planner import Plan
    from mx.core.types import Manifest, SourceRecord
    from mx.fetching.edition import EditionLog
    from mx.fetching.events import EventLog
    from mx.fetching.options import PullOptions
    from mx.fetching.stored import StoreSession
    from mx.fetching.transfer import Transfer
    from mx.storage.stores import CheckpointStore

log = logging.getLogger(__name__)

#: The steps whose bytes come from processes, in order.
ATTACH, HOST, PEERS = "attach", "host", "peers"


class NoLease:
    """A store's content is checked by its digests alone."""

    coordinated = False
    answers = False
    lease_s = 0.0

    def check(self) -> MxError | None:
        return None

    def ask(self, chunk: int, right: Callable[[], None]) -> None:
        raise NotImplementedError

    def end(self, *, lost: bool = False) -> None:
        """Do nothing."""


@dataclass
class Chain:
    """What became of one pull's steps; on the loop. `causes` are the stores' errors; `completed` is
    the step of the store with which the pull was complete; `stages` are those of reading stores.
    `session` makes what reads a store in place of `StoreSession`: into a GPU."""

    options: PullOptions
    steps: list[StepReport] = field(default_factory=list)
    causes: list[MxError] = field(default_factory=list)
    completed: str = ""
    session: Callable[..., Any] | None = None
    stages: list[StageReport] = field(default_factory=list)
    _near: dict[str, bool] = field(default_factory=dict)  # endpoint -> whether it is on this host
    _attachable: bool = False

    def met(self, plan: Plan, sources: Iterable[SourceRecord], boot_id: str) -> None:
        """Record the sources that were considered; `boot_id` is this host's."""
        self._attachable |= any(path.attach for path in plan.paths)
        for each in sources:
            self._near[each.endpoint] = each.place.boot_id == boot_id != ""

    def sources_gave(self, paths: Sequence[PathReport], error: MxError | None) -> None:
        """Record what sources served, once. Of sources alone the pull's report tells as much.

        Args:
            paths: What came over each path.
            error: Why they did not serve everything; None: they did.
        """
        if self.steps or not (self.options.bound or self.options.stores):
            return
        given = dict.fromkeys((ATTACH, HOST, PEERS), 0)
        for path in paths:
            on_host = path.given or self._near.get(path.source, path.transport == "resume")
            given[ATTACH if path.attached else HOST if on_host else PEERS] += path.bytes
        near, far = any(self._near.values()), not all(self._near.values())
        untried = {
            ATTACH: "" if self._attachable else self._why_not_attached(near=near),
            HOST: "" if near else "no source is on this host",
            PEERS: "" if far or not self._near else "no source is elsewhere",
        }
        reason = "" if error is None else error.message
        if not self._near:  # no source was ever listed: the error says why
            untried = {ATTACH: reason, HOST: reason, PEERS: ""}
        left = sum(given.values())
        for step, nbytes in given.items():
            left -= nbytes
            if nbytes:
                last = error is None and not left
                self.note(StepReport(step, USED if last else PARTLY, reason, nbytes))
            elif error is None and not left:
                self.note(StepReport(step, UNUSED))
            elif untried[step]:
                self.note(StepReport(step, SKIPPED, untried[step]))
            else:
                self.note(StepReport(step, FAILED, reason or "later steps had it"))

    def _why_not_attached(self, *, near: bool) -> str:
        if not near:
            return "no source is on this host"
        if not self.options.attach:
            return "`attach=False`: a copy was asked for"
        if self.options.transport is not None:
            return f"`transport={self.options.transport}` was asked for, which does not attach here"
        return "no path attaches to memory of this host"

    def stored(self, step: str, error: MxError | None, nbytes: int = 0) -> None:
        """Record what a store gave; `error` is the reason where it did not give all."""
        if error is None:
            self.completed = step
            self.note(StepReport(step, USED, "", nbytes))
        else:
            self.causes.append(error)
            # What to install or set for a store is not what the pull's own hint says.
            why = str(error) if isinstance(error, ConfigError) else error.message
            self.note(StepReport(step, PARTLY if nbytes else FAILED, why, nbytes))

    def note(self, report: StepReport) -> None:
        """Record a step."""
        self.steps.append(report)
        given = f", {format_bytes(report.bytes)}" if report.bytes else ""
        because = f": {report.reason}" if report.reason else ""
        log.info("step %s: %s%s%s", report.step, report.outcome, given, because)

    def report(self) -> list[StepReport]:
        """Return all steps in the chain's order, those that were skipped or not needed among
        them."""
        found = {each.step: each for each in self.options.skipped}
        for store in self.options.stores:
            found[store.step] = StepReport(store.step, UNUSED)
        found |= {each.step: each for each in self.steps}
        order = (ATTACH, HOST, PEERS, "snapshot", "disk", "hub", "objects")
        return [found[step] for step in order if step in found]

    def goes_on(self, error: MxError, *, described: bool) -> bool:
        """Return True if the model may be read from a store as a whole.

        Args:
            error: Why the sources did not serve it.
            described: True if they described it.
        """
        if not self.options.stores or isinstance(error, LocalError):
            return False  # reading from disk would fail too
        if isinstance(error, ConfigError) and described:
            return False
        if self.options.owners and not (self.options.pin or (self.options.bound and described)):
            return False  # no store shows whose its weights are
        # What the sources' manifest describes was looked for there.
        return not (self.options.bound and self.causes)

    def failure(self, error: MxError) -> MxError:
        """Return the error of a pull that ends with its sources' `error`."""
        nothing_set = not self.options.stores and bool(self.options.skipped)
        if nothing_set and not isinstance(error, LocalError | ConfigError):
            return self.error(error)
        return error

    async def whole(
        self,
        failure: MxError | None,
        attempt: Callable[[CheckpointStore, bool], Awaitable[PullReport]],
        begin_again: Callable[[], bool],
    ) -> PullReport:
        """Read all of the model from the first store that has it.

        Args:
            failure: Why the sources did not serve it; None: there are none.
            attempt: Reads it from a store; the second argument is True for the last one.
            begin_again: Returns True if nothing of an attempt that failed was delivered.

        Raises:
            MxError: No store has it.
        """
        for store in self.options.stores:
            try:
                report = await attempt(store, store is self.options.stores[-1])
            except (CapacityError, OutputError, ClosedError):
                raise  # another store would be no better
            except MxError as error:
                self.stored(store.step, error)
                if failure is None or not begin_again():
                    raise
                continue
            self.stored(store.step, None, report.bytes)
            report.fallback = None if failure is None else store.step
            return report
        assert failure is not None
        raise self.error(failure)

    def error(self, failure: MxError) -> MxError:
        """Return the error of a pull that no step has completed; `failure` is the sources'."""
        if not self.options.bound:
            return self.causes[-1] if self.causes else failure
        lies = [each for each in (failure, *self.causes) if isinstance(each, IntegrityError)]
        kind = lies[-1] if lies else failure
        tried = {each.step: each.reason for each in self.report() if each.step not in _NEAR}
        tried[PEERS] = failure.message
        said = [f"\n  {step}: {reason}" for step, reason in tried.items() if reason]
        made = another(kind)
        made.message = f"no step had {self.options.name}{''.join(said)}"
        made.args = (made.message,)
        made.hint = failure.hint if kind is failure else kind.hint
        return made

    # -- going on with what is verified ------------------------------------------------------------

    async def complete(
        self,
        manifest: Manifest,
        pages: Pages,
        transfer: Transfer,
        edition: EditionLog,
        log: EventLog,
    ) -> None:
        """Read what a transfer still lacks from the stores, one after the other, until it has
        ended. Its other connections are lost, or will be.

        Args:
            manifest: The model's.
            pages: The digests that are known.
            transfer: What lacks chunks.
            edition: The transfer's edition.
            log: The pull's.
        """
        transfer.read_freely()
        transfer.expect_connections()
        for store in self.options.stores:
            if edition.ended:
                return
            log.phase = f"reading {store.step}"
            before_nbytes = sum(path.bytes for path in transfer.paths())
            failure: MxError | None = None
            try:
                await self._read(store, manifest, pages, transfer, edition, log)
                failure = edition.failure
            except MxError as error:
                failure = error.with_traceback(None)
            nbytes = sum(path.bytes for path in transfer.paths()) - before_nbytes
            self.stored(store.step, failure, nbytes)
        while not edition.ended:  # reads that were lost may have yet to end
            edition.changed.clear()
            transfer.no_more_connections()
            if not edition.ended:
                await edition.changed.wait()

    async def _read(
        self,
        store: CheckpointStore,
        manifest: Manifest,
        pages: Pages,
        transfer: Transfer,
        edition: EditionLog,
        log: EventLog,
    ) -> None:
        """Read through one store until the transfer has ended. Raises why it can't go on."""
        from mx.fetching.stored import StoredModel, StoreSession, find_pages

        loop = asyncio.get_running_loop()

        def idle() -> None:
            loop.call_soon_threadsafe(edition.changed.set)

        over = threading.Event()  # set once nothing is to be read any more
        checkpoint = await open_store(store, self.options, over)
        model: StoredModel | None = None
        session: StoreSession | None = None
        try:
            model = opened = StoredModel(checkpoint, manifest.layout, store.place)
            await stoppable(
                lambda cancelled: find_pages(
                    opened,
                    manifest,
                    pages,
                    transfer.put_page,
                    threads=checkpoint.threads,
                    cancelled=cancelled,
                ),
                over,
            )
            make: Callable[..., StoreSession] = self.session or StoreSession
            session = await uncut(in_thread(make, model, checkpoint.threads, idle))
            source = StoreSource(f"{store.step} {store.place}", store.place)
            connection = Connection(StorePath(source, store.step), NoLease(), session)
            connection.opened_at_s = loop.time()
            log.reading_began(loop.time())
            number = transfer.add_connection(connection)
            try:
                await _follow(number, connection, session, transfer, edition)
            finally:
                transfer.connection_lost(number, ClosedError("the store is not read any more"))
                edition.lost.pop(number, None)
        finally:
            over.set()
            if session is not None:
                session.close()
                await uncut(in_thread(session.join))
                self.stages += [StageReport(*each) for each in session.stages.report()]
            if model is not None:
                model.close()
            await uncut(in_thread(checkpoint.close))


_NEAR = (ATTACH, HOST)


async def _follow(
    number: int,
    connection: Connection,
    session: StoreSession,
    transfer: Transfer,
    edition: EditionLog,
) -> None:
    """Wait until the transfer has ended. Raises why the store can't give what is missing."""
    while not edition.ended:
        edition.changed.clear()
        lost = edition.lost.pop(number, None)
        if lost is not None:
            raise session.failure or lost
        if session.idle and transfer.hopeless:
            raise DigestError(
                f"{connection.peer} holds other weights: {connection.wrong_parts} of its parts do "
                "not match the model's identity",
                peer=connection.peer,
                hint="put the checkpoint there that the sources were started from",
            )
        if not edition.ended:
            await edition.changed.wait()
