"""Serves the metrics of this process while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import platform
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from mx import config, runtime, trace
from mx.api.common import tls_of
from mx.errors import ConfigError
from mx.log import event
from mx.wire.address import require_protection
from mx.wire.tls import check_server_files

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

    from mx.coordinator.daemon import Coordinator

_log = logging.getLogger(__name__)

#: How long a scrape waits for the event loop. Prometheus gives up after 10 s by default.
BUSY_S = 8.0
#: What was read is the answer to all scrapes for so long: many of them cost no more than one.
FRESH_S = 0.25

#: Begins what it is given on the event loop that has the objects.
Submit = Callable[[Callable[[], Coroutine[Any, Any, "list[Metric]"]]], "Future[list[Metric]]"]


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
        NotAllowedError: The certificate is not for this address.
        LocalError: The address can't be listened on.
    """
    if not settings.metrics:
        yield ""
        return
    try:
        import prometheus_client
    except ImportError:
        raise ConfigError(
            f"{settings.origin('metrics')}: metrics need prometheus_client",
            hint="pip install 'mx-peer[metrics]'",
        ) from None
    from mx.metrics.listener import Listener

    tls = tls_of(settings)
    require_protection(settings.metrics, tls=tls, insecure=settings.insecure, verb="listen on")
    if tls is not None:
        check_server_files(tls, "")
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.ProcessCollector(registry=registry)
    with contextlib.ExitStack() as stack:
        scraped = _scraped(registry, settings, coordinator, stack)
        listener = Listener(settings.metrics, scraped.render, tls)
        stack.callback(listener.stop)
        listener.start()
        event(_log, "metrics.listening", address=listener.address, tls=tls is not None)
        yield listener.address


def _scraped(
    registry: CollectorRegistry,
    settings: config.Settings,
    coordinator: Coordinator | None,
    stack: contextlib.ExitStack,
) -> _Scraped:
    from mx.metrics.families import of_process

    if coordinator is not None:
        from mx.metrics.coordinators import CoordinatorMetrics

        read = CoordinatorMetrics(settings.state.partition(":")[0])
        _ = coordinator.figures  # begins to count
        loop = asyncio.get_running_loop()

        async def of_coordinator() -> list[Metric]:
            return [*of_process(), *read.read(coordinator)]

        def submit(work: Any) -> Future[list[Metric]]:
            return asyncio.run_coroutine_threadsafe(work(), loop)

        return _Scraped(registry, of_coordinator, submit, "coordinator")
    from mx.metrics.transfers import TransferMetrics

    transfers = TransferMetrics(registry)
    stack.enter_context(trace.listening(transfers.pulls))

    async def of_transfers() -> list[Metric]:
        return [*of_process(), *transfers.read()]

    return _Scraped(registry, of_transfers, runtime.submit, "peer")


class _Scraped:
    """Renders metrics: those of a registry, and those that `read` returns on the objects' loop."""

    def __init__(
        self,
        registry: CollectorRegistry,
        read: Callable[[], Coroutine[Any, Any, list[Metric]]],
        submit: Submit,
        role: str,
    ) -> None:
        from prometheus_client import Gauge, Info

        import mx

        self._registry = registry
        self._read = read
        self._submit = submit
        self._found: list[Metric] = []
        self._read_s = float("-inf")
        self._lock = asyncio.Lock()
        build = Info("mx_build", "The version of mx, and what the process is.", registry=registry)
        build.info({"version": mx.__version__, "python": platform.python_version(), "role": role})
        self._wait = Gauge(
            "mx_event_loop_wait_seconds",
            "How long the last scrape waited for the event loop, and what it reads there took.",
            registry=registry,
        )
        registry.register(self)

    def collect(self) -> list[Metric]:
        """Return what was read last, for the registry."""
        return self._found

    async def render(self, accept: str) -> tuple[str, bytes]:
        """Return the type of the content and the content, as `mx.metrics.listener.Render`."""
        from prometheus_client.exposition import choose_encoder

        async with self._lock:
            asked_s = time.monotonic()
            if asked_s - self._read_s > FRESH_S:
                async with asyncio.timeout(BUSY_S):
                    self._found = await asyncio.wrap_future(self._submit(self._read))
                self._read_s = time.monotonic()
                self._wait.set(self._read_s - asked_s)
            encode, kind = choose_encoder(accept)
            return kind, encode(self._registry)
