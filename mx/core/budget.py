"""What each principal may hold of what a process has: calls, bytes, names. Pure.

Of the units of a budget half is reserved, in equal shares for up to `PRINCIPALS` principals. The
rest is common, and one principal may hold half of it beyond its share. So what a few hold leaves
room for others, and one that is alone is not held to a small share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mx.errors import CapacityError
from mx.units import GIB, KIB, MIB, format_bytes

if TYPE_CHECKING:
    from mx.core.store import CountedKind, Store

#: For so many principals units are reserved.
PRINCIPALS = 64
#: The largest request: gRPC receives a message before it is asked for, however slowly it comes.
REQUEST_BYTES = 65 * KIB
#: The memory that `Limits` has its defaults for.
MEMORY_BYTES = GIB


@dataclass(frozen=True, slots=True)
class Limits:
    """The units of each budget of a coordinator or a source.

    `request_nbytes` is the largest request; `requests_nbytes` is for calls whose first one is
    incomplete, and `answers_nbytes` for answers that have not been taken.
    """

    request_nbytes: int = REQUEST_BYTES

    connections: int = 16_384
    calls: int = 16_384
    requests_nbytes: int = 48 * MIB
    answers_nbytes: int = 256 * MIB
    documents_nbytes: int = 384 * MIB
    models: int = 4096
    sources: int = 10_240
    registrations: int = 4096
    heartbeats: int = 10_240
    watches: int = 4096
    pulls: int = 4096
    nonces: int = 65_536

    @classmethod
    def of(cls, memory_nbytes: int, request_nbytes: int = 0) -> Limits:
        """Return the limits of a process that has so much memory for what clients cause, and takes
        requests of so many bytes; 0 for the defaults."""
        default, memory_nbytes = cls(), memory_nbytes or MEMORY_BYTES
        scaled = {
            name: max(1, getattr(default, name) * memory_nbytes // MEMORY_BYTES)
            for name in cls.__slots__
        }
        return cls(**scaled | {"request_nbytes": request_nbytes or REQUEST_BYTES})


@dataclass(frozen=True, slots=True)
class BudgetShares:
    """How many units there are, and what is whose."""

    units: int

    @property
    def reserved(self) -> int:
        """The units that are reserved for one principal."""
        return self.units // 2 // PRINCIPALS

    @property
    def common(self) -> int:
        """The units that are reserved for none."""
        return self.units - PRINCIPALS * self.reserved

    @property
    def most(self) -> int:
        """The most units of one principal."""
        return self.reserved + (self.common + 1) // 2

    def left(self, total: int, within: int) -> int:
        """Return how many common units are left.

        Args:
            total: The units that are held.
            within: Those of them that are within their holders' reserved shares.
        """
        return self.common - total + min(within, PRINCIPALS * self.reserved)


class Budget:
    """The units of one kind, and who holds them."""

    def __init__(self, units: int, what: str, show: Callable[[int], str] = str) -> None:
        """
        Args:
            units: How many there are.
            what: What a refusal says is held: "this process has {} running calls".
            show: Formats a number of units for that.
        """
        self.shares = BudgetShares(units)
        self._what = what
        self._show = show
        self._total = self._within = 0
        self._held: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """The units that are held."""
        return self._total

    def of(self, principal: str) -> int:
        """Return the units that a principal holds."""
        return self._held[principal]

    def fits(self, principal: str, more: int = 1) -> bool:
        """Return True if a principal may hold more units."""
        return not self._why_not(principal, more)

    def check(self, principal: str, more: int = 1) -> None:
        """Raise CapacityError if a principal may not hold more units."""
        if why := self._why_not(principal, more):
            raise CapacityError(why)

    def add(self, principal: str, more: int = 1) -> None:
        """Let a principal hold more units. Raises CapacityError if it may not."""
        self.check(principal, more)
        self.take(principal, more)

    def take(self, principal: str, more: int = 1) -> None:
        """Count units that a principal holds in any case; fewer, if `more` is negative."""
        held, reserved = self._held[principal], self.shares.reserved
        self._total += more
        self._within += min(held + more, reserved) - min(held, reserved)
        self._held[principal] = held + more
        if not self._held[principal]:
            del self._held[principal]

    @contextmanager
    def held(self, principal: str) -> Iterator[None]:
        """Hold a unit while the block runs. Raises CapacityError as `add`."""
        self.add(principal)
        try:
            yield
        finally:
            self.take(principal, -1)

    def _why_not(self, principal: str, more: int) -> str:
        held, shares = self.of(principal), self.shares
        if held + more > shares.most:
            what = self._what.format(self._show(shares.most))
            return f"{what} of {principal}, its limit for one principal"
        total = self.total
        if total + more > shares.common:  # else no count by principal is needed
            within = self._within_shares()
            left = shares.left(total, within)
            within += min(held + more, shares.reserved) - min(held, shares.reserved)
            if shares.left(total + more, within) < min(left, 0):
                return f"{self._what.format(self._show(total))}, its limit"
        return ""

    def _within_shares(self) -> int:
        return self._within


class StoredBudget(Budget):
    """A budget whose units are counted in a store, for all coordinators that share it."""

    def __init__(self, units: int, what: str, store: Store, kind: CountedKind) -> None:
        super().__init__(units, what)
        self._store = store
        self._kind = kind

    @property
    def total(self) -> int:
        return self._store.counted(self._kind, "")[0]

    def of(self, principal: str) -> int:
        return self._store.counted(self._kind, principal)[1]

    def take(self, principal: str, more: int = 1) -> None:
        self._store.count(self._kind, principal, more)

    def _within_shares(self) -> int:
        return self._store.counted_within(self._kind, self.shares.reserved)


def of_bytes(units: int, what: str) -> Budget:
    """Return a budget of bytes."""
    return Budget(units, what, format_bytes)
