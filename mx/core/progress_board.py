"""The pulls that report to a coordinator, and those that report to others of its state, which `mx
top` shows. Pure; `now` is an argument.

No other part depends on the reports. A report that is not renewed in time is forgotten. A pull that
has ended stays for a moment, so that a short pull can be seen at all.

The coordinator that a pull reports to owns its row, and tells the others each report of it; there
the row ends by itself when it hears no more. When the pull goes on to another coordinator that one
claims the row, and of several rows of one pull the one with the latest claim holds everywhere.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from mx.core.changes import ChangeKind, PullChange
from mx.core.pull_status import PullPhase, PullStatus
from mx.core.rates import Rates
from mx.errors import CapacityError, NotAllowedError

#: A pull reports at most once a second; one that has not reported for this long is forgotten.
EXPIRE_S = 5.0
#: How long a pull is shown after its end.
ENDED_S = 3.0
#: What a pull reads is measured over so long: shorter, and single chunks would decide.
WINDOW_S = 2.0
#: The most pulls that report here; and those of others are at most as many, half of them of one
#: principal.
MAX_PULLS = 4096
_LEAST_INTERVAL_S = 0.2


@dataclass(frozen=True, slots=True)
class SharedPull:
    """What a coordinator tells others of a pull that reports to it.

    `principal` is who reports it, `age_s` the time since then, `left_s` how long that still counts.
    `claim` grows whenever the pull goes on to another coordinator.
    """

    status: PullStatus
    principal: str
    claim: int
    age_s: float
    left_s: float


@dataclass(frozen=True, slots=True)
class _OneHostPeriod:
    """Since when, and from how many bytes on, a pull has read from sources of one host alone."""

    from_s: float
    from_bytes: int
    host: str


@dataclass(slots=True)
class _LastReport:
    """The last report of a pull. `coordinator` is "" if it reports here; `reporter` is its stream
    then."""

    coordinator: str
    reporter: object
    principal: str
    claim: int
    status: PullStatus
    at_s: float
    until_s: float
    window: _OneHostPeriod | None


class _Untold:
    """The pulls whose last report is to be told to other coordinators: principals take turns."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, dict[str, None]] = OrderedDict()

    def add(self, principal: str, pull_id: str) -> None:
        self._of.setdefault(principal, {})[pull_id] = None

    def discard(self, principal: str, pull_id: str) -> None:
        ids = self._of.get(principal, {})
        ids.pop(pull_id, None)
        if not ids:
            self._of.pop(principal, None)

    def next(self) -> str | None:
        """Return the pull that has waited longest, of the principal whose turn it is."""
        if not self._of:
            return None
        principal, ids = next(iter(self._of.items()))
        self._of.move_to_end(principal)
        pull_id = next(iter(ids))
        self.discard(principal, pull_id)
        return pull_id


