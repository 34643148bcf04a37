"""What a server does now and then: it makes room for connections, and logs what it left out."""

from __future__ import annotations

import asyncio
import logging

from mx.log import Throttle, event
from mx.runtime import in_thread
from mx.wire import descriptors
from mx.wire.descriptors import Connections

_log = logging.getLogger(__name__)
_EVERY_S = 0.2
_HINT = "raise this process's limit of descriptors (`ulimit -n`)"


class Upkeep:
    """Runs on the event loop from `start` to `stop`."""

    def __init__(self, port: int, connections: Connections, refusals: Throttle) -> None:
        """
        Args:
            port: Where the server listens; 0 for a unix socket.
            connections: Those of the server.
            refusals: What the server's log of refusals leaves out.
        """
        self._port = port
        self._connections = connections
        self._refusals = refusals
        self._crowded = Throttle()
        self._timer: asyncio.TimerHandle | None = None
        self._making_room: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_EVERY_S, self._tick)

    def stop(self) -> None:
        """End it. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._making_room is not None:
            self._making_room.cancel()

    def _tick(self) -> None:
        self.start()
        for cause, count in self._refusals.left_out():
            event(_log, "request.refused", **dict(cause), held_back=count)
        if self._port and descriptors.crowded() and self._making_room is None:
            self._making_room = asyncio.create_task(self._make_room(), name="mx-make-room")

    async def _make_room(self) -> None:
        try:
            busy = self._connections.busy()
            ended = await in_thread(descriptors.make_room, self._port, busy)
        finally:
            self._making_room = None
        held_back = self._crowded.passes(self._port) if ended is not None else None
        if ended is not None and held_back is not None:
            event(
                _log,
                "connections.crowded",
                level=logging.WARNING,
                used=ended.used,
                limit=ended.limit,
                ended=ended.count,
                mostly_from=ended.address,
                text=f"few descriptors are left; {_HINT}",
                **({"held_back": held_back} if held_back else {}),
            )
