"""What an example has started ends with it, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.commands import environment
from tests.support.daemon import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

EXAMPLES = ROOT / "examples"
#: An example in small: it starts a command, and says so.
PROGRAM = """
import subprocess
import children

children.end_on_signals()
with subprocess.Popen(children.command("sleep", 600)) as process:
    try:
        print("started", flush=True)
        process.wait()
    finally:
        process.terminate()
"""


def _in_session(session: int) -> list[int]:
    """The processes of a session that still run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its = entry.read_text().rpartition(") ")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its) == session and state != "Z":
            found.append(int(entry.parent.name))
    return found


def _ends_with_all(command: list[str], number: int, processes: int, **env: str) -> None:
    """Send a signal to a program alone once it has so many processes, and wait for their end."""
    with subprocess.Popen(
        [sys.executable, *command],
        env=environment(PYTHONPATH=str(EXAMPLES), **env),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            while len(_in_session(process.pid)) < processes:
                assert process.poll() is None
                time.sleep(0.05)
            process.send_signal(number)
            process.wait(60)
            while _in_session(process.pid):
                time.sleep(0.05)
        finally:
            for each in _in_session(process.pid):
                os.kill(each, signal.SIGKILL)


ENDS = [signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGKILL]


@pytest.mark.parametrize("number", ENDS)
def test_a_command_ends_with_the_example(number: int, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    _ends_with_all([str(script)], number, 2)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
@pytest.mark.parametrize(
    ("name", "processes"), [("router", 3), ("lend_and_fill", 3), ("diffusers_pipeline", 4)]
)
def test_processes_end_with_their_example(
    name: str, processes: int, number: int, coordinator: str
) -> None:
    """In order of starts: coordinator, source or cache; multiprocessing has one of its own."""
    if name == "diffusers_pipeline":
        pytest.importorskip("diffusers")
    # The default one may be another test's, which ends.
    env = {"MX_PEER_COORDINATOR": coordinator} if name == "lend_and_fill" else {}
    _ends_with_all([str(EXAMPLES / f"{name}.py")], number, processes, **env)
