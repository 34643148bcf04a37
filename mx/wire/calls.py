"""The running calls of a server: what each address holds of them, and who takes no answer.

gRPC keeps an answer until the other end takes it, and a connection with such a call is not idle.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from mx.errors import CapacityError
from mx.units import MIB, format_bytes
from mx.wire.address import address_of_peer

#: The most calls that run at a time, in all and of one address.
MOST_CALLS = 32_768
MOST_CALLS_OF_ADDRESS = 16_384
#: Of an address with so many calls, connections with more than so many are ended: gRPC would
#: cancel calls of others, too, once more than 16,384 wait for the event loop.
_MANY_CALLS = 2048
_MANY_CALLS_OF_CONNECTION = 128
#: The most bytes of answers that have not been taken yet, in all and of one address.
MOST_UNREAD_BYTES = 256 * MIB
MOST_UNREAD_BYTES_OF_ADDRESS = 64 * MIB
#: A connection that does not take a message for this long is ended.
UNREAD_S = 60.0


class _AddressQuota:
    """Counts by address. `what` names what is counted in a refusal: "{} running calls"."""

    def __init__(self, what: str, most: int, most_of_address: int) -> None:
        self._what = what
        self._most = most
        self._most_of_address = most_of_address
        self._total = 0
        self.of: Counter[str] = Counter()

    def add(self, address: str, more: int) -> None:
        """Count more. Raises CapacityError if that is too many, in all or of the address."""
        for has, limit, whose in (
            (self._total, self._most, ""),
            (self.of[address], self._most_of_address, f" of {address}"),
        ):
            if has + more > limit:
                number = format_bytes(limit) if limit >= MIB else str(limit)
                raise CapacityError(
                    f"this process has {self._what.format(number)}{whose}, its limit"
                )
        self._total += more
        self.of[address] += more

    def take(self, address: str, fewer: int) -> None:
        self._total -= fewer
        _take(self.of, address, fewer)


class Calls:
    """The calls of one server, on its event loop. Connections are named as gRPC does ("peer")."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.running = _AddressQuota("{} running calls", MOST_CALLS, MOST_CALLS_OF_ADDRESS)
        self.unread_nbytes = _AddressQuota(
            "{} of unread answers", MOST_UNREAD_BYTES, MOST_UNREAD_BYTES_OF_ADDRESS
        )
        #: The calls with an answer that has not been taken, in the order in which they were sent.
        self.unread: dict[ServerCall, None] = {}
        self._of_peer: Counter[str] = Counter()

    @property
    def peers(self) -> frozenset[str]:
        """The connections that have running calls."""
        return frozenset(self._of_peer)

    def begin(self, context: Any) -> ServerCall:
        """Count a call until it ends, and return it.

        Raises:
            CapacityError: There are too many, in all or from its address.
        """
        peer = context.peer()
        call = ServerCall(self, peer, address_of_peer(peer))
        self.running.add(call.address, 1)
        self._of_peer[peer] += 1

        def ended(_: object) -> None:
            call.sent()
            _take(self._of_peer, peer, 1)
            self.running.take(call.address, 1)

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
        """Return the connections that have very many calls, of addresses that have too."""
        addresses = {each for each, count in self.running.of.items() if count > _MANY_CALLS}
        if not addresses:
            return frozenset()
        many = (each for each, n in self._of_peer.items() if n > _MANY_CALLS_OF_CONNECTION)
        return frozenset(each for each in many if address_of_peer(each) in addresses)


class ServerCall:
    """One running call, which sends one message at a time."""

    __slots__ = ("_calls", "_nbytes", "address", "peer", "since_s")

    def __init__(self, calls: Calls, peer: str, address: str) -> None:
        self._calls = calls
        self._nbytes = 0
        self.peer = peer
        self.address = address
        #: When its unread message was sent.
        self.since_s = 0.0

    def sends(self, nbytes: int) -> None:
        """Count a message until `sent`, or the call's end.

        Raises:
            CapacityError: Too many bytes have not been taken, in all or by the call's address.
        """
        self._calls.unread_nbytes.add(self.address, nbytes)
        self._nbytes = nbytes
        self.since_s = self._calls.clock()
        self._calls.unread[self] = None

    def sent(self) -> None:
        """Record that the message was taken. Idempotent."""
        if self in self._calls.unread:
            del self._calls.unread[self]
            self._calls.unread_nbytes.take(self.address, self._nbytes)


def _take(counts: Counter[str], key: str, number: int) -> None:
    counts[key] -= number
    if not counts[key]:
        del counts[key]
