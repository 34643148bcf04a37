"""Bounds on the open streams of one kind, in all and from one address."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

from mx.errors import CapacityError
from mx.wire.address import address_of_peer


def address_of(context: Any) -> str:
    """Return a call's remote address without the port; of IPv6 the network (`address_of_peer`)."""
    return address_of_peer(context.peer())


class Turns:
    """A lock for each address: what takes long is done once at a time for each of them, so that
    the many calls of one don't come before the one call of another."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, address: str) -> asyncio.Lock:
        """Return the lock of an address."""
        return self._locks.setdefault(address, asyncio.Lock())


class StreamBounds:
    """Counts open streams. `what` names them in the refusal: "watches"."""

    def __init__(self, what: str, *, in_all: int, per_address: int) -> None:
        self._what = what
        self._in_all = in_all
        self._per_address = per_address
        self._open: Counter[str] = Counter()
        self._count = 0

    @property
    def count(self) -> int:
        """How many are open."""
        return self._count

    @contextmanager
    def admitted(self, context: Any) -> Iterator[None]:
        """Count one stream while the block runs.

        Raises:
            CapacityError: There are too many streams, in all or from the call's address.
        """
        address = address_of(context)
        if self._count >= self._in_all:
            raise CapacityError(f"the coordinator has {self._in_all} {self._what}, its limit")
        if self._open[address] >= self._per_address:
            raise CapacityError(
                f"the coordinator has {self._per_address} {self._what} from {address}, "
                "its limit for one address"
            )
        self._open[address] += 1
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            self._open[address] -= 1
            if not self._open[address]:
                del self._open[address]
