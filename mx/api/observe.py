"""Shows the pulls and the sources that a coordinator knows."""

from __future__ import annotations

import asyncio
from typing import Self

from mx import config, runtime
from mx.api.closing import Closable, Step
from mx.api.common import tls_of
from mx.core.pull_status import PullStatus
from mx.core.reference import parse_reference
from mx.errors import ClosedError
from mx.records import record
from mx.wire.client import CoordinatorClient
from mx.wire.listing import SourceStatus


@record(frozen=True, slots=True)
class Overview:
    """The pulls and sources that a coordinator knew at one moment, oldest first."""

    pulls: tuple[PullStatus, ...]
    sources: tuple[SourceStatus, ...]


class Observer(Closable):
    """A connection to a coordinator that `look` reads from repeatedly; blocking.

    Close it, or use it as a context manager.
    """

    def __init__(
        self, *, coordinator: str | None = None, settings: config.Settings | None = None
    ) -> None:
        """Connect on first use.

        Args:
            coordinator: HOST:PORT; None takes the address in the settings.
            settings: Settings to use; None loads them from the environment and the files.

        Raises:
            ConfigError: A setting is wrong.
        """
        self._settings = settings = settings or config.load()
        self._coordinator = coordinator or settings.coordinator
        self._client: CoordinatorClient | None = None
        runtime.made(self._begin)

    async def _begin(self, loop: runtime.LoopThread) -> Self:
        self._client = CoordinatorClient(
            self._coordinator,
            tls=tls_of(self._settings),
            insecure=self._settings.insecure,
            timeout_s=self._settings.connect_timeout_s,
        )
        super().__init__(loop)
        return self

    def look(self, model: str = "") -> Overview:
        """Return the current pulls and sources.

        Args:
            model: NAME, NAME:REVISION or NAME@PIN to show one model; empty shows all.

        Raises:
            CoordinatorError: The coordinator does not answer.
            ConfigError: `model` is not a model's name.
            ClosedError: The observer was closed.
        """
        if self._client is None:
            raise ClosedError("the observer was closed")
        return self._loop.run(self._look(self._client, model))

    @staticmethod
    async def _look(client: CoordinatorClient, model: str) -> Overview:
        wanted = parse_reference(model)
        pulls, sources = await asyncio.gather(
            client.list_pulls(wanted.name), client.list_sources(wanted.name)
        )
        return Overview(
            tuple(each for each in pulls if wanted.fits_key(each.model)),  # without their pins
            tuple(each for each in sources if wanted.fits(each.record.model, each.record.ref)),
        )

    def _closing_steps(self) -> list[Step]:
        return [self._awaiting(self._disconnect)]

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()
