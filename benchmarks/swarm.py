"""Measures how long the last of many simultaneous targets takes, against one alone.

Hosts are network namespaces around a switch, with limited links each way; every process is real.
`python -m benchmarks.swarm --targets 8` prints the results.

All hosts share this machine's processors, unlike real ones; the results say how busy they were.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mx.units import MIB

from . import harness
from .checkpoints import write_checkpoint
from .hosts import Hosts, Link, unavailable
from .processes import Child, Cluster

ORIGIN = "origin"
#: Pulls once for each line that it reads, and closes the pull at the next line.
TARGET = """
import json, sys
from mx import api, config
flags = {"coordinator": sys.argv[1], "listen": sys.argv[2], "insecure": True}
settings = config.load(flags)
held = None
for line in sys.stdin:
    if held is not None:
        held.close()
        held = None
        print(json.dumps({"closed": True}), flush=True)
        continue
    held = api.pull("m", transport="tcp", settings=settings)
    events = [event.at_s for event in held.layers()]
    try:
        report = held.wait(300).to_json()
    except Exception as error:
        report = {"error": str(error)}
    report["layers_at_s"] = events
    print(json.dumps(report), flush=True)
if held is not None:
    held.close()
"""


@dataclass(frozen=True)
class Round:
    """The results of a round, in seconds; `origin_copies` is what the origin sent, in models."""

    finish_s: float
    median_s: float
    first_layer_s: float
    first_quarter_s: float
    origin_copies: float
    retries: int
    busy: float  # part of the processors' time


def _finish_s(of: Round) -> float:
    return of.finish_s


class Rig:
    """An origin with a coordinator, and `targets` processes that pull on command."""

    def __init__(
        self, hosts: Hosts, checkpoint: Path, targets: int, mbit_per_s: float, log: Path | None
    ) -> None:
        self._hosts = hosts
        names = [ORIGIN, *(f"t{number}" for number in range(targets))]
        self._links = hosts.star(names, up_mbit_per_s=mbit_per_s, down_mbit_per_s=mbit_per_s)
        at = self._links[ORIGIN].address(ORIGIN)
        with ExitStack() as stack, (log or Path(os.devnull)).open("ab") as errors:
            cluster = stack.enter_context(closing(Cluster(at, hosts.prefix(ORIGIN), errors)))
            cluster.serve(checkpoint, "m")
            self._targets = [self._target(cluster, name) for name in names[1:]]
            self._processes = stack.pop_all()

    def _target(self, cluster: Cluster, name: str) -> Child:
        listen = f"{self._links[name].address(name)}:0"
        prefix = self._hosts.prefix(name)
        return cluster.start("-c", TARGET, cluster.coordinator, listen, prefix=prefix)

    def pull(self, targets: int) -> Round:
        """Let the first `targets` processes pull at once, and return the results."""
        origin: Link = self._links[ORIGIN]
        before = self._hosts.sent_nbytes(origin, ORIGIN)
        used = self._targets[:targets]
        began_s, idle_s = time.monotonic(), _idle_s()
        reports = self._ask(used)
        took_s = (time.monotonic() - began_s) * (os.cpu_count() or 1)
        busy = 1 - (_idle_s() - idle_s) / took_s
        sent = self._hosts.sent_nbytes(origin, ORIGIN) - before
        failed = [report["error"] for report in reports if "error" in report]
        if failed:
            raise RuntimeError("; ".join(failed))
        self._ask(used)  # they close their pulls
        time.sleep(1.0)
        ends = [report["seconds"] for report in reports]
        layers = [report["layers_at_s"] for report in reports]
        return Round(
            max(ends),
            statistics.median(ends),
            max(each[0] for each in layers),
            statistics.fmean(max(each[: max(1, len(each) // 4)]) for each in layers),
            sent / reports[0]["bytes"],
            sum(report["retries"] for report in reports),
            busy,
        )

    @staticmethod
    def _ask(children: list[Child]) -> list[dict[str, Any]]:
        """Send a line to each at once, and return their answers."""
        for child in children:
            child.tell()
        return [json.loads(child.hear()) for child in children]

    def close(self) -> None:
        """End all processes."""
        self._processes.close()


def _idle_s() -> float:
    """Return the idle seconds of all processors together, since the machine's start."""
    with open("/proc/stat") as stat:
        fields = stat.readline().split()
    return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")


