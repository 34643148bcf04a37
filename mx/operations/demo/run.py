"""The demo: serve a model, pull it by each path, compare what the pulled weights compute."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import mmap
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mx import api
from mx.errors import ConfigError, IntegrityError, install_hint
from mx.operations.demo import first_token, models
from mx.operations.demo.processes import Child
from mx.units import GB, count, format_bytes, format_rate, format_seconds

START_TIMEOUT_S = 60.0
#: Reading, moving and checking a model may take long on a slow disk, but not forever.
WORK_TIMEOUT_S = 1800.0

#: How long a pull takes from the source that `hold` leaves.
HELD_PULL_S = 20

#: What is shown, and the arguments that select it in `mx pull` and in `mx.pull`.
PATHS: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...] = (
    ("attach, no copy", (), {}),
    ("copy by shm", ("--no-attach", "--transport", "shm"), {"attach": False, "transport": "shm"}),
    ("tcp on loopback", ("--transport", "tcp"), {"transport": "tcp"}),
)

_MEMCPY_ROUNDS = 3


@dataclass(frozen=True)
class Memcpy:
    """Speeds of one thread's memcpy, in decimal gigabytes per second.

    Attributes:
        fresh_gb_per_s: Into memory that the process touches for the first time.
        warm_gb_per_s: Into memory that it wrote just before.
    """

    fresh_gb_per_s: float
    warm_gb_per_s: float


def measure_memcpy(nbytes: int) -> Memcpy:
    """Copy between two anonymous maps that may have huge pages, a few times.

    Args:
        nbytes: What one copy moves; more than 0. Twice as much memory is allocated.

    Returns:
        The median speeds.
    """

    def new() -> mmap.mmap:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def timed(target: memoryview) -> float:
        start = time.perf_counter()
        target[:] = source_view
        return nbytes / (time.perf_counter() - start) / 1e9

    fresh, warm = [], []
    with new() as source, memoryview(source) as source_view:
        source_view[:] = b"\x5a" * nbytes
        for _ in range(_MEMCPY_ROUNDS):
            with new() as target, memoryview(target) as target_view:
                fresh.append(timed(target_view))
                warm.append(timed(target_view))
    return Memcpy(statistics.median(fresh), statistics.median(warm))


@dataclass(frozen=True)
class Row:
    """One pull: the report of `mx pull --json`, and whether its weights compute the same.

    `memcpy` was measured beside it, with as many bytes as the model has (1 GB at most).
    """

    model: str
    path: str
    report: dict[str, Any]
    verdict: models.ComparisonResult
    memcpy: Memcpy

    def to_json(self) -> dict[str, object]:
        """Return the row as `mx demo --json` prints it."""
        return {
            "model": self.model,
            "path": self.path,
            "pull": self.report,
            "same": self.verdict.same,
            "compared": self.verdict.how,
            "memcpy_fresh_gb_per_s": round(self.memcpy.fresh_gb_per_s, 3),
            "memcpy_warm_gb_per_s": round(self.memcpy.warm_gb_per_s, 3),
        }


def run(checkpoint: Path | None, console: Console, *, hold: bool = False) -> list[Row]:
    """Start a coordinator and its page, then serve and pull each model; show it on `console`.

    Every process has ended and every file is removed when this returns or raises.

    Args:
        checkpoint: A safetensors file or a folder of them. None stands for a small real model and
            a random Llama of 1 GB.
        console: Where the processes, the layers as they come and the tables go.
        hold: At the end serve the model once more, until Ctrl-C, for pulls of the user's own.

    Returns:
        A row for each model and path.

    Raises:
        ConfigError: There is no checkpoint, and nothing to make one with.
        IntegrityError: Pulled weights do not compute what those on disk do.
        MxError: What one of the processes failed with.
    """
    rows: list[Row] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mx-demo-")))
        coordinator = stack.enter_context(
            _command("coordinator", ["--listen", "127.0.0.1:0"], folder)
        )
        address = str(coordinator.answer(START_TIMEOUT_S)["listen"])
        console.print(f"[bold]coordinator[/]  process {coordinator.pid} at {address}")
        page = _start_page(stack, folder, address, console)
        for example in _examples(folder, checkpoint, console):
            rows += _show(example, folder, address, console)
        # Of its own models the larger one would take long, and show no more.
        model = models.random_llama(folder, small=True) if checkpoint is None else example
        if model is not None and first_token.generates(model.path):
            _show_first_token(model, folder, address, console)
        _sum_up(rows, console)
        if hold:
            _hold(example, int(rows[-1].report["bytes"]), folder, address, page, console)
    return rows


def _sum_up(rows: Sequence[Row], console: Console) -> None:
    """Print the tables. Raises IntegrityError if a pulled model differs."""
    for name in dict.fromkeys(row.model for row in rows):
        console.print()
        console.print(_table([row for row in rows if row.model == name]))
    for row in rows:
        if not row.verdict.same:
            raise IntegrityError(f"{row.model}, {row.path}: weights differ: {row.verdict.how}")
    console.print("\n[green]Every pulled model is the same as the one on disk.[/]")


def _start_page(stack: ExitStack, folder: Path, coordinator: str, console: Console) -> str:
    """Start the page, for as long as the stack lasts. Returns its URL; "" without its libraries."""
    if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn")):
        console.print("[bold]page[/]         not shown:", escape(install_hint("web")))
        return ""
    arguments = ["--listen", "127.0.0.1:0", "--coordinator", coordinator]
    page = stack.enter_context(_command("web", arguments, folder))
    url = str(page.answer(START_TIMEOUT_S)["url"])
    console.print(f"[bold]page[/]         process {page.pid}: open [bold]{url}[/] in a browser")
    return url


def _hold(
    example: models.Example,
    nbytes: int,
    folder: Path,
    coordinator: str,
    page: str,
    console: Console,
) -> None:
    """Serve a model as over a link, and say how to pull it, until Ctrl-C."""
    rate = max(1_000_000, nbytes // HELD_PULL_S)
    arguments = [str(example.path), "--model", example.name, "--coordinator", coordinator]
    with _command("serve", [*arguments, "--max-bandwidth", str(rate)], folder) as source:
        source.answer(WORK_TIMEOUT_S)
        console.print(
            f"\n[bold]your turn[/]    a source sends {example.name} at {format_rate(rate)}. In "
            f"another terminal:\n  mx pull {example.name} --coordinator {coordinator} --no-attach"
        )
        if page:
            console.print(f"and see it on {page}")
        console.print("Ctrl-C ends the demo.")
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


def _command(verb: str, arguments: Sequence[str], folder: Path, *, shown: bool = False) -> Child:
    """Start a command. What it says goes to a log in `folder`, or is `shown`."""
    # The user's configuration file is not the demo's.
    arguments = [*arguments, "--config", "/dev/null"]
    log = None if shown else folder / f"{verb}.log"
    if verb == "coordinator":
        return Child(verb, "mx.cli.coordinator", arguments, log)
    return Child(f"mx {verb}", "mx", [verb, *arguments], log)


def _examples(folder: Path, own: Path | None, console: Console) -> Iterator[models.Example]:
    """Yield what to move. A model that is made for this is written into `folder`."""
    if own is not None:
        yield models.Example("model", own, "your own")
        return
    small = models.bundled()
    if small is not None:
        yield small
    console.print("\nwriting a larger model: a Llama with random weights ...")
    large = models.random_llama(folder)
    if large is not None:
        yield large
    elif small is None:
        raise ConfigError(
            "there is no model to show: the demo's own need torch and transformers",
            hint=f"name one with `checkpoint=DIR`, or {install_hint('demo')}",
        )


def _show(example: models.Example, folder: Path, coordinator: str, console: Console) -> list[Row]:
    """Serve one model, pull it by each path and compare. The source ends with this call."""
    where = ["--coordinator", coordinator]
    arguments = [str(example.path), "--model", example.name, *where]
    rows = []
    with _command("serve", arguments, folder) as source:
        served = source.answer(WORK_TIMEOUT_S)
        console.print(
            f"\n[bold]source[/]       process {source.pid} at {served['endpoint']}: "
            f"{example.about}, {format_bytes(served['bytes'])} in "
            f"{count(served['layers'], 'layer')}"
        )
        reference = models.Reference(example.path)
        speeds = measure_memcpy(min(GB, max(1, int(served["bytes"]))))
        for path, flags, keywords in PATHS:
            with _command("pull", [example.name, *where, *flags], folder, shown=True) as target:
                console.print(f"[bold]target[/]       process {target.pid}: {path}")
                report = target.answer(WORK_TIMEOUT_S)
                target.wait(START_TIMEOUT_S)
            verdict = _compare(example.name, coordinator, keywords, reference)
            rows.append(Row(example.name, path, report, verdict, speeds))
    return rows


def _show_first_token(
    example: models.Example, folder: Path, coordinator: str, console: Console
) -> None:
    """Serve a model as over a link, and show when it makes its first token.

    Raises:
        IntegrityError: It gives another token while it arrives than afterwards.
    """
    name = f"{example.name}-over-a-link"
    nbytes = sum(file.stat().st_size for file in example.path.glob("*.safetensors"))
    rate = first_token.rate_of(nbytes)
    arguments = [str(example.path), "--model", name, "--coordinator", coordinator]
    with _command("serve", [*arguments, "--max-bandwidth", str(rate)], folder) as source:
        source.answer(WORK_TIMEOUT_S)
        console.print(
            f"\n[bold]first token[/]  {example.about}, {format_bytes(nbytes)}, from a source that "
            f"sends {format_rate(rate)} at most, as over a link; a prompt of {first_token.PROMPT} "
            "tokens, computed with one thread"
        )
        try:
            found = first_token.measure(name, coordinator, nbytes)
        except ConfigError as error:
            console.print(f"              not shown: {error}")
            return
    often = f"the median of {found.rounds}" if found.rounds > 1 else "measured once"
    console.print(
        f"  {format_seconds(found.loaded_s):>7}  all layers have arrived ({often})\n"
        f"  {format_seconds(found.sequential_s):>7}  the first token, if the model computes when "
        f"all layers have arrived\n"
        f"  {format_seconds(found.progressive_s):>7}  the first token, if each layer computes as "
        f"soon as it has arrived"
    )
    if not found.same:
        raise IntegrityError(f"{example.name}: the first token differs while layers arrive")


def _compare(
    name: str, coordinator: str, keywords: dict[str, Any], reference: models.Reference
) -> models.ComparisonResult:
    """Pull once more, by the same path, into this process; then load the weights and compute."""
    with api.pull(name, coordinator=coordinator, **keywords) as pull:
        verdict = reference.compare(pull.state_dict())
    gc.collect()  # modules hold their tensors in cycles; the next pull needs the memory
    return verdict


def _table(rows: Sequence[Row]) -> Table:
    """Return a table of one model's pulls."""
    speeds = rows[0].memcpy
    table = Table(
        title=f"{rows[0].model}: {format_bytes(rows[0].report['bytes'])}",
        caption=f"memcpy, one thread: {speeds.fresh_gb_per_s:.2f} GB/s into fresh memory (1 x), "
        f"{speeds.warm_gb_per_s:.2f} into warm memory\nsame: {rows[0].verdict.how}",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE,
        pad_edge=False,
    )
    table.add_column("path", no_wrap=True)
    for name in ("first layer", "all layers", "GB/s", "x memcpy"):
        table.add_column(name, justify="right")
    table.add_column("verified")
    table.add_column("same")
    for row in rows:
        report = row.report
        # Attaching copies nothing, so a rate of it would say nothing.
        attached = row.path.startswith("attach")
        table.add_row(
            row.path,
            format_seconds(report["first_layer_s"]),
            format_seconds(report["seconds"]),
            "" if attached else f"{report['gb_per_s']:.2f}",
            "" if attached else f"{report['gb_per_s'] / speeds.fresh_gb_per_s:.2f}",
            str(report["verified"]),
            "[green]yes[/]" if row.verdict.same else "[red]no[/]",
        )
    return table
