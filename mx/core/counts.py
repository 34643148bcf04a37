"""Bounds on how many models and sources a coordinator keeps, in all and for one address. Pure."""

from __future__ import annotations

from mx.core.store import Kind, Store
from mx.errors import CapacityError


class Quota:
    """Counts things of a kind by the address that they come from, in a store."""

    def __init__(
        self, store: Store, kind: Kind, what: str, *, limit: int, per_address: int
    ) -> None:
        """
        Args:
            store: Where the counts are.
            kind: What is counted.
            what: The verb and the noun for refusals: "lists {} sources".
            limit: The most in all.
            per_address: The most from one address.
        """
        self._store = store
        self._kind = kind
        self._what = what
        self.limit = limit
        self._per_address = per_address

    def check(self, address: str) -> None:
        """Raise CapacityError if there is no room for one more from this address."""
        in_all, from_address = self._store.counted(self._kind, address)
        if in_all >= self.limit:
            raise CapacityError(f"the coordinator {self._what.format(in_all)}, its limit")
        if from_address >= self._per_address:
            raise CapacityError(
                f"the coordinator {self._what.format(from_address)} from {address}, its "
                "limit for one address"
            )

    def add(self, address: str) -> None:
        """Count one more from this address."""
        self._store.count(self._kind, address, 1)

    def remove(self, address: str) -> None:
        """Count one less from this address."""
        self._store.count(self._kind, address, -1)
