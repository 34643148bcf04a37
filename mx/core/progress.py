"""The progress of pulls: the snapshot that a pull gives its caller, and what pulls report to the
coordinator, which `mx top` shows. Pure; `now` is an argument.

No other part depends on the reports. A report that is not renewed in time is forgotten. A pull that
has ended stays for a moment, so that a short pull can be seen at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from mx.core.pull_changes import PullChanges
from mx.core.pull_status import PullPhase, PullStatus
from mx.core.rates import Rates
from mx.core.types import Layout
from mx.errors import CapacityError, NotAllowedError
from mx.units import count, format_bytes

#: A pull reports at most once a second; one that has not reported for this long is forgotten.
EXPIRE_S = 5.0
#: How long a pull is shown after its end.
ENDED_S = 3.0
#: What a pull reads is measured over so long: shorter, and single chunks would decide.
WINDOW_S = 2.0
MAX_PULLS = 4096
_LEAST_INTERVAL_S = 0.2


@dataclass(frozen=True, slots=True)
class LayerProgress:
    name: str
    nbytes: int
    done_nbytes: int
    ready: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """A snapshot. Before the manifest is known it has no layers, and counts only bytes read from
    disk. `sources` are the HOST:PORT of the sources in use."""

    bytes_done: int = 0
    bytes_total: int = 0
    layers_ready: int = 0
    layers_total: int = 0
    layers: tuple[LayerProgress, ...] = ()
    phase: str = "resolving"
    sources: tuple[str, ...] = ()
    retries: int = 0


def summary(progress: Progress) -> str:
    """Return a line like "reading, 3/26 layers, 72.1 MB of 633 MB"."""
    return (
        f"{progress.phase}, {progress.layers_ready}/{count(progress.layers_total, 'layer')}, "
        f"{format_bytes(progress.bytes_done)} of {format_bytes(progress.bytes_total)}"
    )


def progress_of(
    layout: Layout,
    done_nbytes: Sequence[int] | None,
    is_ready: Callable[[int], bool],
    phase: str,
    sources: Iterable[str] = (),
    retries: int = 0,
    layer_nbytes: Sequence[int] | None = None,
) -> Progress:
    """Return a snapshot.

    Args:
        layout: The model's.
        done_nbytes: The bytes that have landed, by layer; None: a layer counts whole once it is
            ready, and before not at all.
        is_ready: Returns True for a layer that is ready.
        phase: What the pull does now, for people.
        sources: The sources in use; repeated ones count once.
        retries: How often a chunk was read again.
        layer_nbytes: The bytes to move for each layer; None: those of its tensors.
    """
    layers = []
    for layer in layout.layers:
        nbytes = sum(length for _, length in layer.extents)
        if layer_nbytes is not None:
            nbytes = layer_nbytes[layer.index]
        ready = is_ready(layer.index)
        done = nbytes if ready else 0
        if done_nbytes is not None:
            done = done_nbytes[layer.index]
        layers.append(LayerProgress(layer.name, nbytes, done, ready))
    return Progress(
        sum(layer.done_nbytes for layer in layers),
        sum(layer.nbytes for layer in layers),
        sum(layer.ready for layer in layers),
        len(layers),
        tuple(layers),
        phase,
        tuple(dict.fromkeys(sources)),
        retries,
    )


@dataclass(frozen=True, slots=True)
class _Window:
    """Since when, and from how many bytes on, a pull has read from sources of one host alone."""

    from_s: float
    from_bytes: int
    host: str


@dataclass(slots=True)
class _Report:
    reporter: object
    status: PullStatus
    until_s: float
    window: _Window | None


class ProgressBoard:
    """The pulls that report to one coordinator.

    A reporter is one stream. It reports one pull, and no other reporter can report that pull as
    long as the first one's report lasts.
    """

    def __init__(self, limit: int = MAX_PULLS) -> None:
        self._limit = limit
        #: What watchers of pulls read.
        self.changes = PullChanges(limit)
        #: What was measured by the pulls.
        self.rates = Rates()
        self._reports: dict[str, _Report] = {}
        self._reports_of: dict[object, str] = {}
        self._due_s = math.inf

    def report(self, now: float, reporter: object, status: PullStatus) -> None:
        """Record a pull's progress.

        Raises:
            NotAllowedError: Another reporter reports this pull, or this reporter another pull.
            CapacityError: There are too many pulls.
        """
        self.tick(now)
        if self._reports_of.get(reporter, status.pull_id) != status.pull_id:
            raise NotAllowedError(f"this stream reports another pull than {status.pull_id}")
        known = self._reports.get(status.pull_id)
        if known is not None and known.reporter is not reporter:
            raise NotAllowedError(f"another stream reports pull {status.pull_id} already")
        if known is None and len(self._reports) >= self._limit:
            raise CapacityError(f"the coordinator shows {self._limit} pulls, its limit")
        until_s = now + EXPIRE_S
        before, window = (None, None) if known is None else (known.status, known.window)
        window = self._measure(now, window, status)
        self._reports[status.pull_id] = _Report(reporter, status, until_s, window)
        self.changes.push(before, status)
        self._reports_of[reporter] = status.pull_id
        self._due_s = min(self._due_s, until_s)

    def _measure(self, now: float, begun: _Window | None, status: PullStatus) -> _Window | None:
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
        window = _Window(now, status.done_bytes, host) if host and status.done_bytes else None
        if begun is None or (running and host != begun.host):
            return window if running else None
        passed_s = now - begun.from_s
        if passed_s >= (WINDOW_S if running else WINDOW_S / 4):
            nbytes = status.done_bytes - begun.from_bytes
            self.rates.observe(now, begun.host, status.host, nbytes / passed_s / 1e9)
            return window if running else None
        return begun if running else None

    def end(self, now: float, reporter: object) -> None:
        """Record that a reporter's stream has ended. A pull that was running has failed."""
        reported = self._reports.get(self._reports_of.pop(reporter, ""))
        if reported is None or reported.reporter is not reporter:
            return
        before = reported.status
        phase = PullPhase.FAILED if before.phase is PullPhase.RUNNING else before.phase
        reported.status = replace(before, phase=phase, requests_port=0)
        self.changes.push(before, reported.status)
        reported.until_s = now + ENDED_S
        self._due_s = min(self._due_s, reported.until_s)

    def tick(self, now: float) -> None:
        """Forget the pulls whose time is over. Cheap while nothing is due."""
        if now < self._due_s:
            return
        for ended in [i for i, reported in self._reports.items() if reported.until_s <= now]:
            del self._reports[ended]
            self.changes.drop(ended)
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
