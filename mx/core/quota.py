"""A bound on how many things a coordinator keeps, in all and for one address. Pure."""

from __future__ import annotations

from collections import Counter

from mx.errors import CapacityError


class Quota:
    """Counts things by the address that they come from."""

    def __init__(self, what: str, *, limit: int, per_address: int) -> None:
        """
        Args:
            what: The verb and the noun for refusals: "lists {} sources".
            limit: The most in all.
            per_address: The most from one address.
        """
        self._what = what
        self._limit = limit
        self._per_address = per_address
        self._count = 0
        self._from: Counter[str] = Counter()

    def check(self, address: str) -> None:
        """Raise CapacityError if there is no room for one more from this address."""
        if self._count >= self._limit:
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
