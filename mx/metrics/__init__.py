"""Metrics of a process for Prometheus, at `http://HOST:PORT/metrics`.

    with mx.metrics.exporting(settings):  # where the setting `metrics` says
        ...

Nearly all is read when it is asked for, on the event loop, from the objects that count it. What
pulls are and were comes from their trace spans (`mx.metrics.transfers`).
The modules that need `prometheus_client` are imported only where metrics are wanted.
"""

from mx.metrics.exporter import exporting

__all__ = ["exporting"]
