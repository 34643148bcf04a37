"""`--metrics` of `mx pull`."""

from __future__ import annotations

from typing import Any

from mx.cli.additions import PullAddition
from mx.config import Settings
from mx.errors import ConfigError


class _Metrics(PullAddition):
    """Refuses metrics of a pull that ends."""

    def check(self, context: Any, settings: Settings) -> None:
        if context.params["metrics"] is not None and not context.params["hold"]:
            raise ConfigError(
                "--metrics is for what stays, and this pull ends",
                hint="give --hold, or leave it out",
            )


METRICS = _Metrics()
