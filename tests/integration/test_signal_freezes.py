"""A signal freezes what a process holds: a process of its own each time, which goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import mx
from mx.errors import ConfigError
from mx.snapshots.container import SNAPSHOT, is_begun, read
from tests.support.commands import environment

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

_BEGIN = """
import os, signal, sys, threading
import torch
import mx
from mx import config, log
folder, home, coordinator = sys.argv[1:]
log.set_up("info", "text")
settings = config.load({"name_key": home + "/key"}, environ={"HOME": home})
torch.manual_seed(1)
state = {f"model.layers.{n}.w": torch.randn(512, 1024) for n in range(4)}
before = signal.getsignal(signal.SIGUSR1)
"""
#: Says when it has begun, and is asked to go on to its end by a line.
_HOLD = """
    print("armed", flush=True)
    sys.stdin.readline()
"""
_END = """
assert signal.getsignal(signal.SIGUSR1) is before and signal.set_wakeup_fd(-1) == -1
assert not [each.name for each in threading.enumerate() if "freeze" in each.name]
"""
_STATE = (
    _BEGIN + 'with mx.freeze_on_signal(state, folder, model="m", settings=settings):' + _HOLD + _END
)


class Held:
    """A process that holds a model, and what it has said."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.err = process, ""
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.err += line

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, self.err
        return line

    def signal(self) -> str:
        """Send the signal; return what was said until then."""
        os.kill(self.process.pid, signal.SIGUSR1)
        return self.err

    def until(self, found: Callable[[], bool]) -> None:
        until_s = time.monotonic() + 90
        while not found():
            assert self.process.poll() is None and time.monotonic() < until_s, self.err
            time.sleep(0.01)

    def end(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.close()
        code = self.process.wait(90)
        self.reader.join(30)
        assert code == 0, self.err
        return self.err


@contextmanager
def held(code: str, folder: Path, coordinator: str = "") -> Iterator[Held]:
    """Run a program for the length of the block, once it has armed its signal."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder), str(folder.parent), coordinator],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    with process:
        found = Held(process)
        try:
            assert found.line() == "armed"
            yield found
        finally:
            process.kill()
            found.reader.join(30)


def test_a_state_dict_is_frozen_and_the_process_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "s"
    with held(_STATE, out) as process:
        process.until(lambda: "freeze.armed" in process.err)
        assert f"freeze.armed signal=SIGUSR1 pid={process.process.pid} folder={out}" in process.err
        process.signal()
        process.until(lambda: "freeze.ended model=m" in process.err)
        assert "complete=True" in process.err and read(out).name == "m"
        # Another one is told that the folder is a snapshot already, which it stays.
        process.until(lambda: "freeze.failed" in process.signal())
        said = process.end()
    assert "is a snapshot of m already" in said and "Traceback" not in said
    with mx.thaw(out) as thawed:
        assert thawed.pulls["checkpoint"].state_dict().keys() == {
            f"model.layers.{n}.w" for n in range(4)
        }


_DEAF = (
    _BEGIN
    + """
from socket import socketpair
loops, woken = socketpair()
woken.setblocking(False)
with mx.freeze_on_signal(state, folder, model="m", settings=settings):
    if coordinator:  # an event loop of this process is woken by its own signals
        signal.set_wakeup_fd(woken.fileno())
    else:  # other threads get the signal, and this one's call goes on
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
"""
    + _HOLD
    + """
if coordinator:
    assert loops.recv(9)[0] == signal.SIGUSR1 and signal.set_wakeup_fd(-1) == woken.fileno()
"""
    + _END
)


@pytest.mark.parametrize("loop", ["", "an event loop"])
def test_a_signal_is_heard_whatever_the_main_thread_does(tmp_path: Path, loop: str) -> None:
    with held(_DEAF, tmp_path / "s", loop) as process:
        process.signal()
        process.until(lambda: "freeze.ended" in process.err)
        said = process.end()
    assert "freeze.busy" not in said and "freeze.failed" not in said


_SLOWLY = (
    _BEGIN
    + """
slow = config.given(settings, max_bandwidth="1MB/s")
with mx.serve(state, model="m", settings=slow, coordinator=coordinator) as source, \\
        mx.freeze_on_signal(source, folder, settings=settings, transport="tcp"):
"""
    + _HOLD
    + _END
)


def test_a_second_signal_does_nothing_and_an_end_keeps_what_was_written(
    tmp_path: Path, coordinator: str
) -> None:
    out = tmp_path / "s"
    with held(_SLOWLY, out, coordinator) as process:
        process.signal()
        process.until(lambda: is_begun(out))
        process.signal()
        process.until(lambda: "freeze.busy" in process.err)
        assert "freeze.ended" not in process.err
        said = process.end()  # closes it while it runs
    assert said.count("freeze.failed") == 1 and "was closed meanwhile" in said
    assert "Traceback" not in said and not (out / SNAPSHOT).exists()


_FORKS = (
    _BEGIN
    + """
freezer = mx.freeze_on_signal(state, folder, model="m", settings=settings, number=signal.SIGUSR1)
reading, writing = os.pipe()
child = os.fork()
if not child:
    os.write(writing, b"forked")
    threading.Event().wait(60)
    os._exit(3)
os.read(reading, 6)
os.kill(child, signal.SIGUSR1)
assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGUSR1
print("armed", flush=True)
sys.stdin.readline()
freezer.close()
freezer.close()
"""
    + _END
)


def test_a_fork_has_the_handler_from_before(tmp_path: Path) -> None:
    with held(_FORKS, tmp_path / "s") as process:
        assert not (tmp_path / "s").exists()
        process.signal()
        process.until(lambda: "freeze.ended" in process.err)
        process.end()


_LENDS = (
    _BEGIN
    + """
from mx.engines.replica.lender import Lender
from mx.engines.replica.options import LoaderOptions
from mx.engines.replica.tensors import slots_of
model = torch.nn.Linear(64, 64)
options = LoaderOptions.read({"freeze_on": "SIGUSR1", "freeze_to": folder,
                              "name_key": home + "/key", "coordinator": coordinator})
key = mx.ProcessingKey(engine="test", state="loaded")
lender = Lender(slots_of(model, non_persistent=True), "m", key, options)
if True:
"""
    + _HOLD
    + "lender.close()\n"
    + _END
)


def test_what_a_rank_of_an_engine_lends_is_frozen(tmp_path: Path, coordinator: str) -> None:
    with held(_LENDS, tmp_path / "s", coordinator) as process:
        process.signal()  # it waits for the end of what hashes the tensors
        process.until((tmp_path / "s" / SNAPSHOT).exists)
        process.until(lambda: "freeze.ended" in process.err)
        process.end()
    (rank,) = read(tmp_path / "s").ranks
    assert rank.variant == str(mx.ProcessingKey(engine="test", state="loaded"))


def test_what_can_not_freeze_is_refused(tmp_path: Path) -> None:
    from mx.engines.replica.options import LoaderOptions

    for number in (signal.SIGKILL, signal.SIGSTOP):
        with pytest.raises(ConfigError, match="can't freeze"):
            mx.freeze_on_signal({}, tmp_path / "s", model="m", number=number)
    refused: list[ConfigError] = []

    def elsewhere() -> None:
        try:
            mx.freeze_on_signal({}, tmp_path / "s", model="m")
        except ConfigError as error:
            refused.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "main thread" in str(refused)
    for options in (
        {"freeze_on": "SIGUSR1"},
        {"freeze_to": "/s"},
        {"freeze_on": "USR1", "freeze_to": "/s"},
        {"freeze_on": "SIGUSR1", "freeze_to": "/s", "lend": False},
    ):
        with pytest.raises(ConfigError, match="freeze_on"):
            LoaderOptions.read(options)
