"""How fast a source gives, by what it has counted and what its readers report. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Report:
    nbytes: int
    at_s: float
    bytes_per_s: float = 0.0
    news: int = 0  # bytes since the report before


class Meter:
    """Of one source. What it sends itself is a growing count, looked at when the rate is asked
    for; what readers fetch is reported by them now and then, so that their last rate stands until
    the next report, or for `stale_s`."""

    def __init__(self, now_s: float, *, stale_s: float) -> None:
        self._stale_s = stale_s
        self._sent = 0
        self._asked_s = now_s
        self._reports: dict[str, _Report] = {}
        self._ended = 0  # bytes of readers that are gone, in no rate so far

    def opened(self, grant_id: str, now_s: float) -> None:
        self._reports[grant_id] = _Report(0, now_s)

    def reported(self, grant_id: str, nbytes: int, now_s: float) -> None:
        """This grant has brought so much so far. What goes back, or was never opened, is
        passed over."""
        report = self._reports.get(grant_id)
        if report is None or nbytes < report.nbytes or now_s <= report.at_s:
            return
        news = nbytes - report.nbytes
        self._reports[grant_id] = _Report(nbytes, now_s, news / (now_s - report.at_s), news)

    def closed(self, grant_id: str) -> None:
        """It ended. What it reported last counts still, if nobody has asked since."""
        report = self._reports.pop(grant_id, None)
        if report is not None and report.at_s > self._asked_s:
            self._ended += report.news

    def gb_per_s(self, sent: int, now_s: float) -> float:
        """The rate since this was last asked. `sent` is what was sent so far, over everything."""
        passed_s = now_s - self._asked_s
        if passed_s <= 0:
            return 0.0
        direct = max(0, sent - self._sent) + self._ended
        self._sent, self._asked_s, self._ended = sent, now_s, 0
        fetched = sum(
            report.bytes_per_s
            for report in self._reports.values()
            if now_s - report.at_s <= self._stale_s
        )
        return (direct / passed_s + fetched) / 1e9
