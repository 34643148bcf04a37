"""Documents by content digest, reference-counted by the bindings and sources that name them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from mx.errors import CapacityError
from mx.units import MIB, format_bytes


class DocumentStore:
    """The documents of one coordinator. Not thread-safe; `now` is in seconds.

    A document is dropped `grace_s` after the last binding or source that names it is gone.
    `limit_bytes` bounds the documents and the reservations together.
    """

    def __init__(self, *, limit_bytes: int = 512 * MIB, grace_s: float = 60.0) -> None:
        self.limit_bytes = limit_bytes
        self.grace_s = grace_s
        self.used_bytes = 0
        self._documents: dict[bytes, bytes] = {}
        self._holders: dict[bytes, int] = {}
        self._drop_at: dict[bytes, float] = {}  # only documents without a holder
        self._due = math.inf

    def __len__(self) -> int:
        return len(self._documents)

    def get(self, digest: bytes) -> bytes | None:
        """Return the document, or None if it is not here."""
        return self._documents.get(digest)

    def keep(self, now: float, digest: bytes) -> bool:
        """Return True if the document is here; it then stays for at least `grace_s`."""
        if digest not in self._documents:
            return False
        if digest in self._drop_at:
            self._drop_at[digest] = now + self.grace_s
        return True

    def reserve(self, nbytes: int) -> None:
        """Reserve space for a document that is being uploaded; `unreserve` returns it.

        Raises:
            CapacityError: The store would exceed `limit_bytes`.
        """
        if self.used_bytes + nbytes > self.limit_bytes:
            raise CapacityError(
                f"the coordinator holds {format_bytes(self.used_bytes)} of documents, and "
                f"{format_bytes(nbytes)} more would exceed its limit"
            )
        self.used_bytes += nbytes

    def unreserve(self, nbytes: int) -> None:
        """Return space that `reserve` reserved."""
        self.used_bytes -= nbytes

    def put(self, now: float, digest: bytes, data: bytes) -> None:
        """Store a document whose digest the caller has verified.

        The caller returns its own reservation first.

        Raises:
            CapacityError: The store would exceed `limit_bytes`.
        """
        if digest not in self._documents:
            self.reserve(len(data))
            self._documents[digest] = data
            self._schedule(now, digest)

    def discard(self, digests: Iterable[bytes]) -> None:
        """Drop those of these documents at once that nothing names."""
        for digest in digests:
            if self._drop_at.pop(digest, None) is not None:
                self.used_bytes -= len(self._documents.pop(digest))

    def hold(self, digests: Iterable[bytes]) -> None:
        """Count one more binding or source that names these documents."""
        for digest in set(digests):
            self._holders[digest] = self._holders.get(digest, 0) + 1
            self._drop_at.pop(digest, None)

    def release(self, now: float, digests: Iterable[bytes]) -> None:
        """Count one binding or source less that names these documents."""
        for digest in set(digests):
            self._holders[digest] -= 1
            if not self._holders[digest]:
                del self._holders[digest]
                self._schedule(now, digest)

    def sweep(self, now: float) -> None:
        """Drop the documents that had no holder for `grace_s`. Cheap while nothing is due."""
        if now < self._due:
            return
        for digest in [d for d, at in self._drop_at.items() if at <= now]:
            del self._drop_at[digest]
            self.used_bytes -= len(self._documents.pop(digest))
        self._due = min(self._drop_at.values(), default=math.inf)

    def _schedule(self, now: float, digest: bytes) -> None:
        self._drop_at[digest] = now + self.grace_s
        self._due = min(self._due, now + self.grace_s)
