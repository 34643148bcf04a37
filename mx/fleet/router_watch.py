"""The stream of a router's events: `Watch`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from mx import runtime
from mx.api.closing import Closable, Step
from mx.core.reference import ModelReference
from mx.core.replicas import EventKind, FleetEvent, Replica
from mx.errors import (
    ConfigError,
    CoordinatorError,
    CoordinatorVersionError,
    MxError,
    NotAllowedError,
    PeerUntrustedError,
    another,
)
from mx.fleet.allowed import AllowedHosts
from mx.fleet.known_replicas import RETURN_S, Fleet
from mx.runtime import unexpected
from mx.tasks import end_tasks
from mx.wire.client import CoordinatorClient
from mx.wire.listing import WatchKind, WatchUpdate

log = logging.getLogger(__name__)

#: A watch that has so many unread events begins again; the events that it then tells don't count.
MAX_UNREAD = 8192
_FIRST_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 2.0
#: What no new attempt mends.
_FINAL = (ConfigError, CoordinatorVersionError, NotAllowedError, PeerUntrustedError)


class Watch(Closable):
    """The events of one model's replicas, for one consumer; `Router.watch` makes it.

    Iterate it with `for` or `async for`; it ends when it is closed, here or with its router. First
    come the events that tell what is there (`known_before`), up to SYNCED, then every change. When
    the coordinator ends, DISCONNECTED comes, and replicas stay as they were; the watch connects
    again by itself, and after SYNCED what has not come back within ten seconds is lost.
    """

    def __init__(
        self,
        loop: runtime.LoopThread,
        stream: FollowedModel,
        on_close: Callable[[FollowedModel], None],
    ) -> None:
        """Show a stream's events; on the loop.

        Args:
            loop: The loop, acquired for this object.
            stream: What to show; the watch stops it when it is closed.
            on_close: Called with the stream when the watch is closed.
        """
        self._on_close = on_close
        self._stream = stream
        super().__init__(loop)

    # -- for the consumer -----------------------------------------------------------------------

    def __iter__(self) -> Iterator[FleetEvent]:
        while (event := self.next()) is not None:
            yield event

    async def __aiter__(self) -> AsyncIterator[FleetEvent]:
        while (event := await self.next_async()) is not None:
            yield event

    def next(self, timeout_s: float | None = None) -> FleetEvent | None:
        """Block until there is an event, and return it.

        Args:
            timeout_s: Seconds to wait at most; None waits without a limit.

        Returns:
            The event; None if the watch was closed.

        Raises:
            TimeoutError: None came within `timeout_s`.
            MxError: An error that no new attempt mends: the coordinator is of another version, or
                does not accept the certificate.
        """
        self._require_own()
        while (event := self._pop()) is None and not self._ended:
            self._loop.run(self._stream.wait(), timeout_s)
        return event

    async def next_async(self) -> FleetEvent | None:
        """Return what `next` returns, without blocking the caller's own event loop.

        Raises:
            MxError: As `next`.
        """
        self._require_own()
        while (event := self._pop()) is None and not self._ended:
            await asyncio.wrap_future(self._loop.submit(self._stream.wait()))
        return event

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The replicas as they are known now, which may be ahead of the events that were read."""
        self._require_own()
        return () if self._ended else self._loop.run(self._stream.replicas())

    def _pop(self) -> FleetEvent | None:
        # From the consumer's thread: an interrupted wait has taken nothing.
        with contextlib.suppress(IndexError):
            return None if self._ended else self._stream.unread.popleft()
        return None

    # -- the end --------------------------------------------------------------------------------

    @property
    def _ended(self) -> bool:
        return self._steps is not None

    def _closing_steps(self) -> list[Step]:
        return [self._awaiting(self._stream.stop), lambda: self._on_close(self._stream)]


