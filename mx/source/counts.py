"""The bytes that a source has sent to each of its readers, by which swarms measure progress."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mx.source.grants import ReaderGrant

#: The most readers without grants whose totals are kept.
_MOST_ENDED = 4096

#: A source id, and the id that a reader of it gives itself.
_Key = tuple[str, str]


class ReadCounts:
    """The counts of one process, used on the event loop alone.

    A reader is known by its id and by the address that its lease comes from.
    """

    def __init__(self) -> None:
        self._of: dict[_Key, set[ReaderGrant]] = {}  # a reader's grants
        self._ended: dict[_Key, Counter[str]] = {}  # bytes sent on ended grants, by address

    def opened(self, grant: ReaderGrant) -> None:
        """Begin to count a grant, unless its reader has no id."""
        if grant.principal.reader_id:
            self._of.setdefault(_key(grant), set()).add(grant)

    def closed(self, grant: ReaderGrant) -> None:
        """End a grant. Call this once, before its tickets are revoked."""
        if not grant.principal.reader_id:
            return
        key, address = _key(grant), grant.principal.address
        self._of[key].remove(grant)
        if not self._of[key]:
            del self._of[key]
        if sent := grant.sent():
            ended = self._ended.pop(key, Counter())  # moves the entry to the end
            ended[address] += sent
            self._ended[key] = ended
            while len(self._ended) > _MOST_ENDED:
                del self._ended[next(iter(self._ended))]

    def nbytes(self, source_id: str, name: str, address: str = "") -> int | None:
        """Return the bytes sent to a reader so far.

        Args:
            source_id: The source that it reads.
            name: The reader's id.
            address: Count only grants from this address; "" for all.

        Returns:
            The bytes, or None if the reader has a grant by which it fetches for itself, unseen.
        """
        ended = self._ended.get((source_id, name), Counter())
        total = ended[address] if address else ended.total()
        for grant in self._of.get((source_id, name), ()):
            if address in ("", grant.principal.address):
                if not grant.sending:
                    return None
                total += grant.sent()
        return total


def _key(grant: ReaderGrant) -> _Key:
    return grant.source_id, grant.principal.reader_id
