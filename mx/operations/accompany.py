"""What accompanies a command that serves: metrics."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from mx.cli.additions import PullAddition
from mx.config import Settings
from mx.errors import ConfigError

if TYPE_CHECKING:
    from mx.coordinator.daemon import Coordinator


def measuring(
    settings: Settings, coordinator: Coordinator | None = None
) -> AbstractContextManager[object]:
    """Return a context in which this process's metrics are served, if the settings say where.

    Raises:
        MxError: As `mx.metrics.exporting`, when it is entered.
    """
    if not settings.value("metrics"):
        return nullcontext()
    from mx.metrics import exporting

    return exporting(settings, coordinator)


class _Metrics(PullAddition):
    """Refuses metrics of a pull that ends."""

    def check(self, context: Any, settings: Settings) -> None:
        if context.params["metrics"] is not None and not context.params["hold"]:
            raise ConfigError(
                "--metrics is for what stays, and this pull ends",
                hint="give --hold, or leave it out",
            )


METRICS = _Metrics()
