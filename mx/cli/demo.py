"""`mx demo`: the main job on this machine, between real processes, with a real model."""

from __future__ import annotations

import gc
import mmap
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from mx.cli import demo_models as models
from mx.cli import options, outcome
from mx.cli.processes import Child
from mx.errors import ConfigError, IntegrityError
from mx.units import GB, count, format_bytes, format_seconds

START_TIMEOUT_S = 60.0
#: Reading, moving and checking a model may take long on a slow disk, but not forever.
WORK_TIMEOUT_S = 1800.0
MEMCPY_ROUNDS = 3

#: What is shown, and how to ask `mx pull` and `mx.pull` for it.
PATHS: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...] = (
    ("attach, no copy", (), {}),
    ("copy by shm", ("--no-attach", "--transport", "shm"), {"attach": False, "transport": "shm"}),
    ("tcp on loopback", ("--transport", "tcp"), {"transport": "tcp"}),
)


@dataclass(frozen=True)
class Memcpy:
    """One thread's memcpy of a model's size (1 GB at most), measured beside its pulls."""

    fresh_gb_per_s: float
    warm_gb_per_s: float


@dataclass(frozen=True)
class Row:
    """One pull: what `mx pull --json` said, and whether its weights compute the same."""

    model: str
    path: str
    report: dict[str, Any]
    verdict: models.Verdict
    memcpy: Memcpy

    def to_json(self) -> dict[str, object]:
        return {
            "model": self.model,
            "way": self.path,
            "pull": self.report,
            "same": self.verdict.same,
            "compared": self.verdict.how,
            "memcpy_fresh_gb_per_s": round(self.memcpy.fresh_gb_per_s, 3),
            "memcpy_warm_gb_per_s": round(self.memcpy.warm_gb_per_s, 3),
        }


def demo(
    context: typer.Context,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            help="Your own: a safetensors file or a folder of them. "
            "(default: a small real model, and a random Llama of 1 GB)",
            metavar="DIR",
        ),
    ] = None,
    config: options.ConfigFile = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Serve, coordinate and pull a real model between real processes on this machine.

    Starts a coordinator, a source and, one after the other, pulls by each path; shows the layers
    come, then what moved, how fast against a memcpy measured in between, and whether the pulled
    weights compute what those on disk do. It leaves no process and no file behind.

    **Examples**

    - `mx demo`

    - `mx demo --checkpoint /models/llama-8b`
    """
    options.settings_of(context)
    console = Console(stderr=as_json, highlight=False)
    rows: list[Row] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mx-demo-")))
        coordinator = stack.enter_context(
            _command("coordinator", ["--listen", "127.0.0.1:0"], folder)
        )
        address = str(coordinator.answer(START_TIMEOUT_S)["listen"])
        console.print(f"[bold]coordinator[/]  process {coordinator.pid} at {address}")
        for example in _examples(folder, checkpoint, console):
            rows += _show(example, folder, address, console)
        if as_json:
            outcome.emit({"pulls": [row.to_json() for row in rows]})
        for name in dict.fromkeys(row.model for row in rows):
            console.print()
            console.print(_table([row for row in rows if row.model == name]))
    for row in rows:
        if not row.verdict.same:
            raise IntegrityError(f"{row.model}, {row.path}: weights differ: {row.verdict.how}")
    console.print("\n[green]Every pulled model computes exactly what the one on disk does.[/]")


def _command(verb: str, arguments: list[str], folder: Path, *, shown: bool = False) -> Child:
    # The user's configuration file is not the demo's.
    arguments = [*arguments, "--config", "/dev/null"]
    log = None if shown else folder / f"{verb}.log"
    if verb == "coordinator":
        return Child(verb, "mx.cli.coordinator", arguments, log)
    return Child(f"mx {verb}", "mx", [verb, *arguments], log)


def _examples(folder: Path, own: str | None, console: Console) -> Iterator[models.Example]:
    if own is not None:
        yield models.Example("model", Path(own), "your own")
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
            "there is no model to show",
            hint="name one with --checkpoint DIR, or in a clone of mx, pip install '.[demo]'",
        )


def _show(example: models.Example, folder: Path, coordinator: str, console: Console) -> list[Row]:
    """Serve one model, pull it by each way, compare. The source ends with it."""
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
        memcpy = _memcpy(min(GB, max(1, int(served["bytes"]))))
        for path, flags, keywords in PATHS:
            with _command("pull", [example.name, *where, *flags], folder, shown=True) as target:
                console.print(f"[bold]target[/]       process {target.pid}: {path}")
                report = target.answer(WORK_TIMEOUT_S)
                target.wait(START_TIMEOUT_S)
            verdict = _compare(example.name, coordinator, keywords, reference)
            rows.append(Row(example.name, path, report, verdict, memcpy))
    return rows


def _compare(
    name: str, coordinator: str, keywords: dict[str, Any], reference: models.Reference
) -> models.Verdict:
    """Pull once more, by the same way, into this process; then load and compute."""
    from mx import api

    with api.pull(name, coordinator=coordinator, **keywords) as pull:
        verdict = reference.compare(pull.state_dict())
    gc.collect()  # modules hold their tensors in cycles; the next one needs the room
    return verdict


def _memcpy(nbytes: int) -> Memcpy:
    """Copies between two anonymous maps with huge pages, the target fresh or warm: medians."""

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
        for _ in range(MEMCPY_ROUNDS):
            with new() as target, memoryview(target) as target_view:
                fresh.append(timed(target_view))
                warm.append(timed(target_view))
    return Memcpy(statistics.median(fresh), statistics.median(warm))


def _table(rows: list[Row]) -> Table:
    """What one model's pulls did; `rows` are of the same model."""
    memcpy = rows[0].memcpy
    table = Table(
        title=f"{rows[0].model}: {format_bytes(rows[0].report['bytes'])}",
        caption=f"memcpy, one thread: {memcpy.fresh_gb_per_s:.2f} GB/s into fresh memory (1 x), "
        f"{memcpy.warm_gb_per_s:.2f} into warm memory\nsame: {rows[0].verdict.how}",
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
        # Nothing is copied to attach: a rate of it would say nothing.
        attached = row.path.startswith("attach")
        table.add_row(
            row.path,
            format_seconds(report["first_layer_s"]),
            format_seconds(report["seconds"]),
            "" if attached else f"{report['gb_per_s']:.2f}",
            "" if attached else f"{report['gb_per_s'] / memcpy.fresh_gb_per_s:.2f}",
            str(report["verified"]),
            "[green]yes[/]" if row.verdict.same else "[red]no[/]",
        )
    return table
