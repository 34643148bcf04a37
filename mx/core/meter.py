"""The rate at which a source is read, from its own counts and its readers' reports. Pure."""

from __future__ import annotations

from dataclasses import dataclass


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
