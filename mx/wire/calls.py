"""The running calls of a server: what each address holds of them, and who takes no answer.

gRPC keeps an answer until the other end takes it, and a connection with such a call is not idle.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class _Unread:
    peer: str
    address: str
    nbytes: int
    since_s: float


class Calls:
    """The calls of one server, on its event loop. Connections are named as gRPC does ("peer")."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._of_peer: Counter[str] = Counter()
        self._of_address: Counter[str] = Counter()
        self._unread: dict[object, _Unread] = {}  # in the order in which they were sent
        self._unread_of: Counter[str] = Counter()

    @property
    def peers(self) -> frozenset[str]:
        """The connections that have running calls."""
        return frozenset(self._of_peer)

    def begin(self, context: Any) -> None:
        """Count a call until it ends.

        Raises:
            CapacityError: There are too many, in all or from its address.
        """
        peer = context.peer()
        address = address_of_peer(peer)
        _check("{} running calls", self._of_address, address, 1, MOST_CALLS, MOST_CALLS_OF_ADDRESS)
        self._of_peer[peer] += 1
        self._of_address[address] += 1

        def ended(_: object) -> None:
            _take(self._of_peer, peer, 1)
            _take(self._of_address, address, 1)

        context.add_done_callback(ended)

    def answers(self, context: Any, nbytes: int) -> None:
        """Count a call's last message until the call ends.

        Raises:
            CapacityError: Too many bytes have not been taken, in all or by its address.
        """
        token = self._sends(context, nbytes)
        context.add_done_callback(lambda _: self._sent(token))

    @contextmanager
    def sending(self, context: Any, nbytes: int) -> Iterator[None]:
        """Count a message while the block sends it.

        Raises:
            CapacityError: As `answers`.
        """
        token = self._sends(context, nbytes)
        try:
            yield
        finally:
            self._sent(token)

    def stuck(self) -> frozenset[str]:
        """Return the connections that have not taken some message for `UNREAD_S`."""
        found = set()
        for each in self._unread.values():
            if self._clock() - each.since_s < UNREAD_S:
                break
            found.add(each.peer)
        return frozenset(found)

    def greedy(self) -> frozenset[str]:
        """Return the connections that have very many calls, of addresses that have too."""
        addresses = {each for each, count in self._of_address.items() if count > _MANY_CALLS}
        if not addresses:
            return frozenset()
        many = (each for each, n in self._of_peer.items() if n > _MANY_CALLS_OF_CONNECTION)
        return frozenset(each for each in many if address_of_peer(each) in addresses)

    def _sends(self, context: Any, nbytes: int) -> object:
        peer = context.peer()
        address = address_of_peer(peer)
        most, most_of_address = MOST_UNREAD_BYTES, MOST_UNREAD_BYTES_OF_ADDRESS
        _check("{} of unread answers", self._unread_of, address, nbytes, most, most_of_address)
        token = object()
        self._unread[token] = _Unread(peer, address, nbytes, self._clock())
        self._unread_of[address] += nbytes
        return token

    def _sent(self, token: object) -> None:
        unread = self._unread.pop(token)
        _take(self._unread_of, unread.address, unread.nbytes)


def _check(
    what: str, counts: Counter[str], address: str, more: int, most: int, most_of_address: int
) -> None:
    for has, limit, whose in (
        (counts.total(), most, ""),
        (counts[address], most_of_address, f" of {address}"),
    ):
        if has + more > limit:
            number = format_bytes(limit) if limit >= MIB else str(limit)
            raise CapacityError(f"this process has {what.format(number)}{whose}, its limit")


def _take(counts: Counter[str], key: str, number: int) -> None:
    counts[key] -= number
    if not counts[key]:
        del counts[key]
