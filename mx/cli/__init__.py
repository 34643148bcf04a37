"""The commands: argv -> settings -> mx.api. `mx` and `mx-coordinator` start here."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mx import config

__all__ = ["coordinator_main", "main"]

_EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `mx`; never returns."""
    with _interruptible():
        config.quieten_grpc()
        atexit.register(
            gc.freeze
        )  # or the exit looks at all objects, which takes as long as a pull
        from mx.cli.app import app
        from mx.cli.outcome import run

        run(app, "mx", arguments)


def coordinator_main(arguments: Sequence[str] | None = None) -> None:
    """Run `mx-coordinator`; never returns."""
    with _interruptible():
        config.quieten_grpc()
        from mx.cli.coordinator import app
        from mx.cli.outcome import run

        run(app, "mx-coordinator", arguments)


@contextmanager
def _interruptible() -> Iterator[None]:
    """End the process where it is interrupted while it is still importing."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(_EXIT_INTERRUPTED)
    except RuntimeError as error:  # Python 3.11 makes one of it while a class is made
        if isinstance(error.__cause__, KeyboardInterrupt):
            sys.exit(_EXIT_INTERRUPTED)
        raise
