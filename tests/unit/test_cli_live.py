from __future__ import annotations

import io
import logging
import re
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from mx import log
from mx.cli import live
from mx.core.progress import LayerProgress, Progress
from mx.errors import IncompleteError
from tests.support.log_state import log_as_it_was

layers = st.lists(
    st.builds(
        lambda name, nbytes, part, ready: LayerProgress(
            name, nbytes, nbytes if ready else int(nbytes * part), ready
        ),
        st.text(max_size=60),
        st.integers(0, 1 << 40),
        st.floats(0, 1),
        st.booleans(),
    ),
    max_size=80,
)


@given(layers, st.integers(-5, 60))
def test_groups_hold_every_layer_once_and_fit(shown: list[LayerProgress], rows: int) -> None:
    groups = live.groups_of(shown, rows)
    assert len(groups) <= max(1, min(rows, live.MAX_ROWS))
    assert sum(done for _, done, _, _, _ in groups) == sum(s.done_nbytes for s in shown)
    assert sum(total for _, _, total, _, _ in groups) == sum(s.nbytes for s in shown)
    assert sum(ready for _, _, _, ready, _ in groups) == sum(s.ready for s in shown)
    assert sum(count for _, _, _, _, count in groups) == len(shown)


@given(layers)
@example([LayerProgress(name, 1, 0, False) for name in ["a long name", *["a\x1eb"] * 15]])
def test_any_snapshot_is_drawn_within_the_terminal(shown: list[LayerProgress]) -> None:
    console = Console(width=80, height=24, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    progress = Progress(5, 9, 1, len(shown), tuple(shown), "reading")
    with console.file:
        console.print(live.render(progress, live.state_of(progress, 1e-6), rows=18))
        text = console.export_text()
    assert len(text.splitlines()) <= live.MAX_ROWS + 1
    assert "reading" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_a_line_says_how_long_it_takes_and_what_is_written() -> None:
    reading = Progress(10**9, 3 * 10**9, 4, 12, phase="reading")
    assert live.state_of(reading, 0.0) == "reading, 1 GB of 3 GB, 4 of 12 layers"
    assert live.state_of(reading, 5e7).endswith("12 layers, 50 MB/s, 40 s left")
    assert live.state_of(reading, 5e6).endswith(" 7 min left")
    assert live.state_of(reading, 2e5).endswith(" 2 h 47 min left")
    assert live.state_of(Progress(), 0.0) == "resolving"
    writing = Progress(3 * 10**9, 3 * 10**9, 12, 12, phase="writing", bytes_written=10**9)
    assert live.state_of(writing, 0.0) == "writing, 1 GB of 3 GB"


def test_a_rate_is_of_the_last_seconds_of_a_phase() -> None:
    rate = live.RecentRate()

    def at(nbytes: int, now_s: float, phase: str = "reading") -> float:
        return rate.at(Progress(nbytes, 1000, phase=phase), now_s)

    assert at(0, 999, "resolving") == 0.0
    assert at(500, 1000) == 0.0  # an earlier pull has left them
    assert at(550, 1005) == 10.0
    assert at(600, 1010) == 10.0
    assert at(600, 1015) == 0.0


class FailingPull:
    """Is cut off in its second layer."""

    def progress(self) -> Progress:
        layers = [LayerProgress(f"layers.{n}", 100, 100 - 50 * n, not n) for n in range(2)]
        return Progress(150, 200, 1, 2, tuple(layers), "reading")

    def wait(self, timeout_s: float) -> None:
        raise IncompleteError("cut off")


class WarningPull(FailingPull):
    """Logs a line while it is shown."""

    def wait(self, timeout_s: float) -> None:
        logging.getLogger("mx").warning("the coordinator is away")
        raise IncompleteError("cut off")


def test_log_lines_are_written_above_what_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    monkeypatch.setattr(live, "notes", lambda: console)
    monkeypatch.setattr(live, "shows_progress", lambda: True)
    plain = io.StringIO()
    monkeypatch.setattr(sys, "stderr", plain)
    with log_as_it_was():
        log.set_up("warning", "text")
        with live.reading("folder") as on_progress:
            on_progress(0, 10)
            logging.getLogger("mx").warning("found it")
        with pytest.raises(IncompleteError):
            live.follow(WarningPull())  # type: ignore[arg-type]
        logging.getLogger("mx").warning("after it")
    assert "found it\n" in screen.getvalue() and "is away\n" in screen.getvalue()
    assert re.fullmatch(r".* WARNING mx: after it\n", plain.getvalue())


def test_no_bars_stay_above_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    monkeypatch.setattr(live, "notes", lambda: console)
    monkeypatch.setattr(live, "shows_progress", lambda: True)
    with pytest.raises(IncompleteError):
        live.follow(FailingPull())  # type: ignore[arg-type]
    drawn, _, erased = screen.getvalue().rpartition("1 of 2 layers")
    assert "layers.1" in drawn
    assert erased.count("\x1b[2K") >= 3  # each of its lines


class WaitingPull(FailingPull):
    """Waits for a source, in vain."""

    waits = 2

    def progress(self) -> Progress:
        return Progress(phase="waiting for a source")

    def wait(self, timeout_s: float) -> None:
        self.waits -= 1
        raise TimeoutError() if self.waits else IncompleteError("none came")


@pytest.mark.parametrize(("terminal", "how_long"), [(True, "10 min left"), (False, "for up to 10")])
def test_a_wait_says_for_what_and_how_long(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, how_long: str
) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    monkeypatch.setattr(live, "notes", lambda: console)
    monkeypatch.setattr(live, "say", screen.write)
    monkeypatch.setattr(live, "shows_progress", lambda: terminal)
    with pytest.raises(IncompleteError):
        live.follow(WaitingPull(), "m (coordinator h:1)", 600.0)  # type: ignore[arg-type]
    assert f"waiting for a source of m (coordinator h:1), {how_long}" in screen.getvalue()
