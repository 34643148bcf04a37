"""An exception from a signal inside a call of mx leaves nothing that the caller can't close."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import commands, environment, serve, start_coordinator
from tests.support.daemon import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(300)]

#: The calls, and how often each is interrupted.
CALLS = {
    "pull": 300,
    "load": 150,
    "serve": 100,
    "lend": 120,
    "hold": 100,
    "update": 100,
    "router": 300,
    "watch": 150,
    "observer": 200,
    "listing": 200,
    "plan": 200,
}


@pytest.fixture(scope="module")
def served(checkpoint: Path) -> Iterator[str]:
    """A coordinator that knows the model "m"."""
    with commands() as run:
        coordinator, _ = start_coordinator(run)
        serve(run, checkpoint, "m", coordinator)
        yield coordinator


@pytest.mark.parametrize("call", CALLS)
def test_what_a_call_made_is_closed_if_its_caller_never_got_it(
    call: str, served: str, checkpoint: Path
) -> None:
    what = {
        "call": call,
        "rounds": CALLS[call],
        "coordinator": served,
        "checkpoint": str(checkpoint),
    }
    child = subprocess.run(  # noqa: PLW1510 - its output is in the message
        [sys.executable, "-m", "tests.integration.interrupted"],
        input=json.dumps(what),
        capture_output=True,
        text=True,
        timeout=280,
        env=environment(),
        cwd=ROOT,
    )
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout)
    before, after = found["before"], found["after"]
    assert found["interrupted"] > CALLS[call] // 10
    assert {name: after[name] for name in before if after[name] > before[name]} == {}, (
        found,
        child.stderr[-2000:],
    )
    assert found["right"]


_HANGS = """
import threading, time, typer
from mx.cli.outcome import run
app = typer.Typer()

@app.command()
def hang():
    thread = threading.Thread(target=time.sleep, args=(1000,))
    thread.start()
    print("hangs", flush=True)
    thread.join()  # also in the end, where Python waits for all threads

run(app, "hang", [])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_third_signal_ends_what_hangs(number: signal.Signals) -> None:
    command = [sys.executable, "-c", _HANGS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "hangs\n"
        for _ in range(20):  # a signal that comes just before a wait is handled with the next one
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
                break
        assert process.returncode == 128 + number
