"""Families of metrics, as `prometheus_client` writes them, and those that every process has."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

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
    family = GaugeMetricFamily(name, text, labels=[label])
    for each, value in sorted(values.items()):
        family.add_metric([each], value)
    return family


def counter(name: str, text: str, values: Mapping[str, float] | float, label: str = "") -> Metric:
    """Return a count, or one for each value of a label; its name gets "_total"."""
    if not isinstance(values, Mapping):
        return CounterMetricFamily(name, text, values)
    family = CounterMetricFamily(name, text, labels=[label])
    for each, value in sorted(values.items()):
        family.add_metric([each], value)
    return family
