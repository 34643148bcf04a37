"""The running calls of a server: what each principal holds of them, and who takes no answer.

gRPC takes in a request before it is asked for, and keeps an answer until the other end takes it; a
connection with such a call is not idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mx.core.budget import Budget, Limits, of_bytes
from mx.errors import NotAllowedError
from mx.wire.address import address_of_peer

#: Of a principal with so many calls, connections with more than so many are ended: gRPC would
#: cancel calls of others, too, once more than 16,384 wait for the event loop.
_MANY_CALLS = 2048
_MANY_CALLS_OF_CONNECTION = 64
#: A connection that does not take a message for this long is ended.
UNREAD_S = 60.0
#: A first message that is complete needs less than this to be seen here, however busy the loop is.
_COMPLETE_S = 0.5
#: A connection that has had so many incomplete messages, or that goes on for so many calls though
#: it may do nothing here, is ended.
_MOST_FAULTS = 16
_MOST_REMEMBERED = 4096
#: So long gRPC may go on to tell of a connection's calls once it is ended.
_ENDING_S = 5.0


@dataclass(slots=True)
class _BusyConnection:
    """One that has running calls. `completed` says that a request of them was complete."""

    principal: str
    calls: int = 0
    completed: bool = False


class Calls:
    """The calls of one server, on its event loop. Connections are named as gRPC does ("peer")."""

    def __init__(
        self, limits: Limits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            limits: What clients may have.
            clock: A monotonic clock, in seconds.
        """
        limits = limits or Limits()
        self.clock = clock
        self.running = Budget(limits.calls, "this process has {} running calls")
        self.connections = Budget(limits.connections, "this process has {} connections with calls")
        self.unread_nbytes = of_bytes(
            limits.answers_nbytes, "this process has {} of unread answers"
        )
        self.incomplete = Budget(
            limits.requests_nbytes // limits.request_nbytes,
            "this process has {} incomplete requests",
        )
        #: The calls with an answer that has not been taken, in the order in which they were sent.
        self.unread: dict[ServerCall, None] = {}
        self._faults: dict[str, int] = {}  # by connection, the latest last
        self._faulty: set[str] = set()
        self._ended: dict[str, float] = {}  # when they were last `faulty`
        self._flooding: set[str] = set()
        #: Called when there are `faulty` connections.
        self.on_faulty: Callable[[], None] = lambda: None
        self._incomplete: dict[str, dict[ServerCall, None]] = {}  # by principal, in order
        self._of_peer: dict[str, _BusyConnection] = {}

    @property
    def peers(self) -> frozenset[str]:
        """The connections that have running calls."""
        return frozenset(self._of_peer)

    def begin(self, context: Any) -> ServerCall:
        """Count a call until it ends, and return it. Its first message is not complete yet.

        Raises:
            CapacityError: There are too many, in all or from its principal.
            CancelledError: Its connection is being ended: calls of it are still told.
        """
        peer = context.peer()
        if self.clock() - self._ended.get(peer, -math.inf) < _ENDING_S:
            raise asyncio.CancelledError  # its status could not be sent
        connection = self._of_peer.get(peer) or _BusyConnection(_payer_of(context))
        call = ServerCall(self, peer, connection.principal)
        self.running.check(call.principal)
        if not connection.calls:
            self.connections.check(call.principal)
        self._await(call)
        if not connection.calls:
            self.connections.take(call.principal)
            self._of_peer[peer] = connection
        self.running.take(call.principal)
        connection.calls += 1

        def ended(_: object) -> None:
            call.sent()
            self.complete(call)
            self.running.take(call.principal, -1)
            connection.calls -= 1
            if not connection.calls:
                self.connections.take(call.principal, -1)
                del self._of_peer[peer]

        context.add_done_callback(ended)
        return call

    def stuck(self) -> frozenset[str]:
        """Return the connections that have not taken some message for `UNREAD_S`."""
        found = set()
        for call in self.unread:
            if self.clock() - call.since_s < UNREAD_S:
                break
            found.add(call.peer)
        return frozenset(found)

    def greedy(self) -> frozenset[str]:
        """Return the connections that have very many calls, of principals that have too."""
        if self.running.total <= _MANY_CALLS:
            return frozenset()
        return frozenset(
            peer
            for peer, each in self._of_peer.items()
            if each.calls > _MANY_CALLS_OF_CONNECTION
            and self.running.of(each.principal) > _MANY_CALLS
        )

    def faulty(self) -> frozenset[str]:
        """Return the connections that go on with calls that are ended for what they are."""
        found, self._faulty = frozenset(self._faulty), set()
        for peer in found:
            self._ended[peer] = self.clock()
        while len(self._ended) > _MOST_REMEMBERED:
            del self._ended[next(iter(self._ended))]
        return found

    def flooding(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the addresses from which too many incomplete requests have come since the last
        call, and those of all connections that have completed one."""
        found, self._flooding = frozenset(self._flooding), set()
        return found, frozenset(peer for peer, each in self._of_peer.items() if each.completed)

    def fault(self, peer: str) -> None:
        """Record that a call was ended for what it is."""
        count = self._faults.pop(peer, 0) + 1
        if count >= _MOST_FAULTS:
            self._end_soon(peer)
            return
        self._faults[peer] = count
        if len(self._faults) > _MOST_REMEMBERED:
            del self._faults[next(iter(self._faults))]

    def _blame(self, call: ServerCall) -> None:
        """End the connections that have the most of a principal's incomplete requests, of which it
        has too many: gRPC goes on to take in what they send."""
        self.fault(call.peer)
        counts = Counter(each.peer for each in self._incomplete.get(call.principal, ()))
        for peer, count in counts.items():
            if count >= _MOST_FAULTS:
                self._flooding.add(address_of_peer(peer))
                self._end_soon(peer)

    def _end_soon(self, peer: str) -> None:
        self._faulty.add(peer)
        self.on_faulty()

    def _await(self, call: ServerCall) -> None:
        """Count the memory of a call whose first message is not complete. Old ones give way: of its
        principal, or of the one that has most. Raises CapacityError if there are none."""
        budget = self.incomplete
        while not budget.fits(call.principal):
            most = max(self._incomplete, key=lambda each: len(self._incomplete[each]), default="")
            for principal in (call.principal, most):
                oldest = next(iter(self._incomplete.get(principal, ())), None)
                if oldest is not None and call.since_s - oldest.since_s >= _COMPLETE_S:
                    oldest.give_way()
                    break
            else:
                self._blame(call)
                budget.check(call.principal)
        budget.take(call.principal)
        self._incomplete.setdefault(call.principal, {})[call] = None

    def complete(self, call: ServerCall) -> None:
        """Count a call's first message no longer. Idempotent."""
        waiting = self._incomplete.get(call.principal, {})
        if call.is_complete and (connection := self._of_peer.get(call.peer)) is not None:
            connection.completed = True
        if call in waiting:
            del waiting[call]
            if not waiting:
                del self._incomplete[call.principal]
            self.incomplete.take(call.principal, -1)


class ServerCall:
    """One running call, which sends one message at a time."""

    __slots__ = (
        *("_calls", "_first", "_nbytes", "gives_way", "is_complete"),
        *("peer", "principal", "since_s"),
    )

    def __init__(self, calls: Calls, peer: str, principal: str) -> None:
        self._calls = calls
        self._nbytes = 0
        self._first: asyncio.Timeout | None = None
        self.gives_way = self.is_complete = False
        self.peer = peer
        self.principal = principal
        #: When it began; later when its unread message was sent.
        self.since_s = calls.clock()

    def awaits(self, first: asyncio.Timeout) -> None:
        """Record what ends the wait for its first message."""
        self._first = first
        if self.gives_way:
            first.reschedule(0.0)

    def completed(self) -> None:
        """Record that its first message has come. Idempotent."""
        self._first = None
        self.is_complete = True
        self._calls.complete(self)

    def give_way(self) -> None:
        """End it, since others need the memory of its first message."""
        self.gives_way = True
        self._calls.complete(self)
        self._calls.fault(self.peer)
        if self._first is not None:
            self._first.reschedule(asyncio.get_running_loop().time())

    def refused(self) -> None:
        """Record that its caller may do nothing here."""
        self._calls.fault(self.peer)

    def sends(self, nbytes: int) -> None:
        """Count a message until `sent`, or the call's end.

        Raises:
            CapacityError: Too many bytes have not been taken, in all or by the call's principal.
        """
        self._calls.unread_nbytes.add(self.principal, nbytes)
        self._nbytes = nbytes
        self.since_s = self._calls.clock()
        self._calls.unread[self] = None

    def sent(self) -> None:
        """Record that the message was taken. Idempotent."""
        if self in self._calls.unread:
            del self._calls.unread[self]
            self._calls.unread_nbytes.take(self.principal, -self._nbytes)


def _payer_of(context: Any) -> str:
    """Return whom a connection's calls are counted for: its principal, else its address."""
    if "x509_pem_cert" in context.auth_context():
        from mx.wire.principals import payer_of  # without TLS it is not needed

        with contextlib.suppress(NotAllowedError):  # which its call is refused with
            return payer_of(context)
    return address_of_peer(context.peer())
