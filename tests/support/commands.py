"""Real processes for the tests: each of our commands, started, asked, ended."""

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.hosts import Hosts
from mx import api
from mx.errors import CoordinatorError
from tests.support import forkserver
from tests.support.daemon import ROOT

START_TIMEOUT_S = 60.0
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
CHILD_SETTINGS: dict[str, str] = {}


def environment(**more: str) -> dict[str, str]:
    """Return what a child process gets: our code, and no settings of the machine's."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MX_PEER_")}
    clean["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'transports'}"
    clean["XDG_CONFIG_HOME"] = "/nonexistent"
    return clean | CHILD_SETTINGS | more


class Command:
    """One of our commands in a process of its own, standard output and error kept apart."""

    #: Code that changes what is imported of mx, run before the command.
    change = ""

    def __init__(self, *arguments: str, daemon: bool = False, env: dict[str, str] | None = None):
        entry = "coordinator_main" if daemon else "main"
        env = env or environment()
        self.process = self.fork(entry, arguments, env) or subprocess.Popen(
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
        return [sys.executable, "-c", f"{self.change}\nfrom mx.cli import {entry}; {entry}()"]

    def fork(
        self, entry: str, arguments: Sequence[str], env: dict[str, str]
    ) -> forkserver.Forked | None:
        """Start it as a fork; None if only a new interpreter will do."""
        if type(self).command is not Command.command:
            return None
        return forkserver.started(entry, arguments, env, self.change)

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


Run = Callable[..., Command]


class HostCommand(Command):
    """One of our commands inside one of the hosts."""

    def __init__(self, hosts: Hosts, host: str, *arguments: str, daemon: bool = False) -> None:
        self.prefix = hosts.prefix(host)
        self.namespace = hosts.namespace(host)
        super().__init__(*arguments, daemon=daemon)

    def command(self, entry: str) -> list[str]:
        return [*self.prefix, *super().command(entry)]

    def fork(
        self, entry: str, arguments: Sequence[str], env: dict[str, str]
    ) -> forkserver.Forked | None:
        if type(self).command is not HostCommand.command:
            return None
        return forkserver.started(entry, arguments, env, self.change, self.namespace)


RunIn = Callable[..., HostCommand]


def start_coordinator(run: Run, *arguments: str, port: int | None = None) -> tuple[str, Command]:
    """Start a coordinator; return its address, and its command, once it answers."""
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
