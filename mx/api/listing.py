"""Lists the models and sources that a coordinator knows."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

from mx import config, runtime
from mx.api.closing import Closable, Step
from mx.api.common import client_of
from mx.core.answers import ModelStatus
from mx.core.reference import parse_reference
from mx.errors import ClosedError
from mx.wire.client import CoordinatorClient
from mx.wire.listing import SourceStatus

T = TypeVar("T")


def list_models(
    *, coordinator: str | None = None, settings: config.Settings | None = None
) -> list[ModelStatus]:
    """Return every model that the coordinator knows.

    Args:
        coordinator: HOST:PORT; None takes the address in the settings.
        settings: Settings to use; None loads them from the environment and the files.

    Raises:
        CoordinatorError: The coordinator does not answer.
        ConfigError: A setting is wrong.
    """
    return ask(lambda client: client.list_models(), coordinator, settings)


def list_sources(
    model: str = "", *, coordinator: str | None = None, settings: config.Settings | None = None
) -> list[SourceStatus]:
    """Return every registered source with its lease.

    Args:
        model: NAME, NAME:REVISION or NAME@PIN to list only its sources; empty lists all.
        coordinator: HOST:PORT; None takes the address in the settings.
        settings: Settings to use; None loads them from the environment and the files.

    Raises:
        CoordinatorError: The coordinator does not answer.
        ConfigError: `model` or a setting is wrong.
    """
    wanted = parse_reference(model)
    found = ask(lambda client: client.list_sources(wanted.name), coordinator, settings)
    return [each for each in found if wanted.fits(each.record.model, each.record.ref)]


def ask(
    question: Callable[[CoordinatorClient], Coroutine[Any, Any, T]],
    coordinator: str | None,
    settings: config.Settings | None,
) -> T:
    """Ask a coordinator, and return its answer. Blocks.

    Args:
        question: Called with a client, on the loop.
        coordinator: HOST:PORT; None takes the address in the settings.
        settings: Settings to use; None loads them from the environment and the files.

    Raises:
        MxError: What `question` raises.
    """
    found = settings or config.load()
    return runtime.run(lambda: asking(question, coordinator, found))


async def asking(
    question: Callable[[CoordinatorClient], Coroutine[Any, Any, T]],
    coordinator: str | None,
    settings: config.Settings,
) -> T:
    """Ask as `ask` does; on the loop."""
    async with client_of(settings, coordinator) as client:
        return await question(client)


class CoordinatorUser(Closable):
    """What asks one coordinator again and again, until it is closed. `coordinator` is HOST:PORT."""

    def __init__(self, coordinator: str | None, settings: config.Settings | None) -> None:
        """Connect on first use; the arguments are those of `ask`. Raises ConfigError."""
        self._settings = settings = settings or config.load()
        self.coordinator = coordinator or settings.coordinator
        self._client: CoordinatorClient | None = None
        runtime.made(self._begin)

    async def _begin(self, loop: runtime.LoopThread) -> Self:
        self._client = client_of(self._settings, self.coordinator)
        super().__init__(loop)
        return self

    def _open_client(self) -> CoordinatorClient:
        self._require_own()
        if self._client is None:
            raise ClosedError(f"the {type(self).__name__.lower()} was closed")
        return self._client

    def _closing_steps(self) -> list[Step]:
        return [self._awaiting(self._disconnect)]

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()
