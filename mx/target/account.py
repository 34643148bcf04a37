"""What has come over which path of a transfer."""

from __future__ import annotations

import time
from collections.abc import Iterable

from mx.target.reads import Connection
from mx.target.report import PathReport


class PathAccount:
    """The verified bytes of each path: over connections, which count theirs themselves, and by
    other ways, which are counted here.

    Not thread-safe: its transfer's lock guards it, together with the machine that counts the same
    bytes as landed.
    """

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._others: dict[tuple[str, str], PathReport] = {}

    def prefilled(self, label: str, source: str, nbytes: int, seconds: float) -> None:
        """Count bytes that were in the arena before they were read, such as resumed ones."""
        before = self._other(label, source)
        self._others[label, source] = PathReport(
            label, source, before.bytes + nbytes, before.seconds + seconds
        )

    def given(self, rank: int, nbytes: int) -> None:
        """Count bytes that another rank on this host has handed over."""
        label, source = "rank", f"rank {rank}"
        before = self._other(label, source)
        seconds = time.monotonic() - self._began_s
        self._others[label, source] = PathReport(label, source, before.bytes + nbytes, seconds)

    def reports(self, connections: Iterable[Connection]) -> list[PathReport]:
        """Return what came over each path that brought anything, these connections' first."""
        return [
            PathReport(
                each.path.transport,
                each.peer,
                each.verified_nbytes,
                each.verified_at_s - each.opened_at_s,
                rail=str(each.path.rail or ""),
            )
            for each in connections
            if each.verified_nbytes
        ] + list(self._others.values())

    def _other(self, label: str, source: str) -> PathReport:
        return self._others.get((label, source), PathReport(label, source, 0, 0.0))
