"""Bounds on how many models and sources a coordinator keeps, in all and for one principal: the
address where there are no certificates. Pure."""

from __future__ import annotations

from mx.core.store import CountedKind, Store
from mx.errors import CapacityError


class Quota:
    """Counts things of a kind by the principal that they are of, in a store."""

    def __init__(
        self, store: Store, kind: CountedKind, what: str, *, limit: int, per_principal: int
    ) -> None:
        """
        Args:
            store: Where the counts are.
            kind: What is counted.
            what: The verb and the noun for refusals: "lists {} sources".
            limit: The most in all.
            per_principal: The most of one principal.
        """
        self._store = store
        self._kind = kind
        self._what = what
        self.limit = limit
        self._per_principal = per_principal

    def check(self, principal: str) -> None:
        """Raise CapacityError if there is no room for one more of this principal."""
        in_all, of_principal = self._store.counted(self._kind, principal)
        if in_all >= self.limit:
            raise CapacityError(f"the coordinator {self._what.format(in_all)}, its limit")
        if of_principal >= self._per_principal:
            raise CapacityError(
                f"the coordinator {self._what.format(of_principal)} from {principal}, its "
                "limit for one principal"
            )

    def add(self, principal: str) -> None:
        """Count one more of this principal."""
        self._store.count(self._kind, principal, 1)

    def remove(self, principal: str) -> None:
        """Count one less of this principal."""
        self._store.count(self._kind, principal, -1)