def checkpoint(folder: Path, mib: int) -> Path:
    """Return a checkpoint with layers of two chunks each, made once and kept in `folder`."""
    path = folder / f"swarm-{mib}.safetensors"
    if not path.exists():
        rows = 16 * MIB // 2 // 2048
        layers = max(1, mib // 32)
        shapes = {
            f"model.layers.{n}.{w}.weight": (rows, 2048)
            for n in range(layers)
            for w in ("up", "down")
        }
        write_checkpoint(path, shapes)
    return path


def rows(one: list[Round], many: list[Round], targets: int) -> list[harness.Row]:
    """Return the rows of rounds of one target and of all at once, in multiples of one alone.

    Args:
        one: The rounds of one.
        many: Those of all, each after one of `one`.
        targets: How many all are.
    """

    def row(what: str, seconds: Callable[[Round], float], detail: str = "") -> harness.Row:
        ratios = [seconds(all_) / each.finish_s for each, all_ in zip(one, many, strict=True)]
        work = f"{targets} at once / one alone: {what}"
        return harness.shown(work, statistics.median(ratios), "x", detail, {"ratios": ratios})

    def middle(value: Callable[[Round], float], rounds: list[Round]) -> float:
        return statistics.median(map(value, rounds))

    seconds = f"{middle(_finish_s, many):.2f} s against {middle(_finish_s, one):.2f}"
    origin = f"the origin sent {middle(lambda each: each.origin_copies, many):.2f} models"
    busy = ", ".join(f"{middle(lambda each: each.busy, rounds):.0%}" for rounds in (one, many))
    detail = f"{seconds}; {origin}; {sum(each.retries for each in many)} retries; busy {busy}"
    return [
        row("the last is done", _finish_s, detail),
        row("the median is done", lambda each: each.median_s),
        row("the first layer is everywhere", lambda each: each.first_layer_s),
        row("the first quarter", lambda each: each.first_quarter_s),
    ]


def measured(
    folder: Path,
    rounds: int,
    say: Callable[[str], None],
    *,
    targets: int = 8,
    mib: int = 1024,
    mbit_per_s: float = 1000,
    log: Path | None = None,
) -> list[harness.Row]:
    """Return the rows of pulls between hosts of their own; none, with the reason to `say`, if these
    can't be made.

    Args:
        folder: Keeps the checkpoint between runs.
        rounds: Each is one target alone, then all of them.
        say: Reports what is left out.
        targets: How many pull at once.
        mib: The size of the model.
        mbit_per_s: The speed of each host's link, each way.
        log: A file for the errors of the processes.
    """
    reason = unavailable()
    if reason is not None:
        say(f"swarm: skipped, {reason}")
        return []
    path = checkpoint(folder, mib)
    with Hosts() as hosts, closing(Rig(hosts, path, targets, mbit_per_s, log)) as rig:
        rig.pull(targets)  # loads code
        pairs = [(rig.pull(1), rig.pull(targets)) for _ in range(rounds)]
    one, many = ([pair[side] for pair in pairs] for side in (0, 1))
    return rows(one, many, targets)


def main() -> None:
    parser = harness.parser(__doc__, rounds=3)
    parser.add_argument("--targets", type=int, default=8)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--mbit", type=float, default=1000)
    parser.add_argument("--log", type=Path, help="a file for the errors of the processes")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measured(
            Path(folder),
            given.rounds,
            harness.say,
            targets=given.targets,
            mib=given.mib,
            mbit_per_s=given.mbit,
            log=given.log,
        )
    harness.show(found, as_json=given.json)


if __name__ == "__main__":
    main()
