"""What commands tell on standard error."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from mx.cli import outcome


def test_errors_and_notes_fit_a_terminal_and_are_broken_at_spaces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen, pin = io.StringIO(), "llama@" + 64 * "5"
    console = Console(file=screen, force_terminal=True, width=60, color_system=None)
    monkeypatch.setattr(outcome, "notes", lambda: console)
    monkeypatch.setattr(outcome, "_is_terminal", lambda: True)
    message = "no source of llama is left that could be read from, " * 3
    outcome.fail(3, "NoSourceError", message, f"try mx pull {pin} --wait 60", as_json=False)
    lines = screen.getvalue().splitlines()
    assert lines[0].startswith("error: no source of llama") and pin in map(str.strip, lines)
    assert all(len(line) <= 60 for line in lines if pin not in line)
    told = f"error: {message} try mx pull {pin} --wait 60"
    assert " ".join(screen.getvalue().split()) == " ".join(told.split())


def test_a_pipe_gets_errors_unbroken(capsys: pytest.CaptureFixture[str]) -> None:
    outcome.fail(3, "NoSourceError", "a word, " * 40, "", as_json=False)
    assert capsys.readouterr().err.count("\n") == 1
