"""Real processes for the integration tests: each of our commands, started, asked, ended."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoints import llama_shapes, write_checkpoint
from benchmarks.hosts import Hosts, unavailable
from mx import api, config
from mx.errors import CoordinatorError, MxError
from tests.support import forkserver

START_TIMEOUT_S = 60.0
REPOSITORY = Path(__file__).resolve().parents[2]


#: Ports that the kernel gives to nothing by itself (net.ipv4.ip_local_port_range).
_PORTS = range(15_000, 32_000)


def free_port() -> int:
    """Return a port of loopback that nothing listens on, and that the kernel does not hand out
    until it is used."""
    for _ in range(1000):
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")


#: Settings of mx that child processes get.
_settings: dict[str, str] = {}


@pytest.fixture
def coordinated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have child processes coordinate, on any medium, as soon as others read from their source."""
    monkeypatch.setitem(_settings, "MX_PEER_COORDINATED_READING", "always")


def environment(**more: str) -> dict[str, str]:
    """Return what a child process gets: our code, and no settings of the machine's."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MX_PEER_")}
    clean["PYTHONPATH"] = f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'transports'}"
    clean["XDG_CONFIG_HOME"] = "/nonexistent"
    return clean | _settings | more


@pytest.fixture(scope="session", autouse=True)
def commands_are_forked() -> Iterator[None]:
    """Most commands are forks of one process, which has imported what they import."""
    with forkserver.running(environment()):
        yield


class Command:
    """One of our commands in a process of its own, standard output and error kept apart."""

    def __init__(self, *arguments: str, daemon: bool = False, env: dict[str, str] | None = None):
        entry = "coordinator_main" if daemon else "main"
        env = env or environment()
        forked = None
        if type(self).command is Command.command:  # it is started as any command
            forked = forkserver.started(entry, arguments, env)
        self.process = forked or subprocess.Popen(
            [*self.command(entry), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
        )
        self.out = self.err = ""
        self._readers = [
            threading.Thread(target=self._read, args=(name,), daemon=True)
            for name in ("out", "err")
        ]
        for reader in self._readers:
            reader.start()

    def command(self, entry: str) -> list[str]:
        return [sys.executable, "-c", f"from mx.cli import {entry}; {entry}()"]

    def _read(self, name: str) -> None:
        pipe = self.process.stdout if name == "out" else self.process.stderr
        assert pipe is not None
        for line in pipe:
            setattr(self, name, getattr(self, name) + line.decode(errors="replace"))

    def until(
        self, found: Callable[[], bool], what: str, timeout_s: float = START_TIMEOUT_S
    ) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not found():
            if self.process.poll() is not None:
                self.wait()
                if found():
                    return
                raise AssertionError(
                    f"ended with {self.process.returncode} before {what}:\n{self.out}\n{self.err}"
                )
            if time.monotonic() > deadline_s:
                raise AssertionError(f"no {what} within {timeout_s} s:\n{self.out}\n{self.err}")
            time.sleep(0.02)

    def json(self, timeout_s: float = START_TIMEOUT_S) -> dict[str, Any]:
        """The object on standard output, once it is there."""
        self.until(lambda: self.out.endswith("}\n"), "JSON on standard output", timeout_s)
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 30.0) -> int:
        code = self.process.wait(timeout_s)
        for reader in self._readers:
            reader.join(5)
        return code

    def end(self) -> None:
        """Kill if it still runs, and leave nothing behind."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


@contextmanager
def commands() -> Iterator[Callable[..., Command]]:
    """Start commands that end with the block."""
    started: list[Command] = []

    def start(*arguments: str, daemon: bool = False, env: dict[str, str] | None = None) -> Command:
        started.append(Command(*arguments, daemon=daemon, env=env))
        return started[-1]

    try:
        yield start
    finally:
        for command in reversed(started):
            command.end()


@pytest.fixture
def run() -> Iterator[Callable[..., Command]]:
    """Start commands that end with the test."""
    with commands() as start:
        yield start


Run = Callable[..., Command]


class HostCommand(Command):
    """One of our commands inside one of the hosts."""

    def __init__(self, hosts: Hosts, host: str, *arguments: str, daemon: bool = False) -> None:
        self.prefix = hosts.prefix(host)
        super().__init__(*arguments, daemon=daemon)

    def command(self, entry: str) -> list[str]:
        return [*self.prefix, *super().command(entry)]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Hosts to be made and linked by the test, gone after it."""
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    with Hosts() as made:
        yield made


@pytest.fixture
def run_in(hosts: Hosts) -> Iterator[Callable[..., HostCommand]]:
    """Start commands in hosts, the host's name first; they end with the test."""
    started: list[HostCommand] = []

    def start(host: str, *arguments: str, daemon: bool = False) -> HostCommand:
        started.append(HostCommand(hosts, host, *arguments, daemon=daemon))
        return started[-1]

    yield start
    for command in reversed(started):
        command.end()


RunIn = Callable[..., HostCommand]


@pytest.fixture
def coordinator(run: Run) -> str:
    """A coordinator's address; the process is `coordinator_process`'s."""
    return start_coordinator(run)[0]


def start_coordinator(run: Run, *arguments: str, port: int | None = None) -> tuple[str, Command]:
    address = f"127.0.0.1:{port or free_port()}"
    command = run("--listen", address, *arguments, daemon=True)

    def answers() -> bool:
        try:
            api.list_models(coordinator=address)
        except CoordinatorError:
            return False
        return True

    command.until(answers, "coordinator")
    return address, command


def serve(run: Run, checkpoint: Path, model: str, coordinator: str, *more: str) -> Command:
    """`mx serve`, registered."""
    command = run(
        "serve", str(checkpoint), "--model", model, "--coordinator", coordinator, "--json", *more
    )
    command.json()
    return command


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 28 MB in 10 layers."""
    path = tmp_path_factory.mktemp("checkpoint") / "model.safetensors"
    write_checkpoint(path, llama_shapes(8, 384, 1024, 2048))
    return path


@pytest.fixture(scope="session")
def large_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 390 MB in 34 layers: long enough to be interrupted."""
    path = tmp_path_factory.mktemp("large") / "model.safetensors"
    write_checkpoint(path, llama_shapes(32, 768, 3072, 8192))
    return path


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> config.Settings:
    """The defaults, whatever the machine's own configuration says."""
    return config.load(environ={"HOME": "/nonexistent"})


def error_of(pull: api.Pull, timeout_s: float = 30.0) -> MxError:
    """What a pull fails with; it is an error if it does not fail."""
    try:
        pull.wait(timeout_s)
    except MxError as error:
        return error
    raise AssertionError("the pull succeeded")
