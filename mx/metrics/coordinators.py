"""The metrics of a coordinator."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from mx.coordinator.daemon import Coordinator
from mx.metrics.families import counter, gauge, gauges
from mx.metrics.labels import Names


class CoordinatorMetrics:
    """Reads the metrics of this process's coordinator; on its event loop."""

    def __init__(self, state: str = "memory") -> None:
        """
        Args:
            state: What the state is kept in: "memory", "sqlite" or "redis".
        """
        self._state = state
        self._names = Names()

    def read(self, coordinator: Coordinator) -> Iterator[Metric]:
        """Yield the metrics of this moment."""
        now = coordinator.figures.snapshot()
        sources = self._names.labelled(now.sources, time.monotonic())
        yield gauges(
            "mx_coordinator_sources",
            "Sources that are listed, each with a lease, by model.",
            sources,
            "model",
        )
        yield gauge("mx_coordinator_models", "Names of models that have sources.", len(now.sources))
        yield gauges("mx_coordinator_streams", "Open streams, by kind.", now.streams, "kind")
        yield gauges(
            "mx_coordinator_pulls",
            "Pulls that have reported lately, by phase.",
            dict.fromkeys(("running", "complete", "failed"), 0) | now.pulls,
            "phase",
        )
        yield counter(
            "mx_coordinator_registrations",
            "Sources that were listed, or came back, since this process counts.",
            now.came,
        )
        yield counter(
            "mx_coordinator_sources_gone", "Sources that left, by reason.", now.gone, "reason"
        )
        yield gauge("mx_coordinator_document_bytes", "Bytes of documents held.", now.document_bytes)
        yield gauges(
            "mx_coordinator_state_info", "What the state is kept in.", {self._state: 1}, "kind"
        )
        yield counter("mx_coordinator_epoch_changes", "Changes of the state's epoch.", now.epochs)
