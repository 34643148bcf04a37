"""The metrics of a process that serves, pulls or caches models."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from mx import counters, runtime
from mx.api.caching import Cache
from mx.api.source import Source
from mx.api.target import Pull
from mx.metrics.coordinators import CoordinatorMetrics
from mx.metrics.families import counter, gauge, gauges
from mx.metrics.labels import Names
from mx.metrics.pulls import Open, Pulls
from mx.source import server


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
        opened = runtime.users()
        for each in opened:
            if isinstance(each, Source | Cache) and each.coordinator is not None:
                yield from self._embedded.read(each.coordinator)
                break  # it listens at one address, the settings'
        yield from self._of_sources()
        yield self._moved([each.moving for each in opened if isinstance(each, Pull)])
        for each in opened:
            if isinstance(each, Cache):
                yield from _of_cache(each)
        yield from _of_engines()

    def _of_sources(self) -> Iterator[Metric]:
        sources = [each.figures() for each in list(server.running)]
        held: Counter[str] = Counter()
        for each in sources:
            held += each.held_bytes
        yield gauges(
            "mx_source_held_bytes",
            "Bytes of the weights that are served, by model.",
            self._names.labelled(held, time.monotonic()),
            "model",
        )
        yield gauge("mx_sources", "Sources of this process.", len(sources))
        readers = sum(each.readers for each in sources)
        yield gauge("mx_source_leases", "Leases of readers.", readers)
        slots = sum(each.slots for each in sources)
        yield gauge("mx_source_slots", "Slots in use: chunks that are read now.", slots)
        streams = sum(each.streams for each in sources)
        yield gauge("mx_source_streams", "Open streams to other pulls.", streams)

    def _moved(self, open_pulls: list[Open]) -> Metric:
        given = counters.totals(counters.GIVEN_BYTES)
        for each in list(server.running):
            given += each.given_bytes()
        found = CounterMetricFamily(
            "mx_transfer_bytes",
            "Bytes of weights, by transport and direction: received and verified, or given.",
            labels=["transport", "direction"],
        )
        received = self.pulls.received(open_pulls)
        for direction, counts in (("received", received), ("given", given)):
            for transport, nbytes in sorted(counts.items()):
                found.add_metric([transport, direction], nbytes)
        return found


def _of_cache(cache: Cache) -> Iterator[Metric]:
    now = cache.figures()
    yield gauge("mx_cache_held_bytes", "Bytes of models in the cache.", now.held_bytes)
    yield gauge("mx_cache_budget_bytes", "What all models may have.", now.budget_bytes)
    yield gauge(
        "mx_cache_lingering_bytes",
        "Bytes of models that were evicted and are still mapped.",
        now.lingering_bytes,
    )
    yield gauge("mx_cache_models", "Models in the cache.", now.models)
    yield gauge("mx_cache_arriving", "Models that are being pulled, or wait for it.", now.arriving)
    yield counter("mx_cache_evictions", "Models that were evicted.", now.evictions)


#: What engines in this process count, by metric: the module, if it is there, and its function.
_ENGINES = (
    ("mx_graphs", "CUDA graphs, by what became of them.", "mx.graphs.restore", "counts"),
    (
        "mx_compile_caches",
        "Compile caches, by what engines made of them.",
        "mx.engines.compiling",
        "compile_counts",
    ),
)


def _of_engines() -> Iterator[Metric]:
    for name, text, module, function in _ENGINES:
        if module in sys.modules:  # else nothing was counted
            yield counter(name, text, getattr(sys.modules[module], function)(), "outcome")
