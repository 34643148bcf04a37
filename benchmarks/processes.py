"""The processes to measure: a coordinator and sources, and children that are spoken to line by
line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from mx.errors import LocalError

LOOPBACK = "127.0.0.1"
END_TIMEOUT_S = 60.0
_QUIET = {"MX_PEER_LOG_LEVEL": "warning", "MX_PEER_LOG_FORMAT": "text"}
_COORDINATOR = "from mx.cli import coordinator_main; coordinator_main()"


class Child:
    """A Python process. It prints a line when it is ready, and one for each line that it reads.

    Args:
        arguments: Python's.
        prefix: What the command begins with, such as `Hosts.prefix`.
        env: What its environment has more than this process's.
        stderr: Where its errors go; to this process's by default.
    """

    def __init__(
        self,
        *arguments: str,
        prefix: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        stderr: int | IO[bytes] | None = None,
    ) -> None:
        # What this process can import, it can.
        path = {"PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(
            [*prefix, sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, **path, **(env or {})},
        )
        self.pid = self._process.pid

    def hear(self) -> str:
        """Return the next line that it prints.

        Raises:
            LocalError: It has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise LocalError("a process of the benchmark has failed: see above")
        return line.strip()

    def tell(self, line: str = "") -> None:
        """Send a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def ask(self, line: str = "") -> str:
        """Send a line and return the next one that it prints."""
        self.tell(line)
        return self.hear()

    def close(self, *, terminate: bool = False) -> None:
        """End its input, and wait for its end; kill it if that takes too long.

        Args:
            terminate: Send it SIGTERM: it does not read its input.
        """
        assert self._process.stdout is not None
        if self._process.stdout.closed:
            return
        if terminate:
            self._process.terminate()
        try:
            self._process.communicate(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


class Cluster:
    """A coordinator, and what is started beside it. Close it.

    Args:
        address: Where the coordinator and the sources listen; without TLS if it is not loopback.
        prefix: What their commands begin with, such as `Hosts.prefix`.
        stderr: Where the errors of all processes go; to this process's by default.
        options: What the coordinator is started with besides.
    """

    def __init__(
        self,
        address: str = LOOPBACK,
        prefix: Sequence[str] = (),
        stderr: int | IO[bytes] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        self._prefix, self._stderr = prefix, stderr
        self._insecure = () if address == LOOPBACK else ("--insecure",)
        self._listen = () if address == LOOPBACK else ("--listen", f"{address}:0")
        self._children: list[Child] = []
        listen = ("--listen", f"{address}:0", *self._insecure)
        coordinator = self.start("-c", _COORDINATOR, *listen, *options, "--json")
        self.coordinator_pid = coordinator.pid
        self.coordinator: str = json.loads(coordinator.hear())["listen"]

    def start(
        self,
        *arguments: str,
        prefix: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Child:
        """Start a Python process, which ends with the cluster.

        Args:
            arguments: Python's.
            prefix: What the command begins with; by default as that of the coordinator.
            env: What its environment has more.
        """
        prefix = self._prefix if prefix is None else prefix
        env = _QUIET | dict(env or {})
        self._children.append(Child(*arguments, prefix=prefix, env=env, stderr=self._stderr))
        return self._children[-1]

    def source(
        self,
        what: Path | str,
        model: str,
        *more: str,
        prefix: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Child:
        """Start `mx serve`. It prints a line of JSON once it is registered.

        Args:
            what: What it serves.
            model: The model's name.
            more: Options.
            prefix: As for `start`.
            env: As for `start`.
        """
        names = ("serve", str(what), "--model", model, "--coordinator", self.coordinator)
        options = (*self._listen, *self._insecure, "--json", *more)
        return self.start("-m", "mx", *names, *options, prefix=prefix, env=env)

    def serve(
        self,
        what: Path | str,
        model: str,
        *more: str,
        prefix: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> tuple[Child, dict[str, Any]]:
        """Start `mx serve` and wait until it is registered; see `source`.

        Returns:
            The process, and what it said of itself.
        """
        child = self.source(what, model, *more, prefix=prefix, env=env)
        return child, json.loads(child.hear())

    def close(self) -> None:
        """End all processes, the coordinator last."""
        for child in reversed(self._children):
            child.close(terminate=True)


def pss_nbytes(pid: int) -> int:
    """Return a process's proportional set size in bytes, memfds that it maps included."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def cpu_s(pid: int) -> float:
    """Return the user and system seconds of a process, from /proc/PID/stat."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
