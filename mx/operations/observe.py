"""Shows the pulls and the sources that a coordinator knows."""

from __future__ import annotations

from mx import config
from mx.api.listing import CoordinatorUser
from mx.core.reference import parse_reference
from mx.wire.client import CoordinatorClient
from mx.wire.listing import Overview


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
        return (await client.overview(wanted.name)).of(wanted)