class FollowedModel:
    """What a watch follows, and what has come. Its task keeps this, but not the watch."""

    def __init__(
        self, client: CoordinatorClient, wanted: ModelReference, allow: AllowedHosts | None
    ) -> None:
        """Begin to follow; on the loop, where all else is called, too.

        Args:
            client: The coordinator; its owner closes it.
            wanted: Whose events.
            allow: The hosts of replicas that are allowed; None: all.
        """
        self._client = client
        self._wanted = wanted
        self._fleet = Fleet(allow=allow)
        #: The consumer takes from here, on any thread.
        self.unread: deque[FleetEvent] = deque()
        self._told = 0  # how many events told everything again
        self._changed = asyncio.Event()
        self._synced = False
        self._over = False
        self._error: MxError | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._task = asyncio.create_task(self._run(), name="mx-router-watch")

    async def replicas(self) -> tuple[Replica, ...]:
        """Return the replicas as they are known now."""
        return self._fleet.replicas

    async def wait(self) -> None:
        """Wait until there is an event, or no more. Raises what ended the stream."""
        while not self.unread and not self._over:
            if self._error is not None:
                raise another(self._error)
            self._changed.clear()
            await self._changed.wait()

    async def stop(self) -> None:
        """Follow no more."""
        self._over = True
        self._stop_tick()
        await end_tasks(self._task)
        self._changed.set()

    def _stop_tick(self) -> None:
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None

    async def _run(self) -> None:
        backoff_s, told = _FIRST_BACKOFF_S, False
        while True:
            self._synced = False
            try:
                await self._follow()
                raise CoordinatorError("the coordinator ended the watch")
            except _FINAL as error:
                self._error = error
                self._changed.set()
                return
            except MxError as error:
                if self._synced:
                    backoff_s, told = _FIRST_BACKOFF_S, False
                if not told:
                    told = True
                    log.info("a watch was interrupted: %s", str(error))
                    self._publish([FleetEvent(EventKind.DISCONNECTED, reason=str(error))])
            except Exception as error:  # noqa: BLE001 - the consumer would wait for ever
                self._error = unexpected(error)
                self._changed.set()
                return
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _follow(self) -> None:
        """Follow the stream until it ends."""
        self._fleet.connected()
        wanted = self._wanted
        stream = self._client.watch(wanted.name, wanted.revision, pulls=True)
        async with contextlib.aclosing(stream):
            async for update in stream:
                self._publish(self._heard(update))

    def _heard(self, update: WatchUpdate) -> list[FleetEvent]:
        fleet, wanted = self._fleet, self._wanted
        record, pull, reason = update.record, update.pull, update.reason
        if update.kind is WatchKind.SNAPSHOT_END:
            return self._snapshot_ended()
        if pull is not None and wanted.fits_key(pull.model):
            return fleet.pull(pull)
        if update.pull_id:
            return fleet.pull_gone(update.pull_id, reason or ("replaced" if pull else ""))
        if record is None:
            return []
        if update.kind is not WatchKind.GONE and wanted.fits(record.model, record.ref):
            return fleet.source(record)
        return fleet.source_gone(record.source_id, reason or "replaced")

    def _snapshot_ended(self) -> list[FleetEvent]:
        self._synced = True
        loop = asyncio.get_running_loop()
        self._stop_tick()
        self._tick = loop.call_later(RETURN_S + 0.05, self._let_time_pass)
        return self._fleet.synced(loop.time())

    def _let_time_pass(self) -> None:
        self._tick = None
        self._publish(self._fleet.tick(asyncio.get_running_loop().time()))

    def _publish(self, events: Sequence[FleetEvent]) -> None:
        if not events:
            return
        if len(self.unread) + len(events) > self._told + MAX_UNREAD:
            again = [FleetEvent(EventKind.MISSED), *self._fleet.told()]
            if self._synced:
                again.append(FleetEvent(EventKind.SYNCED))
            self.unread, self._told = deque(again), len(again)
        else:
            self.unread.extend(events)
        self._changed.set()
