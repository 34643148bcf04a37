"""The part of the Coordinator service that shows the running pulls to users.

Progress is kept in this process's memory alone, whatever the state is kept in: after a restart
each pull reports again within a second. Coordinators that share a state tell each other.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from mx.codec import by_name
from mx.coordinator.callers import own_host, takes_requests
from mx.coordinator.paging import pages_of
from mx.coordinator.view import Views
from mx.core.budget import Budget
from mx.core.policy import Right
from mx.core.progress_board import MAX_PULLS
from mx.errors import PeerProtocolError
from mx.wire.principals import caller_of
from mx.wire.progress import pull_from_wire
from mx.wire.v1 import coordinator_pb2 as pb

_T = TypeVar("_T")

#: A pull reports each second; one that reports nothing for this long is stopped or gone.
SILENT_S = 30.0
#: How often pulls are looked for that have fallen silent.
_LOOK_S = 0.5
_MAX_SOURCE_HOSTS = 256


class PullsServicer:
    """The calls Progress and ListRates.

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
        self._stopped = asyncio.Event()
        #: The times until which requests of open streams are waited for.
        self._silences: set[asyncio.Timeout] = set()

    async def Progress(
        self, requests: AsyncIterator[pb.ProgressRequest], context: Any
    ) -> pb.ProgressResponse:
        reporter, caller, checked, measured = object(), caller_of(context), None, ""
        moves = False  # to another connection, or coordinator, which reports it further
        with self._reporting.held(caller.name):
            try:
                async for request in self._until_stopped(requests, SILENT_S):
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
            finally:
                self._board.end(self._now(), reporter, moves=moves or self._stopped.is_set())
        return pb.ProgressResponse()

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

    async def forget_silent(self) -> None:
        """Forget pulls as they fall silent, until cancelled: whatever the state waits for."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self._board.tick(self._now())

    def pulls_by_phase(self) -> Counter[str]:
        """Return how many pulls run, or ended lately, by phase."""
        return self._board.phases(self._now())

    async def _until_stopped(
        self, requests: AsyncIterator[_T], silent_s: float
    ) -> AsyncIterator[_T]:
        """Yield requests until the coordinator stops: gRPC logs an error for a stream that it has
        to cut.

        Args:
            requests: The requests.
            silent_s: For how long none may come.

        Raises:
            PeerProtocolError: None came for so long.
        """
        while not self._stopped.is_set():
            try:
                async with asyncio.timeout(silent_s) as silence:
                    self._silences.add(silence)
                    try:
                        request = await anext(requests, None)
                    finally:
                        self._silences.discard(silence)
            except TimeoutError:
                if self._stopped.is_set():
                    return
                raise PeerProtocolError(f"nothing came for {silent_s:g} s") from None
            if request is None:
                return
            yield request
