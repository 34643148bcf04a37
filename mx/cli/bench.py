"""`mx bench`: how fast this machine moves weights, against bare references."""

from __future__ import annotations

import importlib
import importlib.util

import typer

from mx.errors import LocalError

#: What measures; takes the arguments after `mx bench` and returns the exit code.
RUNNER = "mx.bench"
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def bench(context: typer.Context) -> None:
    """Measure attach, copy and TCP against bare references on this machine.

    **Example**

    - `mx bench --json`
    """
    if importlib.util.find_spec(RUNNER) is None:
        raise LocalError(
            f"this installation has no benchmarks ({RUNNER} is missing)",
            hint="run make bench in a clone of the repository",
        )
    raise typer.Exit(importlib.import_module(RUNNER).main(list(context.args)))
