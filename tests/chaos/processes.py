"""Starts, commands, stops and kills the processes of a chaos run, and lists what they hold."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support import commands
from tests.support.daemon import ROOT

#: Marks every process of a run, and the children that it may leave behind.
MARK = "CHAOS_RUN"
#: The pools of gRPC and the event loop start and end threads by themselves.
SPARE_THREADS = 24
AGENT = "thread mx-ucx-agent"
CHILD = "child process"


class Violation(Exception):
    """A rule was broken."""


def environment(**more: str) -> dict[str, str]:
    """Return a child's environment: our code, short timeouts, no settings of the machine."""
    settings = {
        "LEASE_S": "1",
        "READER_LEASE_S": "2",
        "STALL_TIMEOUT_S": "1",
        "CONNECT_TIMEOUT_S": "1.5",
        "DRAIN_GRACE_S": "1",
    }
    ours = {f"MX_PEER_{name}": value for name, value in settings.items()}
    return commands.environment(**ours, UCX_TLS="tcp", OMP_NUM_THREADS="1") | more


class Process:
    """A process of the run.

    Its messages on standard output go to `inbox` as (process, message), the last one with event
    "end". Standard error goes to a file, where a traceback is a violation.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        inbox: queue.Queue[tuple[Process, dict[str, Any]]],
        folder: Path,
        env: Mapping[str, str],
    ) -> None:
        self.name = name
        self.stderr = folder / f"{name}-{time.monotonic_ns()}.err"
        self.killed = False  # by the harness
        self.ready: dict[str, Any] = {}
        self._inbox = inbox
        with self.stderr.open("wb") as stderr:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=ROOT,
                env=dict(env),
            )
        self.pid = self._popen.pid
        self._reader = threading.Thread(target=self._read, name=f"read-{name}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                message = {"event": "noise", "line": line.decode(errors="replace")}
            if message.get("event") == "ready" or "endpoint" in message or "listen" in message:
                self.ready = message
            self._inbox.put((self, message))
        self._inbox.put((self, {"event": "end", "code": self._popen.wait()}))

    def send(self, **command: Any) -> None:
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed, and its "end" follows
            self._popen.stdin.write(json.dumps(command).encode() + b"\n")
            self._popen.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def kill(self) -> None:
        """Kill the process with SIGKILL and wait for its end."""
        self.killed = True
        self._popen.kill()
        self._popen.wait()

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def wait_ready(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not self.ready:
            if not self.alive or time.monotonic() > deadline_s:
                raise Violation(f"{self.name} did not start:\n{self.errors()}")
            time.sleep(0.005)

    def errors(self) -> str:
        return self.stderr.read_text(errors="replace")

    def end(self) -> None:
        """End the process normally if possible, else by force, and close everything of it."""
        with contextlib.suppress(OSError):
            self.signal(signal.SIGCONT)
        assert self._popen.stdin is not None and self._popen.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.close()
        if self.alive:
            self.signal(signal.SIGTERM)
            try:
                self._popen.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()
        self._reader.join()
        self._popen.stdout.close()

    # -- what it holds ----------------------------------------------------------------------------

    def holdings(self) -> Counter[str]:
        """Count the process's descriptors and shared mappings by kind, and its kernel threads."""
        found: Counter[str] = Counter()
        with contextlib.suppress(OSError):
            for number in os.listdir(f"/proc/{self.pid}/fd"):
                with contextlib.suppress(OSError):
                    found[_kind(os.readlink(f"/proc/{self.pid}/fd/{number}"))] += 1
            maps = Path(f"/proc/{self.pid}/maps").read_text(errors="replace").splitlines()
            found["mapping"] = sum("/memfd:" in line or "/dev/shm/" in line for line in maps)
            found["kernel thread"] = len(os.listdir(f"/proc/{self.pid}/task"))
            found[CHILD] = len(_children(self.pid))
        return found


def _children(pid: int) -> list[str]:
    found: list[str] = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):
            found += Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
    return found


def _kind(link: str) -> str:
    """Return the kind of a descriptor, without numbers."""
    if link.startswith("/memfd:"):
        return "memfd"
    if link.endswith(".err"):
        return "standard error"
    return (
        link
        if link.startswith("/")
        else link.partition("[")[0].rstrip(":")
        + (link[link.find("[") :] if link.startswith("anon_inode") else "")
    )


def beyond(now: Counter[str], allowed: Counter[str]) -> dict[str, tuple[int, int]]:
    """Return the kinds of which there are more than allowed: kind -> (now, allowed)."""
    # Agents of ucx stay for 30 s after their last reader, each with a thread and a socket.
    agents = now[CHILD]
    spare = {"kernel thread": SPARE_THREADS, CHILD: agents, AGENT: agents, "socket": agents}
    return {
        kind: (count, allowed[kind])
        for kind, count in now.items()
        if count > allowed[kind] + spare.get(kind, 0)
    }


def marked(mark: str) -> list[int]:
    """Return the processes with the run's mark, without zombies."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                if f"{MARK}={mark}".encode() in Path("/proc", name, "environ").read_bytes():
                    found.append(int(name))
    return found


def python(module: str, arguments: Mapping[str, Any]) -> list[str]:
    return [sys.executable, "-m", module, json.dumps(arguments)]


def command(entry: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", f"from mx.cli import {entry}; {entry}()", *arguments]
