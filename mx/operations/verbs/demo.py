"""`mx demo`: the main job on this machine, between real processes, with a real model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mx.cli import options, outcome


@options.takes_settings
def demo(
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Your own: a safetensors file or a folder of them. "
            "(default: a small real model, and a random Llama of 1 GB)",
            metavar="DIR",
        ),
    ] = None,
    hold: Annotated[
        bool,
        typer.Option(
            "--hold", help="At the end serve it once more, for pulls of your own, until Ctrl-C."
        ),
    ] = False,
    *,
    as_json: bool,
) -> None:
    """Serve, coordinate and pull a real model between real processes on this machine.

    Starts a coordinator with its page (`mx web`), whose address to open in a browser it prints, a
    source and, one after the other, pulls by each path; shows the layers
    come, then what moved, how fast against a memcpy measured in between, and whether the pulled
    weights compute what those on disk do. It leaves no process and no file behind.

    **Examples**

    - `mx demo`

    - `mx demo --checkpoint /models/llama-8b --hold`
    """
    from mx.operations.demo.run import run

    rows = run(checkpoint, Console(stderr=as_json, highlight=False), hold=hold)
    if as_json:
        outcome.emit({"pulls": [row.to_json() for row in rows]})
