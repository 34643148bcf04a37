"""Measures the coordinator under a thousand sources, beside a bare server of grpc.aio.

Each round loads one after the other. The load generator waits for its own event loop as well: what
it sees of a bare server is what a coordinator can reach.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from mx.errors import LocalError

from .harness import Row, at_most, shown
from .processes import Child, Cluster, cpu_s

LOAD = Path(__file__).with_name("coordinator_load.py")
BARE = Path(__file__).with_name("coordinator_bare.py")
_WAYS = {"spread": "spread over the second", "once": "all at once"}


def measure(
    address: str, pid: int, *, seconds: float = 10.0, tls: Sequence[str] = (), **load: int
) -> Mapping[str, Any]:
    """Run the load generator as a process.

    Args:
        address: The server to load.
        pid: Its process.
        seconds: How long calls are timed with heartbeats spread, and all at once.
        tls: The client's certificate, key and authority; empty for plain text.
        load: Options of the load generator.

    Returns:
        What it printed, and the server's share of a core while calls were timed ("core_spread",
        "core_once").

    Raises:
        LocalError: The load generator fails.
    """
    options = [f"--{name}={value}" for name, value in {**load, "seconds": seconds}.items()]
    command = [sys.executable, str(LOAD), address, *options, *(["--tls", *tls] if tls else [])]
    used_s: defaultdict[str, float] = defaultdict(float)
    found: Mapping[str, Any] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            found = json.loads(line)
            if "timing" in found:
                used_s[found["timing"]] -= cpu_s(pid)
            elif "timed" in found:
                used_s[found["timed"]] += cpu_s(pid)
    if process.returncode or "lost" not in found:
        raise LocalError(f"the load generator ended with {process.returncode}")
    return {**found, **{f"core_{way}": used / seconds for way, used in used_s.items()}}


def rows(rounds: int = 5, seconds: float = 8.0, sources: int = 1000) -> list[Row]:
    """Return the rows for sources at 1 Hz, 50 resolves a second and 50 watchers."""
    ours: list[Mapping[str, Any]] = []
    bare: list[Mapping[str, Any]] = []
    for _ in range(rounds):
        with closing(Cluster()) as cluster:
            ours.append(
                measure(
                    cluster.coordinator, cluster.coordinator_pid, seconds=seconds, sources=sources
                )
            )
        child = Child(str(BARE))
        try:
            address = json.loads(child.hear())["listen"]
            bare.append(measure(address, child.pid, seconds=seconds, sources=sources))
        finally:
            child.close(terminate=True)
    work = f"coordinator, {sources:,} sources"
    found = []
    for way, named in _WAYS.items():
        p99s = {
            name: [run[way]["p99_ms"] for run in runs]
            for name, runs in (("mx", ours), ("bare", bare))
        }
        cores = {
            name: [run[f"core_{way}"] for run in runs]
            for name, runs in (("mx", ours), ("bare", bare))
        }
        p99, p99_bare = (statistics.median(p99s[name]) for name in ("mx", "bare"))
        core, core_bare = (statistics.median(cores[name]) for name in ("mx", "bare"))
        found += [
            at_most(
                f"{work}, {named}: p99 of a call",
                p99 / p99_bare,
                "x a bare server's",
                5,
                f"{p99:.1f} ms beside {p99_bare:.1f} ms",
                p99s,
                digits=2,
            ),
            at_most(
                f"{work}, {named}: CPU",
                core / core_bare,
                "x a bare server's",
                2,
                f"{core:.0%} of a core beside {core_bare:.0%}",
                cores,
                digits=2,
            ),
        ]
    storms = {
        name: [run["storm_s"] for run in runs] for name, runs in (("mx", ours), ("bare", bare))
    }
    storm, storm_bare = (statistics.median(storms[name]) for name in ("mx", "bare"))
    text = f"all registered after {storm:g} s; with the bare server after {storm_bare:g} s"
    found.append(shown(f"{work}: storm", storm / storm_bare, "x a bare server's", text, storms))
    lost = sum(sum(run["lost"].values()) for run in ours)
    text = str([run["lost"] for run in ours if run["lost"]] or "none lost")
    found.append(Row(f"{work}: streams lost", lost, "streams", "0", not lost, text))
    return found
