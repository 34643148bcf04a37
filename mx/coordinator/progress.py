"""The part of the Coordinator service that shows the running pulls to users.

Progress is kept in this process's memory alone, whatever the state is kept in: after a restart
each pull reports again within a second. Coordinators that share a state tell each other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

from mx.coordinator.callers import own_host, takes_requests
from mx.coordinator.paging import pages_of
from mx.coordinator.watchers import INTERVAL_S
from mx.core.budget import Budget, Limits
from mx.core.policy import Right
from mx.core.progress_board import MAX_PULLS, ProgressBoard
from mx.errors import ClosedError, NotAllowedError, PeerProtocolError
from mx.wire.principals import Access, payer_of
from mx.wire.progress import pull_from_wire, pull_to_wire
from mx.wire.v1 import coordinator_pb2 as pb

#: A pull reports each second; one that reports nothing for this long is stopped or gone.
SILENT_S = 30.0
#: How often watches look for pulls that have fallen silent.
_LOOK_S = 0.5
#: The size of a batch of changes.
_WATCH_BYTES = 32 << 10
_MAX_SOURCE_HOSTS = 256


class PullsServicer:
    """The calls Progress, ListPulls, WatchPulls and ListRates.

    Args:
        now: The coordinator's clock, in seconds.
        registered_from: Returns the principal that registered a listed source; None for others.
        access: Who may do what.
        limits: What clients may have.
    """

    def __init__(
        self,
        now: Callable[[], float],
        registered_from: Callable[[str], Awaitable[str | None]],
        access: Access,
        limits: Limits,
    ) -> None:
        self._now = now
        self._access = access
        self._registered_from = registered_from
        self._board = ProgressBoard()
        self._reporting = Budget(
            min(limits.pulls, MAX_PULLS), "the coordinator has {} pulls that report"
        )
        self._watching_pulls = Budget(
            limits.pull_watches, "the coordinator has {} watches of pulls"
        )
        self._pulls_changed = asyncio.Event()
        self._stopped = asyncio.Event()

    async def Progress(
        self, requests: AsyncIterator[pb.ProgressRequest], context: Any
    ) -> pb.ProgressResponse:
        reporter = object()
        with self._reporting.held(payer_of(context)):
            try:
                while (request := await _next(requests)) is not None:
                    status = pull_from_wire(request.pull)
                    caller = self._access.require(context, (Right.PULL,), status.model.name)
                    # Ids of sources are known to all: what reports as one is taken for it.
                    registered_from = await self._registered_from(status.pull_id)
                    if registered_from not in (None, caller.name):
                        raise NotAllowedError(
                            f"pull {status.pull_id} is the source of another principal"
                        )
                    if status.requests_port:
                        allowed = takes_requests(self._access, caller, status.model.name)
                        host = own_host(context, status.requests_host) if allowed else ""
                        port = status.requests_port if host else 0
                        status = replace(status, requests_host=host, requests_port=port)
                    self._board.report(self._now(), reporter, status, caller.name)
                    self._pulls_have_changed()
            finally:
                self._board.end(self._now(), reporter)
                self._pulls_have_changed()
        return pb.ProgressResponse()

    async def WatchPulls(
        self, request: pb.WatchPullsRequest, context: Any
    ) -> AsyncIterator[pb.WatchPullsResponse]:
        with self._watching_pulls.held(payer_of(context)):
            changes, seen, is_first = self._board.changes, 0, True
            policy, sees = self._access.version, self._observed_by(context, request.name)
            while not self._stopped.is_set():
                self._board.tick(self._now())
                found, hidden = changes.after(seen, request.name), list[str]()
                if policy != self._access.version:  # who may observe nothing any more is refused
                    policy, sees = self._access.version, self._observed_by(context, request.name)
                    there = changes.after(0, request.name)
                    hidden = [p.pull_id for p in there if p.status and not sees(p.name)]
                    found = [*(each for each in found if not each.status), *there]
                seen = changes.latest
                found = [each for each in found if not each.status or sees(each.name)]
                gone = hidden + [change.pull_id for change in found if change.status is None]
                # One page at a time: a watch that is read slowly holds no more messages.
                pulls = (pull_to_wire(change.status) for change in found if change.status)
                for page in pages_of(pulls, _WATCH_BYTES):
                    if page:
                        yield pb.WatchPullsResponse(pulls=page)
                if gone or is_first:
                    yield pb.WatchPullsResponse(gone=gone, snapshot_end=is_first)
                is_first = False
                await self._until_changed(seen)
        raise ClosedError("the coordinator is shutting down")

    def _observed_by(self, context: Any, name: str) -> Callable[[str], bool]:
        """Return what says of which models a caller may observe the pulls; "" for all, as far as
        it may. Raises NotAllowedError."""
        rights = (Right.OBSERVE,)
        caller = self._access.require(context, rights, name or None)
        return lambda model: self._access.allows(caller, rights, model)

    async def _until_changed(self, seen: int) -> None:
        """Wait until there are changes, the coordinator stops, or a pull may have fallen silent."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                while self._board.changes.latest == seen and not self._stopped.is_set():
                    await self._pulls_changed.wait()
        await asyncio.sleep(INTERVAL_S)

    def _pulls_have_changed(self) -> None:
        """Wake every watch."""
        was, self._pulls_changed = self._pulls_changed, asyncio.Event()
        was.set()

    async def ListRates(
        self, request: pb.ListRatesRequest, context: Any
    ) -> AsyncIterator[pb.ListRatesResponse]:
        self._access.require(context, (Right.OBSERVE, Right.PULL))
        if len(request.source_hosts) > _MAX_SOURCE_HOSTS:
            raise PeerProtocolError(f"more than {_MAX_SOURCE_HOSTS} hosts")
        rates = [
            pb.Rate(
                source_host=rate.source_host,
                host=rate.host,
                gb_per_s=rate.gb_per_s,
                age_s=rate.age_s,
            )
            for rate in self._board.rates.listed(self._now(), set(request.source_hosts))
        ]
        for page in pages_of(rates):
            yield pb.ListRatesResponse(rates=page)

    def pulls_by_phase(self) -> Counter[str]:
        """Return how many pulls run, or ended lately, by phase."""
        return Counter(each.phase.value for each in self._board.pulls(self._now()))

    async def ListPulls(
        self, request: pb.ListPullsRequest, context: Any
    ) -> AsyncIterator[pb.ListPullsResponse]:
        sees = self._observed_by(context, request.name)
        pulls = [p for p in self._board.pulls(self._now(), request.name) if sees(p.model.name)]
        for page in pages_of(map(pull_to_wire, pulls)):
            yield pb.ListPullsResponse(pulls=page)


async def _next(requests: AsyncIterator[pb.ProgressRequest]) -> pb.ProgressRequest | None:
    """Return the next message, or None at the end; PeerProtocolError if none comes in time."""
    try:
        async with asyncio.timeout(SILENT_S):
            return await anext(requests, None)
    except TimeoutError:
        raise PeerProtocolError(f"the pull has not reported for {SILENT_S:g} s") from None
