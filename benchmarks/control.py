"""Measures the time from the call of a pull to its first read, as rows of the table.

The models are as large as real ones, in sparse memory of which nothing is touched: what is
measured is looking up, fetching and checking the description, planning, and connecting. Source and
target are on hosts of their own (network namespaces) that a link of 1 Gbit/s joins. The pull is
closed after its first read has begun.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable

from . import harness
from .hosts import Hosts, unavailable

MBIT_PER_S = 1000
MODELS = {"723": (723, 141 * 10**9, 50), "50000": (50_000, 100 * 10**9, 300)}
NEAR, FAR = "near", "far"

COORDINATOR = "from mx.cli import coordinator_main; coordinator_main()"
SOURCE = """
import sys
from mx import config
from benchmarks.control import MODELS
from benchmarks.sparse import shapes_of, sparse_source
coordinator, listen, name = sys.argv[1:]
settings = config.load({"coordinator": coordinator, "listen": listen, "insecure": True})
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
    """Return a row for each model; none if hosts can't be made."""
    reason = unavailable()
    if reason is not None:
        say(f"control: skipped, {reason}")
        return []
    with Hosts() as hosts:
        link = hosts.link(NEAR, FAR, mbit_per_s=MBIT_PER_S)
        coordinator = f"{link.address(NEAR)}:7600"
        listening = ["-c", COORDINATOR, "--listen", coordinator, "--insecure"]
        hosts.start(NEAR, [sys.executable, *listening], stdout=subprocess.DEVNULL)
        time.sleep(2)
        sources = [
            _start(hosts, NEAR, SOURCE, coordinator, f"{link.address(NEAR)}:0", name)
            for name in MODELS
        ]
        for source in sources:
            assert source.stdout is not None
            if source.stdout.readline().strip() != "ready":
                raise RuntimeError("a source of the benchmark has failed: see above")
        target = _start(hosts, FAR, TARGET, coordinator, f"{link.address(FAR)}:0")
        samples: dict[str, list[float]] = {name: [] for name in MODELS}
        for _ in range(rounds + 1):
            for name, found in samples.items():
                found.append(_ask(target, name))
        for process in (target, *sources):
            process.kill()
            process.communicate()
    made = []
    for name, (count, nbytes, bar_ms) in MODELS.items():
        values = samples[name][1:]
        value = harness.median({"mx": values}, "mx") * 1e3
        work = f"control work, {count:,} tensors of {nbytes / 1e9:.0f} GB, 1 Gbit/s"
        row = harness.Row(
            work, round(value, 1), "ms", f"<= {bar_ms} ms", value <= bar_ms, samples={"mx": values}
        )
        made.append(row)
    return made


def _start(hosts: Hosts, host: str, code: str, *arguments: str) -> subprocess.Popen[str]:
    command = [*hosts.prefix(host), sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _ask(process: subprocess.Popen[str], line: str) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    answer = json.loads(process.stdout.readline() or '"the target has ended"')
    if not isinstance(answer, float):
        raise RuntimeError(f"a pull of the benchmark has failed: {answer}")
    return answer
