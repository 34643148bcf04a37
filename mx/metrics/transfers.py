"""The metrics of a process that serves, pulls or caches models."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import prometheus_client as prometheus
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from mx import counters, runtime, trace
from mx.api.source import Source
from mx.api.target import Pull
from mx.fetching.report import PathReport, PullReport
from mx.fleet import Cache
from mx.metrics.coordinators import CoordinatorMetrics
from mx.metrics.families import ERRORS, counter, gauge
from mx.metrics.labels import Names
from mx.source import server

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
            "Pulls that a store has completed, by the step: snapshot, disk, hub or objects.",
            ["step"],
            registry=registry,
        )
        for outcome in ("complete", *ERRORS):
            self._ended.labels(outcome)
        for step in ("snapshot", "disk", "hub", "objects"):
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


#: What engines in this process count: the metric, and the module and the function that have it.
_ENGINES = (
    ("mx_graphs", "CUDA graphs, by what became of them.", "mx.graphs.restore", "counts"),
    ("mx_compile_caches", "Compile caches, by use.", "mx.engines.compiling", "compile_counts"),
)


class TransferMetrics:
    """Reads the metrics of this process's sources, pulls and cache, and of the coordinator that it
    embeds; on the event loop. `pulls` is to listen to traces."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """
        Args:
            registry: Where the metrics of pulls are registered.
        """
        self.pulls = Pulls(registry)
        self._embedded = CoordinatorMetrics()
        self._names = Names()

    def read(self) -> Iterator[Metric]:
        """Yield the metrics of this moment."""
        users = runtime.users()
        coordinators = [e.coordinator for e in users if isinstance(e, Source | Cache)]
        for coordinator in [each for each in coordinators if each][:1]:  # all have one address
            yield from self._embedded.read(coordinator)
        yield from self._of_sources()
        yield self._moved([each.moving for each in users if isinstance(each, Pull)])
        for cache in [each for each in users if isinstance(each, Cache)]:
            for name, value in cache.figures().items():
                kind = counter if name == "evictions" else gauge
                yield kind(f"mx_cache_{name}", f"The cache's {name.replace('_', ' ')}.", value)
        for name, text, module, function in _ENGINES:
            if module in sys.modules:  # else nothing was counted
                yield counter(name, text, getattr(sys.modules[module], function)(), "outcome")

    def _of_sources(self) -> Iterator[Metric]:
        held, figures = Counter[str](), Counter[str]()
        for each in list(server.running):
            held += each.held_bytes()
            figures.update(each.figures())
        models = self._names.labelled(held, time.monotonic())
        yield gauge("mx_source_held_bytes", "Bytes of the weights served.", models, "model")
        yield gauge("mx_sources", "Sources of this process.", len(server.running))
        yield gauge("mx_source_leases", "Leases of readers.", figures["leases"])
        yield gauge("mx_source_slots", "Slots in use: chunks being read.", figures["slots"])
        yield gauge("mx_source_streams", "Open streams with other pulls.", figures["streams"])

    def _moved(self, open_pulls: list[Open]) -> Metric:
        given = counters.totals(counters.GIVEN_BYTES)
        for each in list(server.running):
            given += each.given_nbytes()
        found = CounterMetricFamily(
            "mx_transfer_bytes",
            "Bytes of weights: received and verified, or served to readers (given).",
            labels=["transport", "direction"],
        )
        received = self.pulls.received(open_pulls)
        for direction, counts in (("received", received), ("given", given)):
            for transport, nbytes in sorted(counts.items()):
                found.add_metric([transport, direction], nbytes)
        return found
