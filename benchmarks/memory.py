"""Measures the peak proportional set size of processes, less the model and the idle process."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

from mx import api

from .processes import Cluster, pss_nbytes

_TARGET = """
import sys
import mx.api, mx.memory.tensors
from mx import plugins
plugins.transports()
print("idle", flush=True)
sys.stdin.readline()
with mx.api.pull(sys.argv[1], coordinator=sys.argv[2], transport=sys.argv[3],
                 attach=False) as pull:
    print(pull.wait().bytes, flush=True)
    sys.stdin.readline()
"""

_IDLE_SOURCE = """
import sys
import mx.api, mx.cli.serve, mx.cli.app
from mx import plugins
plugins.transports()
print("idle", flush=True)
sys.stdin.readline()
"""


class _Sampler(threading.Thread):
    """Samples the PSS of a process and keeps the highest value."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.peak_nbytes = 0
        self._pid = pid
        self._stop_event = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._stop_event.wait(0.005):
            try:
                self.peak_nbytes = max(self.peak_nbytes, pss_nbytes(self._pid))
            except OSError:
                return

    def stop(self) -> int:
        self._stop_event.set()
        self.join()
        return self.peak_nbytes


def _child(script: str, *arguments: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline().strip() == "idle"
    return child


def _say(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


def target_overhead_nbytes(cluster: Cluster, model: str, transport: str) -> int:
    """Return the peak of a pulling process, beyond its arena."""
    child = _child(_TARGET, model, cluster.coordinator, transport)
    try:
        idle = pss_nbytes(child.pid)
        sampler = _Sampler(child.pid)
        _say(child)
        assert child.stdout is not None
        nbytes = int(child.stdout.readline())
        peak = sampler.stop()
        _say(child)
        child.wait(30)
    finally:
        child.kill()
        child.communicate()
    return peak - idle - nbytes


def source_overhead_nbytes(cluster: Cluster, checkpoint: Path) -> int:
    """Return the peak of `mx serve` while it loads and serves one pull, beyond the model."""
    idle_child = _child(_IDLE_SOURCE)
    try:
        idle = pss_nbytes(idle_child.pid)
        _say(idle_child)
        idle_child.wait(30)
    finally:
        idle_child.kill()
        idle_child.communicate()
    name = "bench-memory"
    process = cluster.start(
        "-m", "mx", "serve", str(checkpoint), "--model", name, "--coordinator", cluster.coordinator
    )
    sampler = _Sampler(process.pid)
    cluster.wait_for(name, process)
    with api.pull(name, coordinator=cluster.coordinator, transport="tcp") as pull:
        nbytes = pull.wait(120).bytes
    time.sleep(0.1)
    return sampler.stop() - idle - nbytes
