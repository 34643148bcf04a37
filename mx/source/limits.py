"""A source's bounds at work: who may read, how fast it sends, what its readers' shares are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from mx.core.limits import Admission, Bounds, TokenBucket, shares, slice_nbytes
from mx.core.metering import Meter

UNBOUNDED = Bounds()


class SendLimiter:
    """`mx.transport.Limiter`: one token bucket for all who send."""

    def __init__(self, bytes_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._bucket = TokenBucket(bytes_per_s, clock())

    @property
    def slice_nbytes(self) -> int:
        return slice_nbytes(self._bucket.bytes_per_s)

    def delay_s(self, nbytes: int) -> float:
        with self._lock:
            return self._bucket.take(nbytes, self._clock())

    def set_rate(self, bytes_per_s: float) -> None:
        with self._lock:
            self._bucket.set_rate(bytes_per_s, self._clock())


@dataclass(frozen=True, slots=True)
class _Grant:
    source_id: str
    reader: str
    sent: bool  # does the source send, at least by one of the ways granted?


class SourceLimits:
    """One process's; on the loop, but for the limiter, which any thread may ask.

    Grants are counted from `opened` to `closed`. A reader with several grants is one reader; each
    of its grants has a share of the rate.
    """

    def __init__(
        self,
        bounds: Bounds = UNBOUNDED,
        *,
        report_s: float = 1.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Readers report every `report_s` what they have fetched."""
        self._bounds = bounds
        self._clock = clock
        self._report_s = report_s
        self._admission = Admission(bounds.max_readers)
        self._grants: dict[str, _Grant] = {}
        self._meters: dict[str, Meter] = {}
        rate = bounds.max_bytes_per_s
        self.limiter = SendLimiter(rate, clock) if rate else None

    def refuse(self, reader: str) -> float | None:
        """None: it may read. Else the seconds after which it may ask again."""
        return self._admission.refuse(reader, self._readers(), self._clock())

    def full_for(self, reader: str) -> bool:
        """Would it be refused now?"""
        return self._admission.full_for(reader, self._readers())

    def opened(self, grant_id: str, source_id: str, reader: str, *, sent: bool) -> None:
        """A reader has begun. `sent`: the source sends to it; else it fetches for itself."""
        self._grants[grant_id] = _Grant(source_id, reader, sent)
        self._meter(source_id).opened(grant_id, self._clock())
        self._share_out()

    def reported(self, grant_id: str, nbytes: int) -> None:
        """What a grant has brought so far; counted where the source can't."""
        grant = self._grants.get(grant_id)
        if grant is not None and not grant.sent:
            self._meter(grant.source_id).reported(grant_id, nbytes, self._clock())

    def closed(self, grant_id: str) -> None:
        """Idempotent."""
        grant = self._grants.pop(grant_id, None)
        if grant is not None:
            self._meter(grant.source_id).closed(grant_id)
            self._share_out()

    def share(self, grant_id: str) -> float:
        """What its reader may fetch, in bytes per second; 0: whatever it can, or the source sends
        and sees to it itself."""
        grant = self._grants.get(grant_id)
        if not self._bounds.max_bytes_per_s or grant is None or grant.sent:
            return 0.0
        return self._shares()[1]

    def gb_per_s(self, source_id: str, sent: int) -> float:
        """The rate since this was last asked; `sent` is what the source has sent so far."""
        return self._meter(source_id).gb_per_s(sent, self._clock())

    def forget(self, source_id: str) -> None:
        """It is not served any more."""
        self._meters.pop(source_id, None)

    def _readers(self) -> Collection[str]:
        return {grant.reader for grant in self._grants.values()}

    def _meter(self, source_id: str) -> Meter:
        if source_id not in self._meters:
            self._meters[source_id] = Meter(self._clock(), stale_s=2 * self._report_s)
        return self._meters[source_id]

    def _shares(self) -> tuple[float, float]:
        sent = sum(grant.sent for grant in self._grants.values())
        return shares(self._bounds.max_bytes_per_s, sent, len(self._grants) - sent)

    def _share_out(self) -> None:
        if self.limiter is not None:
            self.limiter.set_rate(self._shares()[0])
