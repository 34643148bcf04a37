"""Measures the time from the call of a pull to its first read, as rows of the table.

The models are as large as real ones, in sparse memory of which nothing is touched: what is
measured is looking up, fetching and checking the description, planning, and connecting. Source and
target are on hosts of their own (network namespaces) that a link of 1 Gbit/s joins. The pull is
closed after its first read has begun.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from functools import partial

from . import harness
from .hosts import Hosts, unavailable
from .processes import Child, Cluster

MBIT_PER_S = 1000
MODELS = {"723": (723, 141 * 10**9, 50), "50000": (50_000, 100 * 10**9, 300)}
NEAR, FAR = "near", "far"

SOURCE = f"""
import sys
from mx import config
from {__package__}.control import MODELS
from {__package__}.sparse import shapes_of, sparse_source
coordinator, listen, name = sys.argv[1:]
settings = config.load({{"coordinator": coordinator, "listen": listen, "insecure": True}})
count, nbytes, _ = MODELS[name]
with sparse_source(shapes_of(count, nbytes), coordinator, name, settings):
    print("ready", flush=True)
    sys.stdin.read()
"""
#: Pulls once for each model that it reads; prints the seconds until its first read began.
TARGET = """
import json, mmap, sys, time
from mx import api, config
settings = config.load({"coordinator": sys.argv[1], "listen": sys.argv[2], "insecure": True})
reserved = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
into = memoryview(mmap.mmap(-1, 160 * 10**9, flags=reserved))
for line in sys.stdin:
    began_s = time.monotonic()
    pull = api.pull(line.strip(), transport="tcp", into=into, settings=settings)
    log = pull._state
    while not log.first_read_s and not log.ended:
        time.sleep(0.0005)
    answer = log.first_read_s - began_s if log.first_read_s else repr(log.error)
    pull.close()
    print(json.dumps(answer), flush=True)
"""


def rows(rounds: int, say: Callable[[str], None]) -> list[harness.Row]:
    """Return a row for each model; none, with the reason to `say`, if hosts can't be made."""
    reason = unavailable()
    if reason is not None:
        say(f"control: skipped, {reason}")
        return []
    with Hosts() as hosts:
        link = hosts.link(NEAR, FAR, mbit_per_s=MBIT_PER_S)
        with closing(Cluster(link.address(NEAR), hosts.prefix(NEAR))) as cluster:
            for name in MODELS:
                listen = f"{link.address(NEAR)}:0"
                cluster.start("-c", SOURCE, cluster.coordinator, listen, name).hear()
            listen = f"{link.address(FAR)}:0"
            far = hosts.prefix(FAR)
            target = cluster.start("-c", TARGET, cluster.coordinator, listen, prefix=far)
            contestants = {name: partial(_seconds, target, name) for name in MODELS}
            samples = harness.interleave(contestants, rounds)
    return [
        harness.at_most(
            f"control work, {count:,} tensors of {nbytes / 1e9:.0f} GB, 1 Gbit/s",
            harness.median(samples, name) * 1e3,
            "ms",
            bar_ms,
            "",
            {"mx": samples[name]},
        )
        for name, (count, nbytes, bar_ms) in MODELS.items()
    ]


def _seconds(target: Child, name: str) -> float:
    """Return how long the pull's first read took to begin."""
    answer = json.loads(target.ask(name))
    if not isinstance(answer, float):
        raise RuntimeError(f"a pull of the benchmark has failed: {answer}")
    return answer
