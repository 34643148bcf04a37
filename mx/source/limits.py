"""Applies a source's bounds: which readers it admits, how fast it sends, what each reader's share
is."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mx.core.grants import GrantBook, GrantBounds, Principal
from mx.core.limits import Bounds, Retries, grant_share, slice_nbytes
from mx.wire.pacing import RateLimiter

UNBOUNDED = Bounds()
#: The descriptors of a source that one reader takes, about: its control connection, and two
#: streams or a stream and a control page.
_DESCRIPTORS_PER_GRANT = 4
_MOST_GRANTS = 4096
_LEAST_GRANTS = 16


def grant_bounds() -> GrantBounds:
    """Return bounds that fit this process's limit of descriptors; one principal may have half."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        descriptors = _MOST_GRANTS * _DESCRIPTORS_PER_GRANT
    total = min(max(descriptors // _DESCRIPTORS_PER_GRANT, _LEAST_GRANTS), _MOST_GRANTS)
    return GrantBounds(total=total, per_principal=total // 2)


class SendLimiter(RateLimiter):
    """An `mx.transport.Limiter`: one token bucket for all exposures that send. Thread-safe."""

    _parts: Mapping[str, int] = MappingProxyType({})

    def slice_nbytes(self, grant_id: str) -> int:
        """Return how many bytes to send to a grant in one go."""
        return slice_nbytes(self.bytes_per_s) // self._parts.get(grant_id, 1)

    def share_out(self, bytes_per_s: float, parts: Mapping[str, int]) -> None:
        """Change the rate. `parts` maps each grant to the number of grants of its reader."""
        self.set_rate(bytes_per_s)
        self._parts = parts


@dataclass(slots=True)
class _CountedGrant:
    source_id: str
    principal: Principal
    sent: bool  # the source sends over at least one of the granted transports
    reported_nbytes: int = 0  # as its reader says


@dataclass(slots=True)
class _MeterReport:
    nbytes: int
    at_s: float
    bytes_per_s: float = 0.0
    news: int = 0  # bytes since the previous report


class Meter:
    """The meter of one source.

    The bytes that the source sends itself are a growing count, read when the rate is requested.
    Readers that fetch for themselves report now and then, so the last rate of each counts until
    its next report, or for `stale_s`.
    """

    def __init__(self, now_s: float, *, stale_s: float) -> None:
        self._stale_s = stale_s
        self._sent = 0
        self._read_at_s = now_s
        self._reports: dict[str, _MeterReport] = {}
        self._ended = 0  # bytes of ended grants that no rate includes so far

    def opened(self, grant_id: str, now_s: float) -> None:
        """Begin to count the reports of a grant."""
        self._reports[grant_id] = _MeterReport(0, now_s)

    def reported(self, grant_id: str, nbytes: int, now_s: float) -> None:
        """Record the bytes that a grant's reader has fetched so far.

        A count below the previous one, or of a grant that was not opened, is ignored.
        """
        report = self._reports.get(grant_id)
        if report is None or nbytes < report.nbytes or now_s <= report.at_s:
            return
        news = nbytes - report.nbytes
        self._reports[grant_id] = _MeterReport(nbytes, now_s, news / (now_s - report.at_s), news)

    def closed(self, grant_id: str) -> None:
        """End a grant. Its last report counts if the rate was not requested since."""
        report = self._reports.pop(grant_id, None)
        if report is not None and report.at_s > self._read_at_s:
            self._ended += report.news

    def gb_per_s(self, sent: int, now_s: float) -> float:
        """Return the rate in GB/s since the last call; `sent` is the total of bytes sent so far."""
        passed_s = now_s - self._read_at_s
        if passed_s <= 0:
            return 0.0
        direct = max(0, sent - self._sent) + self._ended
        self._sent, self._read_at_s, self._ended = sent, now_s, 0
        fetched = sum(
            report.bytes_per_s
            for report in self._reports.values()
            if now_s - report.at_s <= self._stale_s
        )
        return (direct / passed_s + fetched) / 1e9


class SourceLimits:
    """The limits of one process, used on the event loop; any thread may use `limiter`.

    Grants are counted from `opened` to `closed`. A reader with several grants counts once, and its
    grants split one reader's share of the rate.
    """

    def __init__(
        self,
        bounds: Bounds = UNBOUNDED,
        *,
        report_s: float = 1.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            bounds: The bounds that the user sets.
            report_s: The interval at which readers report what they have fetched.
            clock: A monotonic clock, in seconds.
        """
        self._bounds = bounds
        self._clock = clock
        self._report_s = report_s
        self._retries = Retries()
        self._book = GrantBook(grant_bounds(), bounds.max_readers)
        self._grants: dict[str, _CountedGrant] = {}
        self._meters: dict[str, Meter] = {}
        rate = bounds.max_bytes_per_s
        self.limiter = SendLimiter(rate, clock) if rate else None

    def admit(self, principal: Principal) -> list[str] | None:
        """Decide whether this reader may open a grant, and which grants end for it.

        Returns:
            The ids of the grants that have to end first, mostly none; None if the reader is
            refused. It may retry after `retry_after_s`.
        """
        return self._book.admit(principal, self._clock())

    def retry_after_s(self) -> float:
        """Return the seconds after which a reader that is refused now may retry."""
        return self._retries.after_s(self._clock())

    def full_for(self, principal: Principal) -> bool:
        """Return True if this pull holds no grant here and there is no place for another reader."""
        return self._book.full_for(principal)

    def trades(self, principal: Principal, change: int) -> None:
        """Record that a pull begins (+1) or ends (-1) to trade chunks with this source."""
        self._book.trades(principal, change)

    def opened(self, grant_id: str, source_id: str, principal: Principal, *, sent: bool) -> None:
        """Begin to count a grant. `sent`: the source sends to the reader; else it fetches."""
        self._grants[grant_id] = _CountedGrant(source_id, principal, sent)
        self._book.open(grant_id, principal, self._clock())
        self._meter(source_id).opened(grant_id, self._clock())
        self._share_out()

    def reported(self, grant_id: str, nbytes: int) -> None:
        """Record the bytes that a grant's reader reports to have read so far.

        The rate includes them only if the source does not send on this grant.
        """
        grant = self._grants.get(grant_id)
        if grant is None:
            return
        grant.reported_nbytes = nbytes
        if not grant.sent:
            self._meter(grant.source_id).reported(grant_id, nbytes, self._clock())

    def reported_nbytes(self, grant_id: str) -> int:
        """Return the bytes that a grant's reader reports to have read so far."""
        grant = self._grants.get(grant_id)
        return 0 if grant is None else grant.reported_nbytes

    def seen(self, grant_id: str, sent_nbytes: int, *, fetches: bool) -> None:
        """Record the bytes that were sent on a grant so far, as its progress.

        Args:
            grant_id: The grant.
            sent_nbytes: The bytes that the source has sent on it.
            fetches: Its reader is connected so that it fetches for itself: its own reports count.
        """
        fetched_nbytes = self._grants[grant_id].reported_nbytes if fetches else 0
        self._book.moved(grant_id, max(sent_nbytes, fetched_nbytes), self._clock())

    def idle(self) -> list[str]:
        """Return the grants that have to end because they have moved nothing for too long."""
        return self._book.idle(self._clock())

    def closed(self, grant_id: str) -> None:
        """Stop counting a grant. Idempotent."""
        grant = self._grants.pop(grant_id, None)
        if grant is not None:
            self._book.close(grant_id)
            self._meter(grant.source_id).closed(grant_id)
            self._share_out()

    def share(self, grant_id: str) -> float:
        """Return the bytes per second that a grant's reader may fetch; 0 for no bound, or if the
        source sends and so limits the rate itself."""
        grant = self._grants.get(grant_id)
        if not self._bounds.max_bytes_per_s or grant is None or grant.sent:
            return 0.0
        return self._share_of(self._book.grants_of(grant.principal.connection))

    def gb_per_s(self, source_id: str, sent: int) -> float:
        """Return a source's rate in GB/s since the last call; `sent` is its total of bytes sent."""
        return self._meter(source_id).gb_per_s(sent, self._clock())

    def forget(self, source_id: str) -> None:
        """Drop the meter of a source that is not served any more."""
        self._meters.pop(source_id, None)

    def _meter(self, source_id: str) -> Meter:
        if source_id not in self._meters:
            self._meters[source_id] = Meter(self._clock(), stale_s=2 * self._report_s)
        return self._meters[source_id]

    def _share_of(self, grants: int) -> float:
        """Return the share of each grant of a reader that has `grants` of them."""
        return grant_share(self._bounds.max_bytes_per_s, self._book.readers, grants)

    def _share_out(self) -> None:
        """Set the bucket's rate to the sum of the shares of the grants that the source sends on;
        without any, to one share for the first one to come."""
        if self.limiter is None:
            return
        parts = {i: self._book.grants_of(g.principal.connection) for i, g in self._grants.items()}
        sent = [self._share_of(parts[i]) for i, grant in self._grants.items() if grant.sent]
        self.limiter.share_out(sum(sent) or self._share_of(1), parts)
