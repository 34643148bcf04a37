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
    """All leases of one process. Pure: `now_s` is a monotonic time that the caller gives.

    A lease that its reader gave back (`close`) is over. One whose reader was cut off (`lose`) is
    not: that reader may believe what it reads until the lease's end, so it is *out* until then,
    though nothing new is granted on it.
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._leases: dict[str, ReaderLease] = {}
        self._lost: dict[str, ReaderLease] = {}

    def __len__(self) -> int:
        """Those that run."""
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

    def find(self, grant_id: str) -> ReaderLease | None:
        """The lease of a grant, if it runs."""
        return self._leases.get(grant_id)

    def close(self, grant_id: str) -> bool:
        """Its reader believes nothing any more that it reads. False: it had ended before."""
        self._lost.pop(grant_id, None)
        return self._leases.pop(grant_id, None) is not None

    def lose(self, grant_id: str) -> None:
        """Its reader is not heard any more, or not listened to: it runs out by itself."""
        lease = self._leases.pop(grant_id, None)
        if lease is not None:
            self._lost[grant_id] = lease

    def expire(self, now_s: float) -> list[ReaderLease]:
        """Take out every lease that has ended; returns those of them that ran until now."""
        ended = [lease for lease in self._leases.values() if lease.ends_at_s <= now_s]
        for lease in ended:
            del self._leases[lease.grant_id]
        self._lost = {i: lease for i, lease in self._lost.items() if lease.ends_at_s > now_s}
        return ended

    def of_source(self, source_id: str) -> list[ReaderLease]:
        """Those that run."""
        return [lease for lease in self._leases.values() if lease.source_id == source_id]

    def out(self, source_id: str, now_s: float) -> bool:
        """May anybody still believe what is read of this source's memory?"""
        return any(
            lease.source_id == source_id and lease.ends_at_s > now_s
            for lease in (*self._leases.values(), *self._lost.values())
        )
