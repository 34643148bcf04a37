"""Progress for people, on standard error: bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mx.cli.outcome import notes, say, shows_progress
from mx.text import plain
from mx.units import format_bytes, format_rate

if TYPE_CHECKING:
    from rich.console import Group

    from mx.api import Progress, Pull, PullReport
    from mx.core.progress import LayerProgress

#: A table of more rows than this is no longer looked at.
MAX_ROWS = 16
PLAIN_INTERVAL_S = 1.0


@contextmanager
def reading(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show how far a checkpoint is read; yield what to call with (bytes done, bytes in all)."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Bars(*columns, console=notes(), transient=True, disable=not shows_progress()) as bars:
        task = bars.add_task(plain(f"reading {what}"), total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def follow(pull: Pull) -> PullReport:
    """Wait for a pull's end and show it by layer. Raises what the pull fails with."""
    if not shows_progress():
        return _follow_plainly(pull)
    from rich.live import Live

    from mx.cli.printing import Plain

    start = time.monotonic()

    def frame() -> Plain:
        return Plain(render(pull.progress(), time.monotonic() - start, rows=notes().height - 6))

    with Live(get_renderable=frame, console=notes(), refresh_per_second=8):
        return pull.wait()


def _follow_plainly(pull: Pull) -> PullReport:
    said = time.monotonic()
    for _ in pull.layers():
        if time.monotonic() - said >= PLAIN_INTERVAL_S:
            said = time.monotonic()
            progress = pull.progress()
            say(
                f"{progress.layers_ready} of {progress.layers_total} layers ready, "
                f"{format_bytes(progress.bytes_done)} of {format_bytes(progress.bytes_total)}"
            )
    return pull.wait()


def groups_of(layers: Sequence[LayerProgress], rows: int) -> list[tuple[str, int, int, int, int]]:
    """Return at most `rows` groups of neighbouring layers.

    Each is (label, bytes done, bytes, layers ready, layers).
    """
    rows = max(1, min(rows, MAX_ROWS, len(layers)))
    size = max(1, -(-len(layers) // rows))
    groups = []
    for begin in range(0, len(layers), size):
        group = layers[begin : begin + size]
        label = group[0].name if len(group) == 1 else f"{group[0].name} .. {group[-1].name}"
        groups.append(
            (
                label,
                sum(layer.done_nbytes for layer in group),
                sum(layer.nbytes for layer in group),
                sum(layer.ready for layer in group),
                len(group),
            )
        )
    return groups


def render(progress: Progress, elapsed_s: float, *, rows: int) -> Group:
    """Return one frame: a bar for each group of layers, and the total with its rate."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1), expand=False)
    table.add_column(max_width=44, no_wrap=True, overflow="ellipsis")
    table.add_column(width=32)
    table.add_column(justify="right")
    if progress.layers:
        for label, done, total, ready, count in groups_of(progress.layers, rows):
            complete = ready == count
            bar = ProgressBar(total=max(total, 1), completed=done if total else int(complete))
            state = Text("ready", style="green") if complete else Text(f"{ready}/{count}")
            table.add_row(Text(label), bar, state)
    rate = progress.bytes_done / elapsed_s if elapsed_s > 0 else 0.0
    total_line = Text.assemble(
        (progress.phase, "bold"),
        f"  {format_bytes(progress.bytes_done)} of {format_bytes(progress.bytes_total)}"
        f"  {format_rate(rate)}  {progress.layers_ready}/{progress.layers_total} layers ready",
    )
    return Group(table, total_line)
