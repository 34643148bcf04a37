"""What runs for long: Redis, two coordinators on it, sources, targets, a watcher, all with TLS."""

from __future__ import annotations

import json
import os
import queue
import shutil
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chaos import weights
from tests.chaos.processes import MARK, Process, Violation, command, environment, python
from tests.support.certificates import Authority
from tests.support.commands import free_port

MODEL = "endurance"
COORDINATORS, SOURCES, TARGETS = ("a", "b"), ("s0", "s1", "s2"), ("t0", "t1")
WATCHER, REDIS = "watcher", "redis"
#: They live as long as the run: their memory and descriptors have to stay as they are.
SPARED = ("b", "s0", "t0", WATCHER)
START_S = 60.0
_HERE = "subjectAltName=IP:127.0.0.1,DNS:localhost"
_CERTIFIED = ("node", "client")


class Site:
    """All processes, by name. `close` ends them."""

    def __init__(self, folder: Path, mark: str) -> None:
        self.folder = folder
        self._mark = mark
        self.inbox: queue.Queue[tuple[Process, dict[str, Any]]] = queue.Queue()
        self.processes: dict[str, Process] = {}
        self.lives: Counter[str] = Counter()
        self._ended: list[Process] = []
        self._redis: subprocess.Popen[bytes] | None = None
        self.redis_port = free_port()
        self._ports = {name: free_port() for name in COORDINATORS}
        self.checkpoint = folder / "model.safetensors"
        weights.write(self.checkpoint)
        self.expected = folder / "expected.json"
        self.expected.write_text(json.dumps(weights.digests(self.checkpoint)))
        self._authority = Authority(folder, "ca")
        self.rotations = 0
        self.rotate()

    @property
    def coordinators(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self._ports.values())

    def rotate(self) -> None:
        """Replace each certificate, and its key, by new ones of the same authority."""
        self.rotations += 1
        for name in _CERTIFIED:
            made = self._authority.certificate(f"{name}-{self.rotations}", _HERE)
            # The key first: for a moment the two are not a pair, and a process that reads them then
            # has to go on with those that it has.
            for file, kind in ((made.key, "key"), (made.certificate, "pem")):
                shutil.copy(file, self.folder / "fresh")
                os.replace(self.folder / "fresh", self.folder / f"{name}.{kind}")

    def settings(self, certified: str) -> dict[str, str]:
        """Return the settings of a process that shows this certificate."""
        files = {"CERT": f"{certified}.pem", "KEY": f"{certified}.key", "CA": "ca.pem"}
        tls = {f"MX_PEER_TLS_{kind}": str(self.folder / file) for kind, file in files.items()}
        asked = {"MX_PEER_COORDINATOR": self.coordinators, "MX_PEER_WAIT_S": "60"}
        return {MARK: self._mark, **asked, **tls}

    # -- processes --------------------------------------------------------------------------------

    def start(self) -> None:
        self.start_redis()
        for name in COORDINATORS:
            self.launch(name)
            self.processes[name].wait_ready(START_S)
        for name in (*SOURCES, *TARGETS, WATCHER):
            self.launch(name)
        for process in self.processes.values():
            process.wait_ready(START_S)

    def start_redis(self) -> None:
        """Start Redis with what its file has, and wait until it answers."""
        with (self.folder / "redis.log").open("ab") as log:
            self._redis = subprocess.Popen(
                [
                    *("redis-server", "--port", str(self.redis_port), "--bind", "127.0.0.1"),
                    *("--dir", str(self.folder), "--appendonly", "yes", "--appendfsync", "always"),
                    *("--save", ""),
                ],
                stdout=log,
                stderr=log,
            )
        until(self._redis_answers, "answer of Redis")

    def _redis_answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.redis_port), 1) as asking:
                asking.sendall(b"PING\r\n")
                return asking.recv(16).startswith(b"+PONG")
        except OSError:
            return False

    def kill_redis(self) -> None:
        assert self._redis is not None
        self._redis.kill()
        self._redis.wait()

    def launch(self, name: str) -> None:
        """Start a process, or start it again."""
        if name in self.processes:
            self._ended.append(self.processes[name])
        self.lives[name] += 1
        if name in COORDINATORS:
            made = command(
                "coordinator_main", "--listen", f"127.0.0.1:{self._ports[name]}",
                "--state", f"redis://127.0.0.1:{self.redis_port}/0", "--json",
            )  # fmt: skip
        elif name in SOURCES:
            made = command("main", "serve", str(self.checkpoint), "--model", MODEL, "--json")
        elif name == WATCHER:
            made = python("tests.endurance.watcher", {"model": MODEL})
        else:
            given = {"expected": str(self.expected), "model": MODEL, "pause_s": 0.5}
            made = python("tests.endurance.target", given)
        settings = self.settings("client" if name in (*TARGETS, WATCHER) else "node")
        env = environment(**settings)
        self.processes[name] = Process(name, made, self.inbox, self.folder, env)

    def close(self) -> None:
        """End all processes, whatever has happened."""
        for process in reversed((*self._ended, *self.processes.values())):
            process.end()
        if self._redis is not None:
            self._redis.terminate()
            self._redis.wait()

    def check_errors(self) -> None:
        """Raise Violation if a process has shown a traceback."""
        for process in (*self._ended, *self.processes.values()):
            if "Traceback" in (said := process.errors()):
                raise Violation(f"{process.name} showed a traceback:\n{said[-4000:]}")


def until(found: Callable[[], bool], what: str, timeout_s: float = START_S) -> None:
    """Wait until something is so. Raises Violation if it takes too long."""
    deadline_s = time.monotonic() + timeout_s
    while not found():
        if time.monotonic() > deadline_s:
            raise Violation(f"no {what} in {timeout_s:g} s")
        time.sleep(0.05)


def resident_bytes(pid: int) -> int:
    """Return the anonymous memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def descriptors(pid: int) -> int:
    """Return the number of a process's open descriptors."""
    return len(os.listdir(f"/proc/{pid}/fd"))
