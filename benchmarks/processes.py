"""Starts the processes to measure: a coordinator and sources, each `python -m mx ...`."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from pathlib import Path

from mx import api
from mx.errors import CoordinatorError

START_TIMEOUT_S = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Cluster:
    """A coordinator on a free loopback port and the sources registered with it. Close it."""

    def __init__(self) -> None:
        self.coordinator = f"127.0.0.1:{free_port()}"
        self._processes: list[subprocess.Popen[bytes]] = []
        self.coordinator_pid = self.start(
            "-c",
            "from mx.cli import coordinator_main; coordinator_main()",
            "--listen",
            self.coordinator,
        ).pid
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                api.list_models(coordinator=self.coordinator)
                return
            except CoordinatorError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.05)

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
        self._processes.append(process)
        return process

    def serve(self, checkpoint: Path, model: str) -> subprocess.Popen[bytes]:
        """Start `mx serve` and wait until it is registered."""
        process = self.start(
            "-m",
            "mx",
            "serve",
            str(checkpoint),
            "--model",
            model,
            "--coordinator",
            self.coordinator,
        )
        self.wait_for(model, process)
        return process

    def wait_for(self, model: str, process: subprocess.Popen[bytes]) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not api.list_sources(model, coordinator=self.coordinator):
            if process.poll() is not None:
                raise RuntimeError(f"the source of {model} ended with {process.returncode}")
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"the source of {model} did not register")
            time.sleep(0.05)

    def close(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            if process.poll() is None:
                process.kill()
                process.wait()


def pss_nbytes(pid: int) -> int:
    """Return a process's proportional set size in bytes, memfds that it maps included."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0
