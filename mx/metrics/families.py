"""Families of metrics, as `prometheus_client` writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from mx import errors


def _is_error(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, errors.MxError)


_Family = TypeVar("_Family", GaugeMetricFamily, CounterMetricFamily)

#: What may end a pull or refuse a request. Known labels are there at 0: a count that is born at 1
#: has no increase, and an alert would miss its first event.
ERRORS = dict.fromkeys(
    [*sorted(name for name, kind in vars(errors).items() if _is_error(kind)), "ForgedState"], 0
)

#: One value, or one for each value of a label.
Values = Mapping[str, float] | float


def gauge(name: str, text: str, values: Values, label: str = "") -> GaugeMetricFamily:
    """Return a metric that may go up and down.

    Args:
        name: Its name.
        text: What it is.
        values: Its value, or its values by those of `label`.
        label: The name of the label.
    """
    return _filled(GaugeMetricFamily(name, text, labels=[label] if label else []), values)


def counter(name: str, text: str, values: Values, label: str = "") -> CounterMetricFamily:
    """Return a count, whose name gets "_total"; the arguments are those of `gauge`."""
    return _filled(CounterMetricFamily(name, text, labels=[label] if label else []), values)


def _filled(family: _Family, values: Values) -> _Family:
    if not isinstance(values, Mapping):
        family.add_metric([], values)
        return family
    for each, value in sorted(values.items()):
        family.add_metric([each], value)
    return family
