"""Documents by content digest, reference-counted by the bindings and sources that name them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from mx.core.budget import Limits, of_bytes
from mx.core.store import Store


class Documents:
    """The documents in a store, and who pays for them. Not thread-safe; `now` is in seconds.

    Holders and payers follow from what is listed and bound: its owner reports each (`hold`,
    `release`).

    A document is dropped `grace_s` after the last binding or source that names it is gone.
    A budget bounds the documents and the reservations together. An address pays for what it
    reserves and for the documents that it has put; once none of its sources holds a document any
    more, another address whose sources do pays for it.
    """

    def __init__(
        self,
        store: Store,
        *,
        limit_nbytes: int = Limits().documents_nbytes,
        grace_s: float = 60.0,
    ) -> None:
        """
        Args:
            store: Where the documents are.
            limit_nbytes: The most bytes of documents and reservations together.
            grace_s: How long a document outlives its last holder.
        """
        self.grace_s = grace_s
        self._store = store
        self._budget = of_bytes(limit_nbytes, "the coordinator holds {} of documents")
        self._nbytes: dict[bytes, int] = {}
        self._payers: dict[bytes, str] = {}
        # Of each document that is held, the number of holders by address; "" for bindings.
        self._holders: dict[bytes, Counter[str]] = {}
        self._drop_at: dict[bytes, float] = {}  # only documents without a holder
        self._due = math.inf
        self._claimed: Counter[bytes] = Counter()  # by registrations that are under way

    def begin(self, now: float) -> None:
        """Begin with the documents that the store has, without a holder. Reservations stay."""
        self.adopt(self._store.documents())
        self._holders.clear()
        for digest in self._nbytes:
            self._schedule(now, digest)

    def adopt(self, documents: Iterable[tuple[bytes, int]], address: str = "") -> None:
        """Let an address pay for documents that another coordinator has put into the store.

        Args:
            documents: The digest and the size of each; those that are known are left out.
            address: Who pays.
        """
        for digest, nbytes in documents:
            if digest not in self._nbytes:
                self._nbytes[digest], self._payers[digest] = nbytes, address
                self._budget.take(address, nbytes)

    def __len__(self) -> int:
        return len(self._nbytes)

    def get(self, digest: bytes) -> bytes | None:
        """Return the document, or None if it is not here."""
        return self._store.document(digest)

    @property
    def used_nbytes(self) -> int:
        """The bytes of documents and reservations together."""
        return self._budget.total

    def used_by(self, address: str) -> int:
        """Return the bytes of documents and reservations that an address pays for."""
        return self._budget.of(address)

    def keep(self, now: float, digest: bytes, address: str = "") -> bool:
        """Return True if the document is here.

        It then stays for at least `grace_s`, and `address` pays for it if nothing holds it; unless
        that would exceed the share of `address`.
        """
        if digest not in self._nbytes or self._store.document(digest) is None:
            return False
        if digest in self._drop_at and self._pays_for(digest, address):
            self._drop_at[digest] = now + self.grace_s
        return True

    def reserve(self, nbytes: int, address: str = "") -> None:
        """Reserve space for a document that is being uploaded; `unreserve` returns it.

        Args:
            nbytes: The space.
            address: Who uploads.

        Raises:
            CapacityError: The documents would exceed the limit, or what one address may have.
        """
        self._budget.add(address, nbytes)

    def unreserve(self, nbytes: int, address: str = "") -> None:
        """Return space that `reserve` reserved."""
        self._budget.take(address, -nbytes)

    def put(self, now: float, digest: bytes, data: bytes, address: str = "") -> None:
        """Store a document whose digest the caller has verified.

        The caller returns its own reservation first.

        Raises:
            CapacityError: As `reserve`.
        """
        if digest not in self._nbytes:
            self.reserve(len(data), address)
            self._store.put_document(digest, data)
            self._nbytes[digest], self._payers[digest] = len(data), address
            self._schedule(now, digest)
        elif self._store.document(digest) is None:
            self._store.put_document(digest, data)

    def claim(self, digests: Iterable[bytes]) -> None:
        """Drop none of these documents until `unclaim`."""
        self._claimed.update(digests)

    def unclaim(self, now: float, digests: Iterable[bytes]) -> None:
        """End `claim`. Those that nothing holds stay for `grace_s`."""
        for digest in digests:
            self._claimed[digest] -= 1
            if not self._claimed[digest]:
                del self._claimed[digest]
            if digest in self._drop_at:
                self._schedule(now, digest)

    def discard(self, digests: Iterable[bytes]) -> None:
        """Drop those of these documents at once that nothing names."""
        for digest in digests:
            if digest in self._drop_at and digest not in self._claimed:
                self._drop(digest)

    def hold(self, digests: Iterable[bytes], address: str = "") -> None:
        """Count one more binding, or one more source of `address`, that names these documents."""
        for digest in set(digests):
            self._holders.setdefault(digest, Counter())[address] += 1
            self._drop_at.pop(digest, None)

    def release(self, now: float, digests: Iterable[bytes], address: str = "") -> None:
        """Count one holder less: as `hold`."""
        for digest in set(digests):
            holders = self._holders[digest]
            holders[address] -= 1
            if not holders[address]:
                del holders[address]
            if not holders:
                del self._holders[digest]
                self._schedule(now, digest)
            elif self._payers[digest] not in holders:
                self._let_another_pay(digest, holders)

    def sweep(self, now: float) -> None:
        """Drop the documents that had no holder for `grace_s`. Cheap while nothing is due."""
        if now < self._due:
            return
        for digest in [
            d for d, at in self._drop_at.items() if at <= now and d not in self._claimed
        ]:
            self._drop(digest)
        self._due = min(self._drop_at.values(), default=math.inf)

    def _schedule(self, now: float, digest: bytes) -> None:
        self._drop_at[digest] = now + self.grace_s
        self._due = min(self._due, now + self.grace_s)

    def _drop(self, digest: bytes) -> None:
        del self._drop_at[digest]
        self._store.drop_document(digest)
        self._budget.take(self._payers.pop(digest), -self._nbytes.pop(digest))

    def _pays_for(self, digest: bytes, address: str) -> bool:
        """Let an address pay for a document. Return False if its share is too small for that."""
        if self._payers[digest] != address:
            nbytes, before = self._nbytes[digest], self._payers[digest]
            self._budget.take(before, -nbytes)
            fits = self._budget.fits(address, nbytes)
            self._budget.take(address if fits else before, nbytes)
            if not fits:
                return False
            self._payers[digest] = address
        return True

    def _let_another_pay(self, digest: bytes, holders: Iterable[str]) -> None:
        """Let the first holder pay whose share suffices; else all stays as it is."""
        any(address and self._pays_for(digest, address) for address in holders)
