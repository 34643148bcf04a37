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
from mx.metrics.families import counter, gauge
from mx.metrics.labels import Names
from mx.metrics.pulls import Open, Pulls
from mx.source import server

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
