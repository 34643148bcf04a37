"""Readers' leases as a source sees them: who may read, until when, and when draining is over."""

from __future__ import annotations

from dataclasses import dataclass

#: A reader counts its lease from before its request was sent, the source from when it answered;
#: the source waits this much longer still, for clocks that run at slightly different rates.
MARGIN_S = 0.5


@dataclass(slots=True)
class ReaderLease:
    grant_id: str
    source_id: str
    generation: int
    reader: str
    ends_at_s: float


class LeaseBook:
    """All leases of one process. Pure: `now_s` is a monotonic time that the caller gives."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._leases: dict[str, ReaderLease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def open(
        self, grant_id: str, source_id: str, generation: int, reader: str, now_s: float
    ) -> ReaderLease:
        if grant_id in self._leases:
            raise ValueError(f"grant {grant_id} is open already")
        lease = ReaderLease(
            grant_id, source_id, generation, reader, now_s + self.lease_s + MARGIN_S
        )
        self._leases[grant_id] = lease
        return lease

    def renew(self, grant_id: str, now_s: float) -> bool:
        """False: the lease has ended, or was never there; the reader has to open again."""
        lease = self._leases.get(grant_id)
        if lease is None or lease.ends_at_s <= now_s:
            return False
        lease.ends_at_s = now_s + self.lease_s + MARGIN_S
        return True

    def close(self, grant_id: str) -> bool:
        return self._leases.pop(grant_id, None) is not None

    def expire(self, now_s: float) -> list[ReaderLease]:
        """Take out and return every lease that has ended."""
        ended = [lease for lease in self._leases.values() if lease.ends_at_s <= now_s]
        for lease in ended:
            del self._leases[lease.grant_id]
        return ended

    def of_source(self, source_id: str) -> list[ReaderLease]:
        return [lease for lease in self._leases.values() if lease.source_id == source_id]
