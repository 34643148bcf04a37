"""The policy of one pull, from a model's name to layers that are ready: which attempts there are to
read it, and what follows from each. On the loop."""

from __future__ import annotations

import asyncio
import functools
import threading
import uuid
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

from mx import packs, trace
from mx.core.progress import Progress
from mx.core.types import ModelKey
from mx.errors import (
    ConfigError,
    CoordinatorError,
    DigestError,
    LocalError,
    MxError,
    SourceChangedError,
    StaleGenerationError,
    SupersededError,
)
from mx.fetching.attempt import Attempt, Context, History, TransferAttempt
from mx.fetching.chain import Chain
from mx.fetching.edition import Edition
from mx.fetching.events import EditionReadiness, EventLog, changed
from mx.fetching.from_sources import FromSources
from mx.fetching.options import PullOptions
from mx.fetching.paths import target_place
from mx.fetching.report import PathReport, PullReport, again, explained
from mx.fetching.resolver import FIRST_S
from mx.runtime import uncut, unexpected
from mx.storage.stores import CheckpointStore
from mx.tasks import started
from mx.transport import Transport
from mx.views import host_bytes

if TYPE_CHECKING:
    from mx.fetching.whole import FromStore

#: What the error of a failed pull into a module says.
UNUSABLE = "`into` holds a part of the new weights: do not use it before a pull into it succeeds"


