"""Serves the metrics of this process while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import platform
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, TypeVar

from mx import config, counters, runtime, trace
from mx.errors import ConfigError, install_hint
from mx.log import event
from mx.metrics.labels import OTHER
from mx.wire.address import require_protection, tls_of

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from mx.coordinator.daemon import Coordinator
    from mx.wire.principals import Caller

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

#: How long a scrape waits for the event loop. Prometheus gives up after 10 s by default.
BUSY_S = 8.0
#: What was read is the answer to all scrapes for so long: many of them cost no more than one.
FRESH_S = 0.25

_Read = Callable[[], "Iterator[Metric]"]
#: Begins work on the event loop that has the objects.
_Submit = Callable[[Callable[[], Coroutine[Any, Any, "list[Metric]"]]], "Future[list[Metric]]"]


@contextlib.contextmanager
def exporting(settings: config.Settings, coordinator: Coordinator | None = None) -> Iterator[str]:
    """Serve this process's metrics at `http://HOST:PORT/metrics` during the block.

    Args:
        settings: The settings; `metrics` says where. If it is "", nothing is served, or imported.
        coordinator: What is measured, on the event loop that runs here; None: the sources, pulls
            and cache of this process, which run on mx's own.

    Returns:
        A context manager, whose value is the HOST:PORT; "" if nothing is served.

    Raises:
        ConfigError: prometheus_client is not installed; or the address is beyond this machine, and
            there are neither TLS files nor `insecure`; or a file is wrong.
        NotAllowedError: The certificate is not for servers, or has expired.
        LocalError: The address can't be listened on.
    """
    if not settings.value("metrics"):
        yield ""
        return
    try:
        import prometheus_client as prometheus
        from prometheus_client.exposition import choose_encoder
    except ImportError:
        raise ConfigError(
            f"{settings.origin('metrics')}: metrics need prometheus_client",
            hint=install_hint("metrics"),
        ) from None
    import mx
    from mx.metrics.listener import Listener

    tls = tls_of(settings)
    require_protection(
        settings.value("metrics"), tls=tls, insecure=settings.insecure, verb="listen on"
    )
    registry = prometheus.CollectorRegistry()
    prometheus.ProcessCollector(registry=registry)
    role = "peer" if coordinator is None else "coordinator"
    about = {"version": mx.__version__, "python": platform.python_version(), "role": role}
    prometheus.Info("mx_build", "The version of mx.", registry=registry).info(about)

    def render(accept: str, caller: Caller) -> tuple[str, bytes]:
        encode, kind = choose_encoder(accept)
        submit = runtime.submit if coordinator is None else on_loop
        sees = submit(lambda: _observing(coordinator, caller)).result(BUSY_S)
        return kind, encode(Shown(registry, sees))

    def on_loop(work: Callable[[], Coroutine[Any, Any, _T]]) -> Future[_T]:
        return asyncio.run_coroutine_threadsafe(work(), loop)

    with contextlib.ExitStack() as stack:
        if coordinator is not None:
            from mx.metrics.coordinators import CoordinatorMetrics

            read = CoordinatorMetrics(settings.state.partition(":")[0]).read
            _ = coordinator.figures  # begins to count
            loop = asyncio.get_running_loop()
            collector = MetricsCollector(lambda: read(coordinator), on_loop)
        else:
            from mx.metrics.transfers import TransferMetrics

            transfers = TransferMetrics(registry)
            stack.enter_context(trace.listening(transfers.pulls))
            collector = MetricsCollector(transfers.read, runtime.submit)
        registry.register(collector)
        listener = Listener(settings.value("metrics"), render, tls)
        stack.callback(listener.stop)
        stack.callback(collector.end)
        listener.start()
        event(_log, "metrics.listening", address=listener.address, tls=tls is not None)
        yield listener.address


async def _observing(coordinator: Coordinator | None, caller: Caller) -> Callable[[str], bool]:
    """Return what says of which models a caller may see the metrics, on the loop, by the policies
    of what runs here. Raises NotAllowedError if it is none."""
    from mx.core.policy import Right
    from mx.source import server

    found = [each.access for each in server.running]
    held = [each for each in (getattr(coordinator, "access", None), *found) if each is not None]
    for access in held:
        access.require(caller, (Right.OBSERVE,), action="metrics")
    return lambda model: all(each.allows(caller, (Right.OBSERVE,), model) for each in held)


class Shown:
    """What one caller may see of a registry: models that it may not observe are one, `OTHER`."""

    def __init__(self, registry: Any, sees: Callable[[str], bool]) -> None:
        """
        Args:
            registry: The registry.
            sees: Says of which models it may.
        """
        self._registry = registry
        self._sees = sees

    def collect(self) -> Iterator[Metric]:
        """Yield its metrics."""
        from prometheus_client.metrics_core import Metric

        for metric in self._registry.collect():
            shown = Metric(metric.name, metric.documentation, metric.type, metric.unit)
            hidden: dict[tuple[str, tuple[tuple[str, str], ...]], Any] = {}
            for sample in metric.samples:
                if "model" not in sample.labels or self._sees(sample.labels["model"]):
                    shown.samples.append(sample)
                    continue
                labels = {**sample.labels, "model": OTHER}
                key = sample.name, tuple(labels.items())
                value = sample.value + (hidden[key].value if key in hidden else 0)
                hidden[key] = sample._replace(labels=labels, value=value)
            shown.samples += hidden.values()
            yield shown


class MetricsCollector:
    """Reads metrics on an event loop, for threads, one at a time."""

    def __init__(self, read: _Read, submit: _Submit) -> None:
        """
        Args:
            read: Returns the metrics; called on the loop.
            submit: Begins work on the loop.
        """
        self._read = read
        self._submit = submit
        self._lock = threading.Lock()
        self._found: list[Metric] = []
        self._found_s = float("-inf")
        self._reading: Future[list[Metric]] | None = None
        self._ended = False

    def describe(self) -> list[Metric]:
        """Return nothing: what there is depends on what runs."""
        return []

    def collect(self) -> list[Metric]:
        """Return the metrics of this moment.

        Raises:
            TimeoutError: The loop is too busy, or the metrics have ended.
        """
        from mx.metrics.families import ERRORS, counter, gauge

        with self._lock:
            asked_s = time.monotonic()
            if asked_s - self._found_s < FRESH_S:
                return self._found

            async def on_loop() -> list[Metric]:
                refused = ERRORS | counters.totals(counters.REFUSED)
                return [
                    gauge("mx_tasks", "Tasks of the event loop.", len(asyncio.all_tasks())),
                    counter("mx_requests_refused", "Requests refused.", refused, "error"),
                    *self._read(),
                ]

            self._reading = self._submit(on_loop)
            try:
                if self._ended:
                    raise TimeoutError
                found = self._reading.result(BUSY_S)
            except CancelledError:
                raise TimeoutError from None
            finally:
                self._reading.cancel()
            self._found_s = time.monotonic()
            wait_s = self._found_s - asked_s
            waited = "Seconds that the last scrape waited for the event loop, and read there."
            self._found = [*found, gauge("mx_event_loop_wait_seconds", waited, wait_s)]
            return self._found

    def end(self) -> None:
        """End what is being read: the loop may be about to wait for the thread that waits."""
        self._ended = True
        if self._reading is not None:
            self._reading.cancel()
