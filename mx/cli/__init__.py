"""The commands: argv -> settings -> mx.api. `mx` and `mx-coordinator` start here."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["coordinator_main", "main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `mx`; never returns."""
    from mx.cli.app import app
    from mx.cli.outcome import run

    run(app, "mx", arguments)


def coordinator_main(arguments: Sequence[str] | None = None) -> None:
    """Run `mx-coordinator`; never returns."""
    from mx.cli.coordinator import app
    from mx.cli.outcome import run

    run(app, "mx-coordinator", arguments)
