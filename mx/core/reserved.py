"""Names that nothing is bound under any more, each kept for its last owner for a while. Pure."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from mx.core.bound_name import BoundName


@dataclass(frozen=True, slots=True)
class _Kept:
    name: BoundName  # without revisions
    until_s: float
    address: str


class Reserved:
    """The names, in the order in which they become free. `now` never goes back."""

    def __init__(self, *, grace_s: float, limit: int) -> None:
        """
        Args:
            grace_s: How long a name is kept.
            limit: The most names. Of more, the address that has the most loses its oldest one.
        """
        self._grace_s = grace_s
        self._limit = limit
        self._names: dict[str, _Kept] = {}
        self._count: Counter[str] = Counter()  # by address

    @property
    def due_s(self) -> float:
        """When the next name becomes free."""
        return next((kept.until_s for kept in self._names.values()), math.inf)

    def get(self, name: str) -> BoundName | None:
        """Return a kept name, without revisions; None if it is not kept."""
        kept = self._names.get(name)
        return None if kept is None else kept.name

    def add(self, now: float, name: str, was: BoundName, address: str) -> list[str]:
        """Keep a name that nothing is bound under from now on.

        Args:
            now: The time.
            name: The name.
            was: What it was; it has an owner.
            address: Where its last weights were registered from.

        Returns:
            The names that are free because there are too many.
        """
        kept = BoundName(was.owner, was.issued_s)
        self._names[name] = _Kept(kept, now + self._grace_s, address)
        self._count[address] += 1
        freed = []
        while len(self._names) > self._limit:
            most = max(self._count, key=self._count.__getitem__)
            freed.append(next(n for n, kept in self._names.items() if kept.address == most))
            self.end(freed[-1])
        return freed

    def end(self, name: str) -> None:
        """Keep a name no longer. Does nothing if it is not kept."""
        kept = self._names.pop(name, None)
        if kept is None:
            return
        self._count[kept.address] -= 1
        if not self._count[kept.address]:
            del self._count[kept.address]

    def lapse(self, now: float) -> list[str]:
        """End the names whose time is over at `now`, and return them."""
        ended = []
        while self.due_s <= now:
            ended.append(next(iter(self._names)))
            self.end(ended[-1])
        return ended
