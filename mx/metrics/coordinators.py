"""The metrics of a coordinator."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from mx.coordinator.daemon import Coordinator
from mx.core.registry import GONE
from mx.metrics.families import counter, gauge
from mx.metrics.labels import Names

_PHASES = dict.fromkeys(("running", "complete", "failed"), 0)


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
        now, name = coordinator.figures, "mx_coordinator_"
        sources = self._names.labelled(now.sources, time.monotonic())
        pulls = _PHASES | now.servicer.pulls_by_phase()
        yield gauge(f"{name}sources", "Sources listed, each with a lease.", sources, "model")
        yield gauge(f"{name}models", "Names of models that have sources.", len(now.sources))
        yield gauge(f"{name}streams", "Open streams.", now.servicer.streams(), "kind")
        yield gauge(f"{name}pulls", "Pulls that have reported lately.", pulls, "phase")
        yield counter(f"{name}registrations", "Sources that were listed, or came back.", now.came)
        gone = dict.fromkeys(GONE, 0) | now.gone
        yield counter(f"{name}sources_gone", "Sources that left.", gone, "reason")
        held_bytes = now.state.document_bytes
        yield gauge(f"{name}document_bytes", "Bytes of documents held.", held_bytes)
        yield gauge(f"{name}state_info", "Where the state is.", {self._state: 1}, "kind")
        doubt = now.state.store.doubt_until_s > now.state.now()
        yield gauge(f"{name}doubt", "1 while names bind by receipt only.", doubt)
        yield counter(f"{name}epoch_changes", "Changes of the state's epoch.", now.epochs)
