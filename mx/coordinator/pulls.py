"""The part of the Coordinator service that shows people which pulls there are.

Kept in this process's memory alone, whatever the state is kept in: after a restart each pull has
told again within a second.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from mx.coordinator.paging import pages_of
from mx.core.pulls import PullBoard
from mx.wire.progress import pull_from_wire, pull_to_wire
from mx.wire.v1 import coordinator_pb2 as pb


class PullsServicer:
    """Progress and ListPulls. `now` is the coordinator's clock, in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._board = PullBoard()

    async def Progress(
        self, requests: AsyncIterator[pb.ProgressRequest], context: Any
    ) -> pb.ProgressResponse:
        teller = object()
        try:
            async for request in requests:
                self._board.tell(self._now(), teller, pull_from_wire(request.pull))
        finally:
            self._board.end(self._now(), teller)
        return pb.ProgressResponse()

    async def ListPulls(
        self, request: pb.ListPullsRequest, context: Any
    ) -> AsyncIterator[pb.ListPullsResponse]:
        pulls = [pull_to_wire(status) for status in self._board.pulls(self._now(), request.name)]
        for page in pages_of(pulls):
            yield pb.ListPullsResponse(pulls=page)
