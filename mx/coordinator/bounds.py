"""Bounds on the open streams of one kind, in all and of one principal."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

from mx.errors import CapacityError
from mx.wire.principals import payer_of


class PrincipalLocks:
    """A lock for each principal: what takes long is done once at a time for each of them, so that
    the many calls of one don't come before the one call of another."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, principal: str) -> asyncio.Lock:
        """Return the lock of a principal."""
        return self._locks.setdefault(principal, asyncio.Lock())


class StreamBounds:
    """Counts open streams. `what` names them in the refusal: "watches"."""

    def __init__(self, what: str, *, in_all: int, per_principal: int) -> None:
        self._what = what
        self._in_all = in_all
        self._per_principal = per_principal
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
            CapacityError: There are too many streams, in all or of the call's principal.
        """
        principal = payer_of(context)
        if self._count >= self._in_all:
            raise CapacityError(f"the coordinator has {self._in_all} {self._what}, its limit")
        if self._open[principal] >= self._per_principal:
            raise CapacityError(
                f"the coordinator has {self._per_principal} {self._what} of {principal}, "
                "its limit for one principal"
            )
        self._open[principal] += 1
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            self._open[principal] -= 1
            if not self._open[principal]:
                del self._open[principal]
