"""Measures how long the last of many simultaneous targets takes, against one alone.

Hosts are network namespaces around a switch, with limited links each way; every process is real.
`python -m benchmarks.swarm --targets 8` prints the results.

All hosts share this machine's processors, unlike real ones; the results say how busy they were.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mx.units import MIB

from .checkpoints import write_checkpoint
from .hosts import Hosts, Link, unavailable

ORIGIN = "origin"
START_TIMEOUT_S = 60.0
MX = (sys.executable, "-m", "mx")
COORDINATOR = (sys.executable, "-c", "from mx.cli import coordinator_main; coordinator_main()")
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


class Rig:
    """An origin with a coordinator, and `targets` processes that pull on command."""

    def __init__(
        self,
        hosts: Hosts,
        checkpoint: Path,
        targets: int,
        mbit_per_s: float,
        log: Path | None,
    ) -> None:
        self._hosts = hosts
        self._log = log
        names = [ORIGIN, *(f"t{number}" for number in range(targets))]
        self._links = hosts.star(names, up_mbit_per_s=mbit_per_s, down_mbit_per_s=mbit_per_s)
        at = f"{self._links[ORIGIN].address(ORIGIN)}"
        control = ("--coordinator", f"{at}:7600", "--insecure", "--json")
        self._start(ORIGIN, [*COORDINATOR, "--listen", f"{at}:7600", "--insecure"])
        serving = [*MX, "serve", str(checkpoint), "--model", "m", "--listen", f"{at}:0", *control]
        time.sleep(2.0)
        self._start(ORIGIN, serving)
        self._wait_for_source([*MX, "sources", "m", *control])
        self._targets = [
            self._pipe(name, [sys.executable, "-c", TARGET, f"{at}:7600", self._listen(name)])
            for name in names[1:]
        ]

    def _listen(self, name: str) -> str:
        return f"{self._links[name].address(name)}:0"

    def _wait_for_source(self, command: list[str]) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            done = subprocess.run(
                [*self._hosts.prefix(ORIGIN), *command], check=False, capture_output=True
            )
            if not done.returncode and json.loads(done.stdout).get("sources"):
                return
            time.sleep(0.2)
        raise RuntimeError("the origin did not register")

    def _errors(self, name: str) -> Any:
        if self._log is None:
            return subprocess.DEVNULL
        return (self._log / f"{name}.log").open("ab")

    def _start(self, name: str, command: list[str]) -> None:
        self._hosts.start(name, command, stdout=subprocess.DEVNULL, stderr=self._errors(name))

    def _pipe(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*self._hosts.prefix(name), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors(name),
        )

    def pull(self, targets: int) -> Round:
        """Let the first `targets` processes pull at once, and return the results."""
        origin: Link = self._links[ORIGIN]
        before = self._hosts.sent_nbytes(origin, ORIGIN)
        used = self._targets[:targets]
        began_s, idle_s = time.monotonic(), _idle_s()
        self._tell(used)
        reports = [self._read(process) for process in used]
        took_s = (time.monotonic() - began_s) * (os.cpu_count() or 1)
        busy = 1 - (_idle_s() - idle_s) / took_s
        sent = self._hosts.sent_nbytes(origin, ORIGIN) - before
        failed = [report["error"] for report in reports if "error" in report]
        if failed:
            raise RuntimeError("; ".join(failed))
        self._tell(used)
        for process in used:
            self._read(process)
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
    def _tell(processes: list[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()

    @staticmethod
    def _read(process: subprocess.Popen[bytes]) -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("a target has ended")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        for process in self._targets:
            process.kill()
            process.communicate()


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", type=int, default=8)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--mbit", type=float, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--log", type=Path, help="a folder for the output of the processes")
    arguments = parser.parse_args()
    reason = unavailable()
    if reason is not None:
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as folder, Hosts() as hosts:
        path = checkpoint(Path(folder), arguments.mib)
        rig = Rig(hosts, path, arguments.targets, arguments.mbit, arguments.log)
        try:
            rig.pull(arguments.targets)  # loads code
            for number in range(arguments.rounds):
                one = rig.pull(1)
                many = rig.pull(arguments.targets)
                print(
                    f"round {number + 1}: one {one.finish_s:.2f} s; {arguments.targets} at once "
                    f"{many.finish_s:.2f} s ({many.finish_s / one.finish_s:.2f} x, median "
                    f"{many.median_s:.2f} s); first layer everywhere "
                    f"{many.first_layer_s / one.finish_s:.2f} x, first quarter "
                    f"{many.first_quarter_s / one.finish_s:.2f} x; the origin sent "
                    f"{many.origin_copies:.2f} models; {many.retries} retries; "
                    f"processors {one.busy:.0%} busy, {many.busy:.0%}",
                    flush=True,
                )
        finally:
            rig.close()


if __name__ == "__main__":
    main()
