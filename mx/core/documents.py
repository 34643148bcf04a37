"""Documents by content, counted: dropped a while after the last source that names them is gone."""

from __future__ import annotations

import math
from collections.abc import Iterable

from mx.errors import CapacityError
from mx.units import MIB, format_bytes


class DocumentStore:
    """Not thread-safe; `now` is in seconds. `limit_bytes` counts reservations too."""

    def __init__(self, *, limit_bytes: int = 512 * MIB, grace_s: float = 60.0) -> None:
        self.limit_bytes = limit_bytes
        self.grace_s = grace_s
        self.used_bytes = 0
        self._documents: dict[bytes, bytes] = {}
        self._holders: dict[bytes, int] = {}
        self._drop_at: dict[bytes, float] = {}  # only those that nobody holds
        self._due = math.inf

    def __len__(self) -> int:
        return len(self._documents)

    def get(self, digest: bytes) -> bytes | None:
        """The document, immutable, or None."""
        return self._documents.get(digest)

    def keep(self, now: float, digest: bytes) -> bool:
        """Is it here? If so it stays for `grace_s` at least."""
        if digest not in self._documents:
            return False
        if digest in self._drop_at:
            self._drop_at[digest] = now + self.grace_s
        return True

    def reserve(self, nbytes: int) -> None:
        """Room for a document that is on its way; given back with `unreserve`.

        Raises CapacityError.
        """
        if self.used_bytes + nbytes > self.limit_bytes:
            raise CapacityError(
                f"the coordinator holds {format_bytes(self.used_bytes)} of documents, and "
                f"{format_bytes(nbytes)} more would pass its limit"
            )
        self.used_bytes += nbytes

    def unreserve(self, nbytes: int) -> None:
        self.used_bytes -= nbytes

    def put(self, now: float, digest: bytes, data: bytes) -> None:
        """Take a verified document; its room was reserved, or CapacityError is raised."""
        if digest not in self._documents:
            self.reserve(len(data))
            self._documents[digest] = data
            self._schedule(now, digest)

    def discard(self, digests: Iterable[bytes]) -> None:
        """Drop these at once, unless somebody holds them."""
        for digest in digests:
            if self._drop_at.pop(digest, None) is not None:
                self.used_bytes -= len(self._documents.pop(digest))

    def hold(self, digests: Iterable[bytes]) -> None:
        """One more source names these."""
        for digest in set(digests):
            self._holders[digest] = self._holders.get(digest, 0) + 1
            self._drop_at.pop(digest, None)

    def release(self, now: float, digests: Iterable[bytes]) -> None:
        """One source less does."""
        for digest in set(digests):
            self._holders[digest] -= 1
            if not self._holders[digest]:
                del self._holders[digest]
                self._schedule(now, digest)

    def sweep(self, now: float) -> None:
        """Drop what nobody has held for `grace_s`. Cheap while nothing is due."""
        if now < self._due:
            return
        for digest in [d for d, at in self._drop_at.items() if at <= now]:
            del self._drop_at[digest]
            self.used_bytes -= len(self._documents.pop(digest))
        self._due = min(self._drop_at.values(), default=math.inf)

    def _schedule(self, now: float, digest: bytes) -> None:
        self._drop_at[digest] = now + self.grace_s
        self._due = min(self._due, now + self.grace_s)
