"""Progress for people, on standard error: bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mx.cli.outcome import notes, say, shows_progress
from mx.text import plain
from mx.units import count, format_bytes, format_rate

if TYPE_CHECKING:
    from rich.console import Group

    from mx.api import Progress, Pull, PullReport
    from mx.core.progress import LayerProgress

#: A table of more rows than this is no longer looked at.
MAX_ROWS = 16
PLAIN_INTERVAL_S = 1.0
FRAME_S = 0.125
#: Rates are of this time.
RATE_S = 5.0
#: The phase of a pull that writes what it has received (`mx.fetching.attempt`).
WRITING = "writing"
#: That of one that has no source (`mx.fetching.events`).
WAITING = "waiting for a source"


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
        task = bars.add_task(plain(f"reading {what}"), total=None, visible=False)
        yield lambda done, total: bars.update(task, completed=done, total=total, visible=True)


def follow(
    pull: Pull, sought: str = "", wait_s: float = 0.0, nearest: Callable[[], str] = str
) -> PullReport:
    """Wait for a pull's end and show it by layer. Raises what the pull fails with.

    Args:
        pull: The pull.
        sought: What it waits for a source of, and where.
        wait_s: How long it does.
        nearest: Returns the name that is most like one that is not listed; "" if there is none.
    """
    rate = RecentRate()
    like = functools.cache(nearest)

    def state(progress: Progress, *, counts_down: bool) -> str:
        text = state_of(progress, rate.at(progress, time.monotonic()))
        if progress.phase != WAITING or not sought:
            return text
        text += f" of {sought}, "
        if counts_down:
            text += f"{_duration(max(0.0, wait_s - rate.phase_s))} left"
        else:
            text += f"for up to {_duration(wait_s)}"
        return f"{text}; nearest name: {like()}" if like() else text

    if not shows_progress():
        return _follow_plainly(pull, lambda progress: state(progress, counts_down=False))
    from rich.live import Live

    from mx.cli.printing import Plain

    def frame() -> Plain:
        progress = pull.progress()
        text = state(progress, counts_down=True)
        return Plain(render(progress, text, rows=notes().height - 6))

    # Frames are made here, not under the display's lock: what logs takes that one, too.
    with Live(frame(), console=notes(), auto_refresh=False) as shown:
        try:
            report = _end_of(pull, FRAME_S, lambda: shown.update(frame(), refresh=True))
            shown.update(frame())
            return report
        except BaseException:
            shown.transient = True  # an error says how far it came
            raise


def _end_of(pull: Pull, interval_s: float, on_pause: Callable[[], None]) -> PullReport:
    while True:
        try:
            return pull.wait(interval_s)
        except TimeoutError:
            on_pause()


def _follow_plainly(pull: Pull, state: Callable[[Progress], str]) -> PullReport:
    said = ""

    def tell() -> None:
        nonlocal said
        text = state(pull.progress())
        if text != said:
            said = text
            say(text)

    return _end_of(pull, PLAIN_INTERVAL_S, tell)


class RecentRate:
    """The rate at which a pull's bytes have come in the last seconds of its phase: those that were
    there before, as after a resume, have not arrived. `phase_s` is how long the phase lasts by
    now."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()
        self._phase, self._began_s = "", 0.0
        self.phase_s = 0.0

    def at(self, progress: Progress, now_s: float) -> float:
        """Return the rate in bytes per second.

        Args:
            progress: How far the pull is.
            now_s: When it was there (monotonic).
        """
        if progress.phase != self._phase:
            self._seen.clear()
            self._phase, self._began_s = progress.phase, now_s
        self.phase_s = now_s - self._began_s
        nbytes = progress.bytes_done
        self._seen.append((now_s, nbytes))
        while len(self._seen) > 2 and now_s - self._seen[1][0] >= RATE_S:
            self._seen.popleft()
        then_s, before = self._seen[0]
        return max(0, nbytes - before) / (now_s - then_s) if now_s > then_s else 0.0


def state_of(progress: Progress, bytes_per_s: float) -> str:
    """Return a line of how far a pull is, and how long it still takes at this rate."""
    total = progress.bytes_total
    if progress.phase == WRITING and progress.layers_total:
        if progress.bytes_written >= total:
            return f"{format_bytes(total)} written, making them durable"
        return f"writing, {format_bytes(progress.bytes_written)} of {format_bytes(total)}"
    text = progress.phase
    if total:
        text += f", {format_bytes(progress.bytes_done)} of {format_bytes(total)}"
    if progress.layers_total:
        text += f", {progress.layers_ready} of {count(progress.layers_total, 'layer')}"
    left = total - progress.bytes_done
    if left > 0 and bytes_per_s > 0:
        text += f", {format_rate(bytes_per_s)}, {_duration(left / bytes_per_s)} left"
    return text


def _duration(seconds: float) -> str:
    """Return about how long that is, like "42 s", "3 min" or "2 h 10 min"."""
    if seconds < 99.5:
        return f"{math.ceil(seconds)} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


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


def render(progress: Progress, state: str, *, rows: int) -> Group:
    """Return one frame: a bar for each group of layers, and a line of the whole."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1), expand=False)
    table.add_column(max_width=40, no_wrap=True, overflow="ellipsis")
    table.add_column(width=28)
    table.add_column(justify="right")
    if progress.layers:
        for label, done, total, ready, layers in groups_of(progress.layers, rows):
            complete = ready == layers
            bar = ProgressBar(total=max(total, 1), completed=done if total else int(complete))
            held = Text("ready", style="green") if complete else Text(f"{ready}/{layers}")
            table.add_row(Text(plain(label)), bar, held)
    return Group(table, Text(state, style="bold"))
