"""Shows the pulls and the sources that a coordinator knows."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from mx import config
from mx.api.listing import CoordinatorUser
from mx.core.pull_status import PullStatus
from mx.core.reference import parse_reference
from mx.wire.client import CoordinatorClient
from mx.wire.listing import SourceStatus


@dataclass(frozen=True, slots=True)
class Overview:
    """The pulls and sources that a coordinator knew at one moment, oldest first."""

    pulls: tuple[PullStatus, ...]
    sources: tuple[SourceStatus, ...]


class Observer(CoordinatorUser):
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
        super().__init__(coordinator, settings)

    def look(self, model: str = "") -> Overview:
        """Return the current pulls and sources.

        Args:
            model: NAME, NAME:REVISION or NAME@PIN to show one model; empty shows all.

        Raises:
            CoordinatorError: The coordinator does not answer.
            ConfigError: `model` is not a model's name.
            ClosedError: The observer was closed.
        """
        return self._loop.run(self._look(self._open_client(), model))

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
