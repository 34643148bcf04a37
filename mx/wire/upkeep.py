"""What a server does now and then: it makes room for connections, and logs what it left out."""

from __future__ import annotations

import asyncio
import logging

from mx.log import Throttle, event
from mx.runtime import in_thread
from mx.wire.address import address_of_peer
from mx.wire.calls import UNREAD_S, Calls
from mx.wire.descriptors import AcceptedConnections, EndedConnections

_log = logging.getLogger(__name__)
_EVERY_S = 0.2
_HINT = "raise this process's limit of descriptors (`ulimit -n`)"


class Upkeep:
    """Runs on the event loop from `start` to `stop`."""

    def __init__(self, port: int, calls: Calls, refusals: Throttle) -> None:
        """
        Args:
            port: Where the server listens; 0 for a unix socket.
            calls: Those of the server.
            refusals: What the server's log of refusals leaves out.

        Raises:
            OSError: No descriptor is left.
        """
        self._connections = AcceptedConnections(port) if port else None
        self._calls = calls
        self._refusals = refusals
        self._ended = Throttle()
        self._timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._calls.on_faulty = self._look
        self._timer = asyncio.get_running_loop().call_later(_EVERY_S, self._tick)

    def stop(self) -> None:
        """End it. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ending is not None:
            self._ending.cancel()
        if self._connections is not None:
            self._connections.close()

    def _tick(self) -> None:
        self.start()
        for cause, count in self._refusals.left_out():
            fields = cause if isinstance(cause, tuple) else ()
            event(_log, "request.refused", **dict(fields), held_back=count)
        self._ended.left_out()
        self._look()

    def _look(self) -> None:
        connections, calls = self._connections, self._calls
        if connections is None or self._ending is not None:
            return
        bad = {
            "stuck": (calls.stuck(), f"a connection took no answer for {UNREAD_S:g} s"),
            "greedy": (calls.greedy(), "a connection had very many of the running calls"),
            "faulty": (calls.faulty(), "a connection went on with what is refused"),
        }
        if any(peers for peers, _ in bad.values()) or connections.crowded():
            ending = self._end(connections, bad)
            self._ending = asyncio.create_task(ending, name="mx-end-connections")

    async def _end(
        self, connections: AcceptedConnections, bad: dict[str, tuple[frozenset[str], str]]
    ) -> None:
        try:
            peers = frozenset[str]().union(*(found for found, _ in bad.values()))
            if peers:
                flooding, spared = self._calls.flooding()
                await in_thread(connections.end, peers, flooding, spared)
            for what, (found, text) in bad.items():
                self._say(found, what, text)
            ended = await in_thread(connections.make_room, self._calls.peers)
            if ended is not None:
                self._say_crowded(ended)
        finally:
            self._ending = None

    def _say(self, peers: frozenset[str], what: str, text: str) -> None:
        for address in sorted(set(map(address_of_peer, peers))):
            if self._ended.passes((what, address)) is not None:
                event(_log, f"connections.{what}", address=address, text=text)

    def _say_crowded(self, ended: EndedConnections) -> None:
        if self._ended.passes("crowded") is not None:
            event(
                _log,
                "connections.crowded",
                level=logging.WARNING,
                used=ended.used,
                limit=ended.limit,
                ended=ended.count,
                mostly_from=ended.address,
                text=f"few descriptors are left; {_HINT}",
            )
