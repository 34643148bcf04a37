"""Families of metrics, as `prometheus_client` writes them, and those that every process has."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from mx import counters


def of_process() -> Iterator[Metric]:
    """Yield the metrics that every process has; on the event loop."""
    yield gauge("mx_tasks", "Tasks of the event loop.", len(asyncio.all_tasks()))
    yield counter(
        "mx_requests_refused",
        "Requests that were refused, by the error's name.",
        counters.totals(counters.REFUSED),
        "error",
    )


def gauge(name: str, text: str, value: float) -> Metric:
    """Return a metric that may go up and down."""
    return GaugeMetricFamily(name, text, value)


def gauges(name: str, text: str, values: Mapping[str, float], label: str) -> Metric:
    """Return such a metric with a value for each value of a label."""
    return _labelled(GaugeMetricFamily(name, text, labels=[label]), values)


def counter(name: str, text: str, values: Mapping[str, float] | float, label: str = "") -> Metric:
    """Return a count, or one for each value of a label; its name gets "_total"."""
    if isinstance(values, Mapping):
        return _labelled(CounterMetricFamily(name, text, labels=[label]), values)
    return CounterMetricFamily(name, text, values)


def _labelled(family: Any, values: Mapping[str, float]) -> Any:
    for label, value in sorted(values.items()):
        family.add_metric([label], value)
    return family
