"""The commands: argv -> settings -> mx.api. `mx` and `mx-coordinator` start here."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mx import config

__all__ = ["coordinator_main", "main"]

_EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `mx`; never returns."""
    try:
        config.quieten_grpc()
        from mx.cli.app import app
        from mx.cli.outcome import run

        run(app, "mx", arguments)
    except KeyboardInterrupt:  # while it was still importing
        sys.exit(_EXIT_INTERRUPTED)


def coordinator_main(arguments: Sequence[str] | None = None) -> None:
    """Run `mx-coordinator`; never returns."""
    try:
        config.quieten_grpc()
        from mx.cli.coordinator import app
        from mx.cli.outcome import run

        run(app, "mx-coordinator", arguments)
    except KeyboardInterrupt:
        sys.exit(_EXIT_INTERRUPTED)
