"""What accompanies a command that serves: metrics."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from mx.config import Settings

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
