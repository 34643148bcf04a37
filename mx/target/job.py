"""The policy of one pull, from a model's name to layers that are ready: which attempts there are to
read it, and what follows from each. On the loop."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping

from mx.core.pages import Pages
from mx.core.progress import Progress
from mx.core.reuse import Held
from mx.core.selection import Subset
from mx.core.types import Layout, Manifest, ModelKey
from mx.errors import (
    ConfigError,
    CoordinatorError,
    DigestError,
    LocalError,
    MxError,
    NoSourceError,
    SourceChangedError,
    StaleGenerationError,
)
from mx.memory.in_place import InPlace
from mx.memory.live import Memory
from mx.runtime import uncut, unexpected
from mx.storage.stores import Store
from mx.swarm.node import Node
from mx.target.attempt import Attempt, Context, History
from mx.target.caching import ask_cache
from mx.target.chain import Chain
from mx.target.events import EventLog
from mx.target.files import SideFiles
from mx.target.from_sources import FromSources
from mx.target.options import PullOptions
from mx.target.paths import target_place
from mx.target.report import PullReport, again
from mx.target.whole import FromStore
from mx.transport import Transport
from mx.views import host_bytes

#: What the error of a failed pull into a module says.
UNUSABLE = "`into` holds a part of the new weights: do not use it before a pull into it succeeds"


class Job:
    """One pull; call `run` on the loop. Its `manifest`, `pages`, `arena` and so on are the present
    attempt's, and None until they are known."""

    def __init__(
        self, options: PullOptions, transports: Mapping[str, Transport], log: EventLog
    ) -> None:
        self.options = options
        self.cached_at = ""  # where this host's cache holds the model, as it says
        self.kept = ""  # how to go on from what a failed pull has left on disk
        self.files = SideFiles(options, log)
        #: The source id by which others know this pull; "" if others can't read from it.
        self.reader_id = ""
        in_place = options.into is None or isinstance(options.into, InPlace)
        gives = options.selection is None  # whole chunks
        if options.host is not None and options.device == "cpu" and in_place and gives:
            self.reader_id = str(uuid.uuid4())
        self._log = log
        self._chain = Chain(options)
        self._history = History(options.key)
        self._context = Context(
            options,
            transports,
            target_place(options),
            log,
            self._chain,
            self.files,
            self._history,
            closed=threading.Event(),
        )
        self._attempt = Attempt(self._context)

    # -- what there is, from any thread -----------------------------------------------------------

    @property
    def key(self) -> ModelKey:
        """The model, as far as it is known."""
        return self._history.key

    @property
    def manifest(self) -> Manifest | None:
        return self._attempt.manifest

    @property
    def pages(self) -> Pages | None:
        return self._attempt.pages

    @property
    def arena(self) -> Memory | None:
        return self._attempt.arena

    @property
    def subset(self) -> Subset | None:
        """The tensors of a pull of some; None until the manifest is known."""
        return self._attempt.subset

    @property
    def layout(self) -> Layout | None:
        """The layout of `arena`; None until it is known."""
        return self._attempt.layout

    @property
    def node(self) -> Node | None:
        """The pull's part in a swarm, while it has one."""
        return self._attempt.node

    def progress(self) -> Progress:
        """Return a snapshot."""
        return self._attempt.progress()

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
                kept = await uncut(self._attempt.discard())
                unusable = UNUSABLE if self._history.written else ""
                self.kept = "; ".join(filter(None, [unusable, kept]))
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
            held = await ask_cache(self.options, self._history.count)
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

    async def _from_store(self, store: Store, last: bool) -> PullReport:
        self._log.phase = f"reading {store.step}"
        return await self._attempted(FromStore(self._context, store, last=last))

    async def _attempted(self, attempt: FromSources | FromStore) -> PullReport:
        """Undo what the last attempt has begun, and run a new one in its place."""
        await uncut(self._attempt.discard())
        self.files.unknown()
        self._attempt = attempt
        return await attempt.run()

    # -- from sources -----------------------------------------------------------------------------

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
            self._offer_for_reuse()
            self._log.begin_anew()
            self._change_reader_id()
            self._history.causes.clear()
            self._history.key = self.options.key

    def _may_follow(self, error: MxError) -> bool:
        """Return True if the last attempt's source was updated, or sources have brought bytes of
        which none were wrong: what is not there yet may come from another one."""
        if any(isinstance(cause, SourceChangedError) for cause in self._history.causes):
            return False
        if any(isinstance(cause, StaleGenerationError) for cause in self._history.causes):
            return True
        if isinstance(error, DigestError):
            return False
        return any(path.bytes for path in self._attempt.paths() if path.source != "local")

    def _offer_for_reuse(self) -> None:
        """Let the next attempt take what is equal from the last one's memory."""
        manifest, pages, arena = self.manifest, self.pages, self.arena
        if manifest is not None and pages is not None and arena is not None:
            self.options.reuse.append(Held(manifest, pages, host_bytes(arena.view)))

    async def _from_honest_peers(self) -> PullReport:
        """Pull from those that hold the weights in one layout and chunk size; if they have lied,
        and nothing of it was delivered, from those that hold them in another."""
        lies: DigestError | None = None
        while True:
            try:
                return await self._attempted(FromSources(self._context, self.reader_id))
            except DigestError as error:
                if self.manifest is None or not self._log.begin_again():
                    raise
                lies = error
                self._history.tried.append(self.manifest.ref)
            except (CoordinatorError, NoSourceError):
                if lies is None:
                    raise
                raise lies from None
            self._change_reader_id()

    def _change_reader_id(self) -> None:
        if self.reader_id:  # the coordinator may still know the other one, with its secret
            self.reader_id = str(uuid.uuid4())

    # -- ends -------------------------------------------------------------------------------------

    async def leave(self) -> None:
        """Leave the swarm, and end all reads of this pull's memory. Idempotent."""
        await self._attempt.leave()

    def close(self) -> None:
        """Make work on threads (reading disk, prefilling) stop soon; then cancel `run`."""
        self._context.closed.set()
