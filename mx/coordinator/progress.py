"""The part of the Coordinator service that shows the running pulls to users.

Progress is kept in this process's memory alone, whatever the state is kept in: after a restart
each pull reports again within a second. Coordinators that share a state tell each other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from mx.codec import by_name
from mx.coordinator.callers import own_host, takes_requests
from mx.coordinator.paging import pages_of
from mx.coordinator.view import Views
from mx.coordinator.watchers import INTERVAL_S
from mx.core.budget import Budget
from mx.core.policy import Right
from mx.core.progress_board import MAX_PULLS
from mx.errors import ClosedError, PeerProtocolError
from mx.wire.principals import caller_of, payer_of
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
        views: What callers may see; and the pulls.
    """

    def __init__(self, views: Views) -> None:
        self._access = views.access
        self._view = views.of
        self._board = views.board
        self._now = views.state.now
        limits = views.state.limits
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
        reporter, caller, checked, measured = object(), caller_of(context), None, ""
        moves = False  # to another connection, which reports it further
        with self._reporting.held(caller.name):
            try:
                while (request := await _next(requests)) is not None:
                    status, view = pull_from_wire(request.pull), self._view(context)
                    name = status.model.name
                    if checked != (now := (self._access.version, status.pull_id, name)):
                        moves = True
                        self._access.check_connection(context)
                        moves = False
                        caller = view.require((Right.PULL,), name, action="report")
                        # Ids of sources are known to all: what reports as one is taken for it.
                        await view.check_free(status.pull_id)
                        checked = now
                    measured = measured or view.measured(caller, status)
                    status = status._replace(measured_host=measured)
                    if status.requests_port:
                        allowed = takes_requests(self._access, caller, name)
                        host = own_host(context, status.requests_host) if allowed else ""
                        port = status.requests_port if host else 0
                        status = status._replace(requests_host=host, requests_port=port)
                    self._board.report(self._now(), reporter, status, caller.name)
                    self._pulls_have_changed()
            finally:
                self._board.end(self._now(), reporter, moves=moves)
                self._pulls_have_changed()
        return pb.ProgressResponse()

    async def WatchPulls(
        self, request: pb.WatchPullsRequest, context: Any
    ) -> AsyncIterator[pb.WatchPullsResponse]:
        with self._watching_pulls.held(payer_of(context)):
            watch, is_first = self._view(context).pull_watch(request.name), True
            while not self._stopped.is_set():
                found, gone = watch.take()
                # One page at a time: a watch that is read slowly holds no more messages.
                for page in pages_of(map(pull_to_wire, found), _WATCH_BYTES):
                    if page:
                        yield pb.WatchPullsResponse(pulls=page)
                if gone or is_first:
                    yield pb.WatchPullsResponse(gone=gone, snapshot_end=is_first)
                is_first = False
                await self._until_changed(watch.seen)
        raise ClosedError("the coordinator is shutting down")

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
        if len(request.source_hosts) > _MAX_SOURCE_HOSTS:
            raise PeerProtocolError(f"more than {_MAX_SOURCE_HOSTS} hosts")
        rates = [
            by_name(pb.Rate, rate) for rate in self._view(context).rates(set(request.source_hosts))
        ]
        for page in pages_of(rates):
            yield pb.ListRatesResponse(rates=page)

    def pulls_by_phase(self) -> Counter[str]:
        """Return how many pulls run, or ended lately, by phase."""
        return self._board.phases(self._now())

    async def ListPulls(
        self, request: pb.ListPullsRequest, context: Any
    ) -> AsyncIterator[pb.ListPullsResponse]:
        for page in pages_of(map(pull_to_wire, self._view(context).pulls(request.name))):
            yield pb.ListPullsResponse(pulls=page)


async def _next(requests: AsyncIterator[pb.ProgressRequest]) -> pb.ProgressRequest | None:
    """Return the next message, or None at the end; PeerProtocolError if none comes in time."""
    try:
        async with asyncio.timeout(SILENT_S):
            return await anext(requests, None)
    except TimeoutError:
        raise PeerProtocolError(f"the pull has not reported for {SILENT_S:g} s") from None
