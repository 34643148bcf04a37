"""Measures the peak proportional set size of processes, less the model and the idle process, as
rows of the table."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

from mx import api
from mx.units import MIB

from . import harness
from .processes import Child, Cluster, pss_nbytes

_TARGET = """
import sys
import mx.api.pulling, mx.fetching.connections, mx.fetching.pages, mx.memory.tensors
import mx.swarm.sharing
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
import mx.api.serving, mx.cli.serve, mx.cli.app
from mx import plugins
plugins.transports()
print("idle", flush=True)
sys.stdin.readline()
"""


class Sampler(threading.Thread):
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
        """Return the highest value."""
        self._stop_event.set()
        self.join()
        return self.peak_nbytes


def _target_nbytes(cluster: Cluster, model: str, transport: str) -> int:
    """Return the peak of a pulling process, beyond its arena."""
    child = Child("-c", _TARGET, model, cluster.coordinator, transport)
    try:
        child.hear()
        idle = pss_nbytes(child.pid)
        sampler = Sampler(child.pid)
        nbytes = int(child.ask())
        return sampler.stop() - idle - nbytes
    finally:
        child.close()


def _source_nbytes(cluster: Cluster, checkpoint: Path) -> int:
    """Return the peak of `mx serve` while it loads and serves one pull, beyond the model."""
    idle_child = Child("-c", _IDLE_SOURCE)
    try:
        idle_child.hear()
        idle = pss_nbytes(idle_child.pid)
    finally:
        idle_child.close()
    source = cluster.source(checkpoint, "bench-memory")
    sampler = Sampler(source.pid)
    name = json.loads(source.hear())["model"]
    with api.pull(name, coordinator=cluster.coordinator, transport="tcp") as pull:
        nbytes = pull.wait(120).bytes
    time.sleep(0.1)
    return sampler.stop() - idle - nbytes


def rows(cluster: Cluster, checkpoint: Path, model: str) -> list[harness.Row]:
    """Return the rows of targets and of a source.

    Args:
        cluster: Serves the model.
        checkpoint: The model's.
        model: Its name.
    """
    measures: list[tuple[str, Callable[[], int], int]] = [
        ("target, shm copy", lambda: _target_nbytes(cluster, model, "shm"), 64),
        ("target, tcp", lambda: _target_nbytes(cluster, model, "tcp"), 64),
        ("source", lambda: _source_nbytes(cluster, checkpoint), 32),
    ]
    return [
        harness.at_most(f"memory beyond the model, {what}", measure() / MIB, "MiB", bar_mib)
        for what, measure, bar_mib in measures
    ]