class ProgressBoard:
    """The pulls that report to one coordinator, and what it has heard of others.

    A reporter is one stream. It reports one pull, and no other reporter can report that pull here
    as long as the first one's report lasts.
    """

    def __init__(
        self,
        limit: int = MAX_PULLS,
        link_gb_per_s: Callable[[str, str, str], float] = lambda model, source_host, host: 0.0,
        on_change: Callable[[PullChange], None] = lambda change: None,
    ) -> None:
        """
        Args:
            limit: The most pulls that report here.
            link_gb_per_s: Returns the most that a pull of a model can read from one host at
                another; 0.0 for what is not to be recorded.
            on_change: Called with each change of a pull. A report that differs from the last by the
                time alone is none.
        """
        self._limit = limit
        self._link_gb_per_s = link_gb_per_s
        self._on_change = on_change
        #: What was measured by the pulls.
        self.rates = Rates()
        self._reports: dict[str, _LastReport] = {}
        self._reports_of: dict[object, str] = {}
        self._heard: Counter[str] = Counter()  # pulls that report elsewhere, by principal
        self._heard_in_all = 0
        self._untold: _Untold | None = None
        self._due_s = math.inf

    def share(self) -> None:
        """Keep what is new for `next_untold`, from now on."""
        self._untold = _Untold()

    def report(self, now: float, reporter: object, status: PullStatus, principal: str = "") -> None:
        """Record a pull's progress.

        Raises:
            NotAllowedError: Another reporter reports this pull, or this reporter another pull; or
                another principal reports this one to another coordinator.
            CapacityError: There are too many pulls.
        """
        self.tick(now)
        pull_id = status.pull_id
        if self._reports_of.get(reporter, pull_id) != pull_id:
            raise NotAllowedError(f"this stream reports another pull than {pull_id}")
        known = self._reports.get(pull_id)
        here = known is not None and not known.coordinator
        moved = known is not None and known.reporter not in self._reports_of
        others = known is not None and not (moved and known.principal == principal)
        if known is not None and here and known.reporter is not reporter and others:
            raise NotAllowedError(f"another stream reports pull {pull_id} already")
        if known is not None and not here and known.principal != principal:
            raise NotAllowedError(f"another principal reports pull {pull_id} elsewhere")
        if not here and len(self._reports) - self._heard_in_all >= self._limit:
            raise CapacityError(f"the coordinator shows {self._limit} pulls, its limit")
        claim, window = int(now * 1000), None
        if known is not None:
            claim = known.claim if here else max(claim, known.claim + 1)
            window = known.window
        window = self._measure(now, window, status)
        until_s = now + EXPIRE_S
        self._put(_LastReport("", reporter, principal, claim, status, now, until_s, window))
        self._reports_of[reporter] = pull_id

    def hear(self, now: float, coordinator: str, said: SharedPull) -> None:
        """Record what another coordinator has said of a pull. What is older than what is known, of
        another principal than that, or beyond the limits, is left out.

        Args:
            now: The time.
            coordinator: Which one, not "".
            said: What it says, with its age and what is left of it now.
        """
        if said.left_s <= 0:
            return
        self.tick(now)
        known, window = self._reports.get(said.status.pull_id), None
        if known is not None:
            is_late = (said.claim, coordinator) < (known.claim, known.coordinator)
            if is_late or said.principal != known.principal:
                return
            window = known.window
        if known is None or not known.coordinator:
            if self._heard_in_all >= self._limit:
                return
            if self._heard[said.principal] >= max(1, self._limit // 2):
                return
        at_s, until_s = now - max(0.0, said.age_s), now + min(said.left_s, EXPIRE_S)
        window = self._measure(at_s, window, said.status)
        self._put(
            _LastReport(
                coordinator, None, said.principal, said.claim, said.status, at_s, until_s, window
            )
        )

    def next_untold(self, now: float) -> SharedPull | None:
        """Return a pull that reports here, and has since it was last returned; None: there is none.
        Each principal has its turn."""
        while self._untold is not None and (pull_id := self._untold.next()) is not None:
            row = self._reports[pull_id]
            if row.until_s > now and not row.coordinator:
                age_s, left_s = now - row.at_s, row.until_s - now
                return SharedPull(row.status, row.principal, row.claim, age_s, left_s)
        return None

    def not_told(self, pull_ids: Iterable[str]) -> None:
        """Put back pulls that could not be reported, for `next_untold` to return."""
        for pull_id in pull_ids:
            known = self._reports.get(pull_id)
            if known is not None and self._untold is not None:
                self._untold.add(known.principal, pull_id)

    def _measure(
        self, now: float, begun: _OneHostPeriod | None, status: PullStatus
    ) -> _OneHostPeriod | None:
        """Measure what a pull reads from the sources of one host, over a while.

        Args:
            now: The time.
            begun: The window that runs, if any.
            status: What the pull reports.

        Returns:
            The window that runs from now on.
        """
        hosts = {source.rpartition(":")[0] for source in status.sources}
        host = hosts.pop() if len(hosts) == 1 else ""
        running = status.phase is PullPhase.RUNNING
        window = (
            _OneHostPeriod(now, status.done_bytes, host) if host and status.done_bytes else None
        )
        if begun is None or (running and host != begun.host):
            return window if running else None
        passed_s = now - begun.from_s
        if passed_s >= (WINDOW_S if running else WINDOW_S / 4):
            nbytes = status.done_bytes - begun.from_bytes
            model, host = status.model.name, status.measured_host
            if host:  # else the coordinator does not know the pull
                most = self._link_gb_per_s(model, begun.host, host)
                self.rates.observe(now, model, begun.host, host, min(nbytes / passed_s / 1e9, most))
            return window if running else None
        return begun if running else None

    def end(self, now: float, reporter: object, *, moves: bool = False) -> None:
        """Record that a reporter's stream has ended. A pull that was running has failed; if it
        `moves`, it has as long as between two reports to report by another stream."""
        reported = self._reports.get(self._reports_of.pop(reporter, ""))
        if reported is None or reported.reporter is not reporter or moves:
            return
        before = reported.status
        phase = PullPhase.FAILED if before.phase is PullPhase.RUNNING else before.phase
        status = before._replace(phase=phase, requests_port=0)
        self._put(replace(reported, status=status, until_s=now + ENDED_S))

    def _put(self, report: _LastReport) -> None:
        """Replace the report of its pull by this one."""
        pull_id = report.status.pull_id
        known = self._reports.get(pull_id)
        if known is not None:
            self._count(known, -1)
        self._count(report, 1)
        if self._untold is not None and not report.coordinator:
            self._untold.add(report.principal, pull_id)
        self._reports[pull_id] = report
        self._due_s = min(self._due_s, report.until_s)
        if known is None:
            self._on_change(PullChange(ChangeKind.UP, report.status))
        elif known.status._replace(seconds=report.status.seconds) != report.status:
            self._on_change(PullChange(ChangeKind.CHANGED, report.status, known.status))

    def _count(self, report: _LastReport, by: int) -> None:
        if report.coordinator:
            self._heard_in_all += by
            self._heard[report.principal] += by
            if not self._heard[report.principal]:
                del self._heard[report.principal]

    def tick(self, now: float) -> None:
        """Forget the pulls whose time is over. Cheap while nothing is due."""
        if now < self._due_s:
            return
        for ended in [i for i, reported in self._reports.items() if reported.until_s <= now]:
            report = self._reports.pop(ended)
            self._count(report, -1)
            if self._untold is not None:
                self._untold.discard(report.principal, ended)
            self._on_change(PullChange(ChangeKind.GONE, report.status, report.status))
        next_s = min((reported.until_s for reported in self._reports.values()), default=math.inf)
        # If many end one after the other, scan them a few times a second, not for each one.
        self._due_s = max(next_s, now + _LEAST_INTERVAL_S)

    def pulls(self, now: float, name: str = "") -> list[PullStatus]:
        """Return all pulls, or those of one model name, the oldest first."""
        self.tick(now)
        return [
            reported.status
            for reported in self._reports.values()
            if reported.until_s > now and name in ("", reported.status.model.name)
        ]

    def phases(self, now: float) -> Counter[str]:
        """Return how many pulls run, or ended lately, by phase."""
        return Counter(each.phase.value for each in self.pulls(now))
