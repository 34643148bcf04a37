"""The bytes that a source has sent to each of its readers, by which swarms measure progress."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mx.transport import Sending

#: The most readers without grants whose totals are kept.
_MOST_ENDED = 4096

#: A source id, and the id that a reader of it gives itself.
_Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Grant:
    key: _Key
    address: str
    exposures: Sequence[Sending]  # those that send; none if the reader fetches for itself

    def sent(self, grant_id: str) -> int:
        return sum(exposure.sent_to(grant_id) for exposure in self.exposures)


class ReadCounts:
    """The counts of one process, used on the event loop alone.

    A reader is known by its id and by the address that its lease comes from.
    """

    def __init__(self) -> None:
        self._grants: dict[str, _Grant] = {}
        self._of: dict[_Key, set[str]] = {}  # a reader's grants
        self._ended: dict[_Key, Counter[str]] = {}  # bytes sent on ended grants, by address

    def opened(
        self, grant_id: str, source_id: str, address: str, name: str, exposures: Sequence[Sending]
    ) -> None:
        """Begin to count a grant.

        Args:
            grant_id: The grant.
            source_id: The source that it reads.
            address: The reader's address.
            name: The reader's id.
            exposures: The exposures of the grant that send.
        """
        grant = self._grants[grant_id] = _Grant((source_id, name), address, exposures)
        self._of.setdefault(grant.key, set()).add(grant_id)

    def closed(self, grant_id: str) -> None:
        """End a grant. Call this before its tickets are revoked. Idempotent."""
        grant = self._grants.pop(grant_id, None)
        if grant is None:
            return
        self._of[grant.key].remove(grant_id)
        if not self._of[grant.key]:
            del self._of[grant.key]
        if sent := grant.sent(grant_id):
            ended = self._ended.pop(grant.key, Counter())  # moves the entry to the end
            ended[grant.address] += sent
            self._ended[grant.key] = ended
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
        for grant_id in self._of.get((source_id, name), ()):
            grant = self._grants[grant_id]
            if address in ("", grant.address):
                if not grant.exposures:
                    return None
                total += grant.sent(grant_id)
        return total
