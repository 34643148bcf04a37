"""The leases of a source's readers: which readers may read, and until when."""

from __future__ import annotations

from dataclasses import dataclass

#: A reader counts its lease from before it sent its request, the source from its answer. The
#: source adds this margin, since two clocks may run at slightly different rates.
MARGIN_S = 0.5


@dataclass(slots=True)
class ReaderLease:
    """One reader's lease on one source, by the grant that it belongs to."""

    grant_id: str
    source_id: str
    ends_at_s: float


class LeaseBook:
    """All leases of one process. Pure: `now_s` is a monotonic time that the caller gives.

    A lease that its reader has returned (`close`) is over. A lease whose reader was cut off
    (`lose`) is not: that reader may trust what it reads until the lease ends, so the lease stays
    *unexpired* until then, though it cannot be renewed.
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._leases: dict[str, ReaderLease] = {}
        self._lost: dict[str, ReaderLease] = {}

    def __len__(self) -> int:
        """Return the number of running leases."""
        return len(self._leases)

    def open(self, grant_id: str, source_id: str, now_s: float) -> None:
        """Begin a lease of a grant on a source.

        Raises:
            ValueError: The grant has a lease already.
        """
        if grant_id in self._leases:
            raise ValueError(f"grant {grant_id} is open already")
        ends_at_s = now_s + self.lease_s + MARGIN_S
        self._leases[grant_id] = ReaderLease(grant_id, source_id, ends_at_s)

    def renew(self, grant_id: str, now_s: float) -> bool:
        """Extend a lease. Return False if it does not run; the reader has to open another."""
        lease = self._leases.get(grant_id)
        if lease is None or lease.ends_at_s <= now_s:
            return False
        lease.ends_at_s = now_s + self.lease_s + MARGIN_S
        return True

    def close(self, grant_id: str) -> bool:
        """End a lease that its reader has returned: the reader trusts no later read of it.

        Returns:
            False if the lease did not run.
        """
        self._lost.pop(grant_id, None)
        return self._leases.pop(grant_id, None) is not None

    def lose(self, grant_id: str) -> None:
        """Stop renewing a lease whose reader is gone or cut off; it is unexpired until its end."""
        lease = self._leases.pop(grant_id, None)
        if lease is not None:
            self._lost[grant_id] = lease

    def expire(self, now_s: float) -> list[ReaderLease]:
        """Remove every lease that has ended. Return those that ran until now."""
        ended = [lease for lease in self._leases.values() if lease.ends_at_s <= now_s]
        for lease in ended:
            del self._leases[lease.grant_id]
        self._lost = {i: lease for i, lease in self._lost.items() if lease.ends_at_s > now_s}
        return ended

    def of_source(self, source_id: str) -> list[ReaderLease]:
        """Return the running leases on a source."""
        return [lease for lease in self._leases.values() if lease.source_id == source_id]

    def has_unexpired(self, source_id: str, now_s: float) -> bool:
        """Return True if a reader may still trust what it reads from this source's memory."""
        return any(
            lease.source_id == source_id and lease.ends_at_s > now_s
            for lease in (*self._leases.values(), *self._lost.values())
        )