class Job:
    """One pull; call `run` on the loop. `edition` is the present one, which is all that there is of
    the pull; what has ended with another one is out of reach."""

    def __init__(
        self,
        options: PullOptions,
        transports: Mapping[str, Transport],
        log: EventLog,
        closed: threading.Event | None = None,
    ) -> None:
        """
        Args:
            options: The pull's options.
            transports: Those that may be used, by name.
            log: Gets the events.
            closed: Set to make work on threads stop soon; None: by `close`.
        """
        self.options = options
        self.cached_at = ""  # where this host's cache holds the model, as it says
        self.kept = ""  # how to go on from what a failed pull has left on disk
        self._log = log
        self._chain = Chain(options)
        self._history = History(options.key)
        try:
            place = started(functools.partial(target_place, options))
        except RuntimeError:  # there are too many threads: what needs one says so
            place = Future()
            place.set_result(target_place(options))
        if options.nics:  # which may not be there: an error of the caller's
            place.result()
        self._context = Context(
            options,
            transports,
            place,
            log,
            self._chain,
            self._history,
            closed=closed or threading.Event(),
        )
        self._attempt = self._not_begun(log.begin_anew())
        self._ended: list[Attempt] = []  # whose memory is still to be freed

    # -- what there is, from any thread -----------------------------------------------------------

    @property
    def key(self) -> ModelKey:
        """The model, as far as it is known."""
        return self._history.key

    @property
    def edition(self) -> Edition:
        """The present edition."""
        return self._attempt.edition

    def progress(self) -> Progress:
        """Return a snapshot."""
        attempt = self._attempt
        if self.options.out is None:
            return attempt.progress()
        return replace(attempt.progress(), bytes_written=attempt.written_nbytes())

    def paths(self) -> list[PathReport]:
        """Return what the present attempt has brought over each path so far."""
        return self._attempt.paths()

    # -- editions ---------------------------------------------------------------------------------

    def _not_begun(self, ready: EditionReadiness) -> Attempt:
        """Return an attempt that has not begun, with an edition of its own."""
        options, reader_id = self.options, ""
        in_place = not isinstance(options.into, memoryview)
        gives = options.selection is None  # whole chunks
        if options.host is not None and in_place and gives:
            # A new one each: the coordinator may still know the last one's, with its secret.
            reader_id = str(uuid.uuid4())
        return Attempt(self._context, Edition(options, self._log, ready, reader_id))

    def _succeed(self, ready: EditionReadiness) -> None:
        """Put a new edition in the place of the present one, which ends."""
        ended, self._attempt = self._attempt, self._not_begun(ready)
        ended.edition.end(changed())
        self._ended.append(ended)

    def _begin_newer(self) -> bool:
        """Return True if another edition, of what the name means now, has begun; False if the
        caller has something of the present one."""
        ready = None if self.edition.viewed else self._log.begin_newer()
        if ready is not None:
            self._succeed(ready)
        return ready is not None

    def _begin_again(self, *, unseen: bool = False) -> bool:
        """Return True if another edition of the same weights has begun; False if the caller has
        something of the present one. `unseen`: layers that are ready and not seen are none."""
        ready = self._log.begin_again(unseen=unseen)
        if ready is None:
            return False
        self._succeed(ready)
        return True

    # -- the run ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run to the end; the log gets the report or the error. Raises only if cancelled."""
        try:
            with trace.span("pull", model=self.options.name, job=id(self)) as span:
                try:
                    report = await self._from_chain()
                except BaseException:
                    span.set(moved=self.paths())
                    raise
                report.steps = self._chain.report() if self.options.bound else []
                report.defined_by = report.defined_by or self.options.defined_by
                self._log.phase = "complete"
                self._log.finished(report)
                span.set(report=report)
        except BaseException as error:  # callers that wait on the log need any error
            failure = unexpected(error)
            self._log.failing(failure)
            self.edition.end(failure)
            try:
                kept = await uncut(self._discard(self._attempt))
                unusable = UNUSABLE if self._history.written else ""
                self.kept = "; ".join(filter(None, [unusable, kept]))
            finally:
                self._log.failed(again(failure, self.kept))
            if not isinstance(error, Exception):
                raise

    async def _from_chain(self) -> PullReport:
        """Pull from the sources, and complete it from the stores; if no source has described the
        model, or nothing was delivered, from the first store that holds it."""
        chain = self._chain
        if not self.options.from_sources:
            return await self._from_stores(None)
        if self.options.cache:
            self._log.phase = "waiting for the cache"
            from mx.fetching.caching import ask_cache

            held = await ask_cache(self.options, self.edition.count)
            self.cached_at = "" if held is None else held.endpoint
        try:
            report = await self._from_newest_peers()
        except MxError as error:
            chain.sources_gave((), error)
            described = self.edition.manifest is not None
            if not chain.goes_on(error, described=described) or not self._begin_again():
                if (failure := chain.failure(error)) is not error:
                    raise failure from error
                raise
            failure = error
        else:
            chain.sources_gave(report.paths, None)
            report.fallback = chain.completed or None
            return report
        return await self._from_stores(failure)

    async def _from_stores(self, failure: MxError | None) -> PullReport:
        """Read the model from the stores: by the digests beside its weights, if those are of what
        was asked for, else all of it from the first store that holds it."""
        options = self.options
        listed = self._history.named if options.bound else None
        if options.pin or listed or options.selection or options.local_ranks:
            from_digests = packs.optional("mx.snapshots.pulling:from_digests")
            attempt = from_digests and await from_digests(self._context, self.edition, listed)
            if attempt is not None:
                try:
                    return await self._attempted(attempt)
                except DigestError:
                    # The weights are newer than the digests, and nothing else defines the model.
                    if attempt.is_defined or not self._begin_again(unseen=True):
                        raise
        return await self._chain.whole(failure, self._from_store, self._begin_again)

    async def _from_store(self, store: CheckpointStore, last: bool) -> PullReport:
        self._log.phase = f"reading {store.step}"
        from mx.fetching.whole import FromStore

        return await self._attempted(FromStore(self._context, self.edition, store, last=last))

    async def _attempted(self, attempt: TransferAttempt | FromStore) -> PullReport:
        """Undo what earlier attempts have begun, and fill the present edition by this one."""
        await uncut(self._discard())
        self._attempt = attempt
        return await attempt.run()

    async def _discard(self, *present: Attempt) -> str:
        """Free what the ended attempts, and this one, have. Returns what the last one's `discard`
        says of how to go on."""
        kept = ""
        self._ended += present
        while self._ended:
            kept = await self._ended[0].discard() or kept
            del self._ended[0]
        return kept

    # -- from sources -----------------------------------------------------------------------------

    async def _from_newest_peers(self) -> PullReport:
        """Pull; when a name means a newer revision by now and the one of before can't be obtained,
        or with `follow` when its sources are gone or hold other weights, go over to what the name
        means then, and keep what is equal."""
        while True:
            try:
                return await self._attempted(FromSources(self._context, self.edition))
            except MxError as error:
                lasting = isinstance(error, LocalError | ConfigError | CoordinatorError)
                superseded = isinstance(error, SupersededError)
                follows = self.options.follow and not lasting
                follows = follows and (superseded or self._may_follow(error))
                again = self._attempt.mapped_in_part and self._begin_again(unseen=True)
                if not (follows or again or (superseded and self._begin_newer())):
                    raise
            if not self._attempt.paths():  # what could not be opened may be listed for a moment yet
                await asyncio.sleep(FIRST_S)
            if follows:
                self._offer_for_reuse()
                self._succeed(self._log.begin_anew())
            self._history.causes = []  # the last attempt's threads may still add to theirs
            self._history.key = self.options.key

    def _may_follow(self, error: MxError) -> bool:
        """Return True if the last attempt's source was updated, or sources have brought bytes of
        which none were wrong: what is not there yet may come from another one."""
        causes = explained(self._history.causes)
        stale = [each for each in causes if isinstance(each, StaleGenerationError)]
        written = [each for each in stale if isinstance(each, SourceChangedError)]
        if len(written) < len(stale):  # what one holder wrote to says nothing of the model
            return True
        if written or isinstance(error, DigestError):
            return False
        return any(path.bytes for path in self._attempt.paths() if path.source != "local")

    def _offer_for_reuse(self) -> None:
        """Let the next attempt take what is equal from the last one's memory."""
        edition = self.edition
        manifest, pages, arena = edition.manifest, edition.pages, edition.arena
        if manifest is not None and pages is not None and arena is not None:
            from mx.core.reuse import ReusableWeights

            self.options.reuse.append(ReusableWeights(manifest, pages, host_bytes(arena.view)))

    # -- ends -------------------------------------------------------------------------------------

    async def leave(self) -> None:
        """Leave the swarm, and end all reads of this pull's memory. Idempotent."""
        await self._attempt.leave()

    def close(self) -> None:
        """Make work on threads (reading disk, prefilling) stop soon; then cancel `run`."""
        self._context.closed.set()
