"""A source's bounds at work: who may read, how fast it sends, what its readers' shares are."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from mx.core.grants import GrantBook, GrantBounds, Principal
from mx.core.limits import Bounds, Retries, TokenBucket, grant_share, slice_nbytes
from mx.core.meter import Meter

UNBOUNDED = Bounds()
#: A reader takes about so many of a source's descriptors: its control connection, and two streams
#: or a stream and a control page.
_DESCRIPTORS_PER_GRANT = 4
_MOST_GRANTS = 4096
_LEAST_GRANTS = 16


def grant_bounds() -> GrantBounds:
    """As many grants as this process has descriptors for; half of them for one address."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        descriptors = _MOST_GRANTS * _DESCRIPTORS_PER_GRANT
    total = min(max(descriptors // _DESCRIPTORS_PER_GRANT, _LEAST_GRANTS), _MOST_GRANTS)
    return GrantBounds(total=total, per_address=total // 2)


class SendLimiter:
    """`mx.transport.Limiter`: one token bucket for all who send."""

    def __init__(self, bytes_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._bucket = TokenBucket(bytes_per_s, clock())
        self._parts: dict[str, int] = {}  # by grant: among how many its reader's slice is split

    def slice_nbytes(self, grant_id: str) -> int:
        return slice_nbytes(self._bucket.bytes_per_s) // self._parts.get(grant_id, 1)

    def delay_s(self, nbytes: int) -> float:
        with self._lock:
            return self._bucket.take(nbytes, self._clock())

    def set_rate(self, bytes_per_s: float, parts: dict[str, int]) -> None:
        """`parts` says of each grant how many its reader has."""
        with self._lock:
            self._bucket.set_rate(bytes_per_s, self._clock())
            self._parts = parts


@dataclass(frozen=True, slots=True)
class _Grant:
    source_id: str
    principal: Principal
    sent: bool  # does the source send, at least by one of the ways granted?


class SourceLimits:
    """One process's; on the loop, but for the limiter, which any thread may ask.

    Grants are counted from `opened` to `closed`. A reader with several grants is one reader, and
    has one reader's share of the rate, split among them.
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
        self._retries = Retries()
        self._book = GrantBook(grant_bounds(), bounds.max_readers)
        self._grants: dict[str, _Grant] = {}
        self._read_bytes: dict[str, int] = {}  # by grant, as its reader says
        self._meters: dict[str, Meter] = {}
        rate = bounds.max_bytes_per_s
        self.limiter = SendLimiter(rate, clock) if rate else None

    def make_room(self, principal: Principal) -> list[str] | None:
        """The grants that are to end before another is given to this one, mostly none. None: it
        is refused, and may ask again after `retry_after_s`."""
        return self._book.make_room(principal, self._clock())

    def retry_after_s(self) -> float:
        """The seconds after which the one that is refused now may ask again."""
        return self._retries.after_s(self._clock())

    def full_for(self, principal: Principal) -> bool:
        """Would it be refused now?"""
        return self._book.full_for(principal)

    def trades(self, principal: Principal, change: int) -> None:
        """A pull begins (+1) or ends (-1) to trade chunks with this source."""
        self._book.trades(principal, change)

    def opened(self, grant_id: str, source_id: str, principal: Principal, *, sent: bool) -> None:
        """A reader has begun. `sent`: the source sends to it; else it fetches for itself."""
        self._grants[grant_id] = _Grant(source_id, principal, sent)
        self._book.open(grant_id, principal, self._clock())
        self._meter(source_id).opened(grant_id, self._clock())
        self._share_out()

    def reported(self, grant_id: str, nbytes: int) -> None:
        """What a grant has brought so far; counted where the source can't."""
        grant = self._grants.get(grant_id)
        if grant is not None:
            self._read_bytes[grant_id] = nbytes
        if grant is not None and not grant.sent:
            self._meter(grant.source_id).reported(grant_id, nbytes, self._clock())

    def seen(self, grant_id: str, sent_nbytes: int, *, fetches: bool) -> None:
        """What was sent on a grant so far. `fetches`: its reader is connected so that it fetches
        for itself, and what it reports is believed."""
        fetched_nbytes = self._read_bytes.get(grant_id, 0) if fetches else 0
        self._book.moved(grant_id, max(sent_nbytes, fetched_nbytes), self._clock())

    def idle(self) -> list[str]:
        """The grants that are to end, since they have moved nothing for too long."""
        return self._book.idle(self._clock())

    def closed(self, grant_id: str) -> None:
        """Idempotent."""
        grant = self._grants.pop(grant_id, None)
        if grant is not None:
            self._book.close(grant_id)
            self._read_bytes.pop(grant_id, None)
            self._meter(grant.source_id).closed(grant_id)
            self._share_out()

    def share(self, grant_id: str) -> float:
        """What its reader may fetch, in bytes per second; 0: whatever it can, or the source sends
        and sees to it itself."""
        grant = self._grants.get(grant_id)
        if not self._bounds.max_bytes_per_s or grant is None or grant.sent:
            return 0.0
        return self._share_of(self._book.grants_of(grant.principal.connection))

    def gb_per_s(self, source_id: str, sent: int) -> float:
        """The rate since this was last asked; `sent` is what the source has sent so far."""
        return self._meter(source_id).gb_per_s(sent, self._clock())

    def forget(self, source_id: str) -> None:
        """It is not served any more."""
        self._meters.pop(source_id, None)

    def _meter(self, source_id: str) -> Meter:
        if source_id not in self._meters:
            self._meters[source_id] = Meter(self._clock(), stale_s=2 * self._report_s)
        return self._meters[source_id]

    def _share_of(self, grants: int) -> float:
        """What each grant gets of a reader that has so many."""
        return grant_share(self._bounds.max_bytes_per_s, self._book.readers, grants)

    def _share_out(self) -> None:
        """The bucket of those that are sent to gets their shares together; without any, a share
        for the first one to come."""
        if self.limiter is None:
            return
        parts = {i: self._book.grants_of(g.principal.connection) for i, g in self._grants.items()}
        sent = [self._share_of(parts[i]) for i, grant in self._grants.items() if grant.sent]
        self.limiter.set_rate(sum(sent) or self._share_of(1), parts)
