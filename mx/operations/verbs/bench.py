"""`mx bench`: how fast this machine moves weights, against bare references."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from mx.cli import options, outcome
from mx.errors import ConfigError, LocalError

#: What measures: in a clone of the repository, where an installation's copy may be of another
#: state, and as installed.
RUNNERS = ("benchmarks", "mx_benchmarks")
IN_CLONE = (Path(__file__).parents[2] / "benchmarks" / "rows.py").exists()


def bench(
    only: Annotated[
        str | None,
        typer.Option(help="Some of the rows, by name: attach,copy,tcp ...", metavar="NAMES"),
    ] = None,
    folder: Annotated[
        Path,
        typer.Option(help="Where checkpoints of a few GB are kept between runs.", metavar="DIR"),
    ] = Path(".bench"),
    rounds: Annotated[
        int, typer.Option(help="Interleaved rounds.", min=1, max=99, metavar="N")
    ] = 5,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Measure attach, copy, TCP, the swarm and more against bare references on this machine.

    Each row is a ratio (or a time) out of rounds that interleave mx with what it is compared
    with: one thread's memcpy, raw sockets that hash, bare reads of the disk that hash. Needs about
    12 GB of memory and 6 GB of disk, root for what has links of its own (`links`, `cpu`, `control`,
    `swarm`, `ucx-start`), and torch for `scattered`; takes long: `--only` picks rows.
    Exit code 0 says that everything was measured, not that every bar was met.

    **Examples**

    - `mx bench`

    - `mx bench --only attach,tcp --rounds 9 --json`
    """
    rows, harness = _module("rows"), _module("harness")
    wanted = None if only is None else tuple(name.strip() for name in only.split(","))
    unknown = [name for name in wanted or () if name not in rows.NAMES]
    if unknown:
        raise ConfigError(
            f"there is no row {', '.join(unknown)}", hint=f"there are: {', '.join(rows.NAMES)}"
        )
    found = rows.run(folder, outcome.say, wanted, rounds)
    if as_json:
        outcome.emit(harness.to_json(found))
        return
    table = Table(title=harness.machine(), title_justify="left", caption_justify="left")
    for column in ("work", "measured", "bar", "", "detail"):
        table.add_column(column, overflow="fold")
    for row in found:
        verdict = "" if row.bar == "none" else "met" if row.ok else "missed"
        table.add_row(row.work, f"{row.value:g} {row.unit}", row.bar, verdict, row.detail)
    outcome.notes().print(table)


def _module(name: str) -> Any:
    for package in RUNNERS if IN_CLONE else RUNNERS[1:]:
        try:
            return importlib.import_module(f"{package}.{name}")
        except ModuleNotFoundError as error:
            if error.name not in (package, f"{package}.{name}"):
                raise
    raise LocalError(
        "this installation has no benchmarks", hint="run make bench in a clone of the repository"
    )
