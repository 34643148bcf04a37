"""The metrics of this process's pulls, from their trace spans and from those that are open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import prometheus_client as prometheus

from mx import trace
from mx.target.report import PathReport, PullReport

#: Attaching takes a millisecond, and a cold pull over a slow network an hour.
BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
)

#: A pull that may run: its number, and a function that returns what it has brought so far.
Open = tuple[int, Callable[[], list[PathReport]]]


class Pulls:
    """A listener of `mx.trace`: counts pulls, from now on. Pulls run on the process's event loop,
    where `received` is to be called, too."""

    def __init__(self, registry: prometheus.CollectorRegistry) -> None:
        """
        Args:
            registry: Where the metrics are registered.
        """
        self._running: set[int] = set()
        self._received: Counter[str] = Counter()  # by ended pulls
        self._shown: Counter[str] = Counter()
        gauge = prometheus.Gauge("mx_pulls", "Pulls that run.", registry=registry)
        gauge.set_function(lambda: len(self._running))
        self._ended = prometheus.Counter(
            "mx_pulls_ended",
            "Pulls that have ended, by outcome: complete, or the error's name.",
            ["outcome"],
            registry=registry,
        )
        self._first = prometheus.Histogram(
            "mx_pull_first_layer_seconds",
            "Seconds from the call of a pull to its first verified layer.",
            buckets=BUCKETS_S,
            registry=registry,
        )
        self._ready = prometheus.Histogram(
            "mx_pull_ready_seconds",
            "Seconds from the call of a pull to its end: verified and, with `out`, written.",
            buckets=BUCKETS_S,
            registry=registry,
        )
        self._retries = prometheus.Counter(
            "mx_pull_retries", "Parts that pulls had to read again.", registry=registry
        )
        self._wrong = prometheus.Counter(
            "mx_digest_failures",
            "Parts that pulls read and that did not match their digests.",
            registry=registry,
        )
        self._fallbacks = prometheus.Counter(
            "mx_pull_fallbacks",
            "Pulls that a store has completed, by the step: disk, hub or objects.",
            ["step"],
            registry=registry,
        )
        self._ended.labels("complete")
        for step in ("disk", "hub", "objects"):
            self._fallbacks.labels(step)

    def __call__(self, event: trace.SpanEvent) -> None:
        """Take an event."""
        if event.name == "pull.read" and event.kind != "started":
            self._retries.inc(_number(event, "retries"))
            self._wrong.inc(_number(event, "wrong"))
        if event.name != "pull":
            return
        number = _number(event, "job")
        if event.kind == "started":
            self._running.add(number)
            return
        self._running.discard(number)
        report = event.attributes.get("report")
        if isinstance(report, PullReport):
            self._completed(report)
            return
        if event.error is not None:
            self._ended.labels(type(event.error).__name__).inc()
        moved = event.attributes.get("moved")
        self._received += _by_transport(moved if isinstance(moved, list) else [])

    def _completed(self, report: PullReport) -> None:
        self._ended.labels("complete").inc()
        self._first.observe(report.first_layer_s)
        self._ready.observe(report.seconds)
        if report.fallback:
            self._fallbacks.labels(report.fallback).inc()
        self._received += _by_transport(report.paths)

    def received(self, open_pulls: Iterable[Open]) -> Counter[str]:
        """Return the verified bytes of all pulls so far, by transport; it never goes down.

        Args:
            open_pulls: Those that may run.
        """
        found = Counter(self._received)
        for number, paths in open_pulls:
            if number in self._running:
                found += _by_transport(paths())
        self._shown |= found  # what a pull brought in vain is not in its report
        return Counter(self._shown)


def _number(event: trace.SpanEvent, name: str) -> int:
    found = event.attributes.get(name, 0)
    return found if isinstance(found, int) else 0


def _by_transport(paths: Iterable[PathReport]) -> Counter[str]:
    found: Counter[str] = Counter()
    for path in paths:
        found[path.transport + ("-attach" if path.attached else "")] += path.bytes
    return found
