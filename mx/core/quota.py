"""A bound on how many things a coordinator keeps, in all and for one address. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from mx.errors import CapacityError


class Quota:
    """Counts things by the address that they come from. `limit` is the most in all."""

    def __init__(self, what: str, *, limit: int, per_address: int) -> None:
        """
        Args:
            what: The verb and the noun for refusals: "lists {} sources".
            limit: The most in all.
            per_address: The most from one address.
        """
        self._what = what
        self.limit = limit
        self._per_address = per_address
        self._count = 0
        self._from: Counter[str] = Counter()

    def check(self, address: str) -> None:
        """Raise CapacityError if there is no room for one more from this address."""
        if self._count >= self.limit:
            raise CapacityError(f"the coordinator {self._what.format(self._count)}, its limit")
        if self._from[address] >= self._per_address:
            raise CapacityError(
                f"the coordinator {self._what.format(self._from[address])} from {address}, its "
                "limit for one address"
            )

    def add(self, address: str) -> None:
        """Count one more from this address."""
        self._count += 1
        self._from[address] += 1

    def remove(self, address: str) -> None:
        """Count one less from this address."""
        self._count -= 1
        self._from[address] -= 1
        if not self._from[address]:
            del self._from[address]


def level_down(counts: Mapping[str, int], excess: int) -> dict[str, int]:
    """Return how many things each address gives up, so that `excess` are given up in all (or all
    there are) and those that have the most have as few as possible.

    Args:
        counts: How many things each address has.
        excess: How many are too many.

    Returns:
        The number for each address that gives up any.
    """
    ordered = sorted(counts.items(), key=lambda each: each[1], reverse=True)
    excess, total = min(excess, sum(counts.values())), 0
    if excess <= 0:
        return {}
    for place, (_, count) in enumerate(ordered, 1):
        total += count
        following = ordered[place][1] if place < len(ordered) else 0
        if total - place * following >= excess:
            break
    level, more = divmod(total - excess, place)  # the first `more` keep one more
    return {
        address: count - level - (number < more)
        for number, (address, count) in enumerate(ordered[:place])
        if count > level + (number < more)
    }
