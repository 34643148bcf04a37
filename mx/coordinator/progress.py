"""The part of the Coordinator service that shows the running pulls to users.

Progress is kept in this process's memory alone, whatever the state is kept in: after a restart
each pull reports again within a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from mx.coordinator.bounds import StreamBounds
from mx.coordinator.paging import pages_of
from mx.core.progress import MAX_PULLS, ProgressBoard
from mx.errors import PeerProtocolError
from mx.wire.progress import pull_from_wire, pull_to_wire
from mx.wire.v1 import coordinator_pb2 as pb

#: A pull reports each second; one that reports nothing for this long is stopped or gone.
SILENT_S = 30.0


class PullsServicer:
    """The calls Progress and ListPulls. `now` is the coordinator's clock, in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._board = ProgressBoard()
        self._reporting = StreamBounds("pulls that report", in_all=MAX_PULLS, per_address=2048)

    async def Progress(
        self, requests: AsyncIterator[pb.ProgressRequest], context: Any
    ) -> pb.ProgressResponse:
        reporter = object()
        with self._reporting.admitted(context):
            try:
                while (request := await _next(requests)) is not None:
                    self._board.report(self._now(), reporter, pull_from_wire(request.pull))
            finally:
                self._board.end(self._now(), reporter)
        return pb.ProgressResponse()

    async def ListPulls(
        self, request: pb.ListPullsRequest, context: Any
    ) -> AsyncIterator[pb.ListPullsResponse]:
        pulls = [pull_to_wire(status) for status in self._board.pulls(self._now(), request.name)]
        for page in pages_of(pulls):
            yield pb.ListPullsResponse(pulls=page)


async def _next(requests: AsyncIterator[pb.ProgressRequest]) -> pb.ProgressRequest | None:
    """Return the next message, or None at the end; PeerProtocolError if none comes in time."""
    try:
        async with asyncio.timeout(SILENT_S):
            return await anext(requests, None)
    except TimeoutError:
        raise PeerProtocolError(f"the pull has not reported for {SILENT_S:g} s") from None
