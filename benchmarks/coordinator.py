"""Measures the coordinator under a thousand sources, as rows of the table."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from mx.errors import LocalError

from .harness import Row, at_most
from .processes import Cluster, cpu_s

LOAD = Path(__file__).with_name("coordinator_load.py")


def measure(cluster: Cluster, *, seconds: float = 10.0, **load: int) -> Mapping[str, Any]:
    """Run the load generator as a process.

    Args:
        cluster: The coordinator to load.
        seconds: How long calls are timed.
        load: Options of the load generator.

    Returns:
        What it printed, and the coordinator's share of a core ("core") while calls were timed.

    Raises:
        LocalError: The load generator fails.
    """
    options = [f"--{name}={value}" for name, value in {**load, "seconds": seconds}.items()]
    command = [sys.executable, str(LOAD), cluster.coordinator, *options]
    before = after = 0.0
    found: Mapping[str, Any] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            found = json.loads(line)
            if found.get("timing") is True:
                before = cpu_s(cluster.coordinator_pid)
            elif found.get("timing") is False:
                after = cpu_s(cluster.coordinator_pid)
    if process.returncode or "lost" not in found:
        raise LocalError(f"the load generator ended with {process.returncode}")
    return {**found, "core": (after - before) / seconds}


def rows() -> list[Row]:
    """Return the rows for 1,000 sources at 1 Hz, 50 resolves a second and 50 watchers."""
    with closing(Cluster()) as cluster:
        found = measure(cluster, sources=1000, watchers=50, resolves=50)
    lost = sum(found["lost"].values())
    work = "coordinator, 1,000 sources"
    storm = f"all registered after {found['storm_s']:g} s; {found['lost'] or 'none lost'}"
    return [
        at_most(f"{work}: p99 of a call", found["p99_ms"], "ms", 20),
        at_most(f"{work}: of a core", 100 * found["core"], "%", 40),
        Row(f"{work}: streams lost", lost, "streams", "0", not lost, storm),
    ]
