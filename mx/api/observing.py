"""Looking at what goes on: who pulls what, who serves it."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

from mx import config, runtime
from mx.api.common import tls_of
from mx.core.pulls import PullStatus
from mx.wire.client import CoordinatorClient, SourceStatus


@dataclass(frozen=True, slots=True)
class Overview:
    """What a coordinator knew at one moment, each the oldest first."""

    pulls: tuple[PullStatus, ...]
    sources: tuple[SourceStatus, ...]


class Observer:
    """One connection to a coordinator, to look again and again. Close it, or use it as a context
    manager; blocking."""

    def __init__(
        self, *, coordinator: str | None = None, settings: config.Settings | None = None
    ) -> None:
        """Raises ConfigError."""
        settings = settings or config.load()
        self._loop = runtime.acquire()
        try:
            self._client = self._loop.run(self._dial(coordinator or settings.coordinator, settings))
        except BaseException:
            runtime.release(self._loop)
            raise

    @staticmethod
    async def _dial(address: str, settings: config.Settings) -> CoordinatorClient:
        return CoordinatorClient(
            address,
            tls=tls_of(settings),
            insecure=settings.insecure,
            timeout_s=settings.connect_timeout_s,
        )

    def look(self, model: str = "") -> Overview:
        """Everything, or what concerns one model. Raises CoordinatorError."""
        return self._loop.run(self._look(model))

    async def _look(self, model: str) -> Overview:
        pulls = await self._client.list_pulls(model)
        return Overview(tuple(pulls), tuple(await self._client.list_sources(model)))

    def close(self) -> None:
        """Once."""
        try:
            self._loop.run(self._client.close())
        finally:
            runtime.release(self._loop)

    def __enter__(self) -> Observer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
