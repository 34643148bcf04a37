"""Serves what a pull has received: to readers as a source, and to routers as a replica."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mx import config, runtime
from mx.core.types import SourceRole
from mx.errors import ClosedError, ConfigError
from mx.runtime import in_thread, uncut

if TYPE_CHECKING:
    from mx.api.closing import Step
    from mx.api.filled import FilledMemory
    from mx.api.source import Source
    from mx.fetching.edition import Edition
    from mx.fetching.files_job import FilesJob
    from mx.fetching.job import Job
    from mx.fetching.options import PullOptions
    from mx.fetching.progress import ProgressReporter
    from mx.memory.arena import MemfdArena
    from mx.memory.device import DeviceArena
    from mx.memory.live import LiveMemory
    from mx.source.relay import Relay


class Giving:
    """One pull's. `Pull` says what its methods return and raise.

    The memory's lock guards the source and the port for requests, too: the source gets the port,
    whichever is first; two calls of `hold` make one source; closing waits for one that is made.
    """

    def __init__(
        self,
        loop: runtime.LoopThread,
        options: PullOptions,
        settings: config.Settings,
        job: Job | FilesJob,
        reporter: ProgressReporter | None,
        memory: FilledMemory,
    ) -> None:
        """
        Args:
            loop: The pull's.
            options: The pull's.
            settings: Those of the source.
            job: The pull's.
            reporter: What tells the coordinator of the pull, if there is one.
            memory: What the pull fills.
        """
        self._loop = loop
        self._options = options
        self._settings = settings
        self._job = job
        self._reporter = reporter
        self._memory = memory
        self._source: Source | None = None
        self._released = False
        self._requests_port = 0

    def hold(self) -> Source:
        """Serve the memory, after the pull's end; return the same source at each call."""
        with self._memory.lock:
            if self._released:
                raise ClosedError("the pull has given back its memory (`release`)")
            if self._source is not None and self._source.wait(0):
                raise ClosedError("the source that `hold` has returned was closed")
            if self._source is None:
                self._source = self._begin_to_hold()
                if self._requests_port:
                    self._source.accept_requests(self._requests_port)
            return self._source

    def _begin_to_hold(self) -> Source:
        from mx.api.serving import serve_held
        from mx.memory.arena import MemfdArena
        from mx.memory.device import DeviceArena
        from mx.memory.live import LiveMemory
        from mx.source.model import SourceModel
        from mx.source.relay import Relay

        edition = self._memory.edition()
        arena, manifest, pages = edition.arena, edition.manifest, edition.pages
        if (
            not self._options.hold
            or not isinstance(arena, MemfdArena | DeviceArena | LiveMemory)
            or manifest is None
            or pages is None
        ):
            raise ConfigError("only a pull made with hold=True can become a source")
        host = None if edition.sharing is None else edition.sharing.host
        if isinstance(host, Relay):
            return self._loop.run(self._settled(host, edition, arena))
        live = isinstance(arena, LiveMemory)
        self._loop.run(self._sealed(edition, arena))
        held = SourceModel(
            self._job.key,
            manifest,
            arena,
            pages,
            role=SourceRole.RELAY,
            borrowed=True,
        )
        reporter = self._reporter
        known = edition.reader_id if reporter is None else reporter.pull_id  # to others
        held.source_id = known or held.source_id
        return serve_held(held, self._options.coordinator, self._settings, live=live)

    async def _sealed(self, edition: Edition, arena: MemfdArena | DeviceArena | LiveMemory) -> None:
        from mx.memory.live import LiveMemory

        await self._job.leave()
        if not isinstance(arena, LiveMemory):
            await uncut(in_thread(edition.unseen, arena.seal))

    async def _settled(
        self, relay: Relay, edition: Edition, arena: MemfdArena | DeviceArena | LiveMemory
    ) -> Source:
        """Turn the relay, which others read from without a break, into a source. It is the pull's
        at once: the relay can't be turned into another."""
        from mx.memory.arena import MemfdArena

        if isinstance(arena, MemfdArena):
            await uncut(in_thread(edition.unseen, arena.freeze))
        server, held = await uncut(relay.settle())
        from mx.api.source import Source

        coordinator = self._options.coordinator or ""
        self._source = Source(runtime.acquire(), server, held, coordinator, None)
        return self._source

    def accept_requests(self, port: int) -> None:
        """Have routers send requests to this port; 0: to none any more."""
        if self._reporter is None:
            raise ConfigError(
                "this pull has no coordinator that could list the port",
                hint="leave out `peer`, and give `coordinator`",
            )
        with self._memory.lock:
            if self._memory.closed:
                raise ClosedError("the pull was closed")
            self._requests_port, source = port, self._source
        self._loop.submit(self._reporter.accept_requests(port))
        if source is not None:
            source.accept_requests(port)

    def end(self) -> None:
        """Serve nothing any more, and give the tensors of `into` back. Idempotent."""
        with self._memory.lock:
            self._released = True
            source, self._source = self._source, None
        if source is not None:
            source.close()
        self._loop.run(self._job.leave())
        from mx.memory.live import LiveMemory

        if isinstance(self._job.edition.arena, LiveMemory):
            self._job.edition.release()

    @property
    def gives(self) -> bool:
        """True while others are to read here, or to send requests, until the pull is closed."""
        return (self._options.hold and not self._released) or bool(self._requests_port)

    def hand_over(self) -> Source | None:
        """Return the source that `hold` has made, which is the caller's alone from now on."""
        source, self._source = self._source, None
        return source

    def closing_steps(self) -> list[Step]:
        """Return the steps that close the source, if there is one."""
        return [] if self._source is None else [self._source.close]
