"""Measures commands from a cold start, as ratios to a Python that does the least of their work.

- `mx --version` beside a process that imports grpc.aio and numpy.
- `mx pull` of a model that it attaches beside one that imports them and calls the coordinator and
  the source once each.

Each is a new process, timed from its start to its end, in turn with the others; its modules are
compiled. CPU times are shown, too: they say more on a machine that does other work.

    python -m benchmarks.cold [--rounds 3] [--each 5] [--json]
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from . import harness
from .checkpoints import write_checkpoint
from .processes import Cluster

MODEL = "cold"
#: Of `mx --version`, and of `mx pull`.
VERSION_BAR, PULL_BAR = 1.3, 1.5
_MX = "from mx.cli import main; main()"
_IMPORTS = "import grpc.aio, numpy"
#: Any method will do: one that a server does not know costs a call as well.
_CALLS = f"""
import asyncio, sys
{_IMPORTS}
async def call(address):
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            await channel.unary_unary("/grpc.health.v1.Health/Check")(b"")
        except grpc.aio.AioRpcError:
            pass
async def main():
    for address in sys.argv[1:]:
        await call(address)
asyncio.run(main())
"""
#: Ends a command by writing the names of its modules to the file in argv[1].
_MODULES = f"""
import atexit, sys
path = sys.argv.pop(1)
def write():
    with open(path, "w") as file:
        file.write("\\n".join(sorted(sys.modules)))
atexit.register(write)
{_MX}
"""


class Cold(NamedTuple):
    """What is measured. `run` starts a process, with the arguments of Python."""

    coordinator: str
    source: str
    run: Callable[[Sequence[str]], None]

    def processes(self) -> dict[str, list[str]]:
        """Return the arguments of each process by its name."""
        pull = ["pull", MODEL, "--coordinator", self.coordinator, "--log-level", "error"]
        return {
            "imports": ["-c", _IMPORTS],
            "mx --version": ["-c", _MX, "--version"],
            "imports and two calls": ["-c", _CALLS, self.coordinator, self.source],
            "mx pull": ["-c", _MX, *pull],
        }

    def modules(self, name: str, folder: Path) -> list[str]:
        """Return the names of the modules that a command of `processes` has loaded at its end."""
        path = folder / "modules.txt"
        self.run(["-c", _MODULES, str(path), *self.processes()[name][2:]])
        return path.read_text().splitlines()


def compiled(folder: Path) -> dict[str, str]:
    """Return an environment in which Python finds what this process does, and keeps what it
    compiles in a folder."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONPYCACHEPREFIX": str(folder / "compiled"),
        "PYTHONDONTWRITEBYTECODE": "",
    }


def cold(cluster: Cluster, folder: Path) -> Cold:
    """Serve a small model, and return what is measured with it.

    Args:
        cluster: Where.
        folder: For the checkpoint, and for what Python compiles.
    """
    checkpoint = folder / "model.safetensors"
    write_checkpoint(checkpoint, {f"model.layers.{n}.weight": (1 << 10, 1 << 9) for n in range(4)})
    _, said = cluster.serve(checkpoint, MODEL)
    environment = compiled(folder)

    def run(arguments: Sequence[str]) -> None:
        command = [sys.executable, *arguments]
        # Without a timeout: with one, `subprocess` looks every 50 ms whether the process has ended.
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)

    return Cold(cluster.coordinator, said["endpoint"], run)


def measure(found: Cold, rounds: int, each: int) -> list[harness.Row]:
    """Return a row of wall time and one of CPU time for each command.

    Args:
        found: What is measured.
        rounds: Each gives a ratio of medians; a row is the median of these.
        each: How many processes of each kind in a round.
    """
    wall: list[dict[str, float]] = []
    cpu: list[dict[str, float]] = []
    for _ in range(rounds):
        spent: dict[str, list[float]] = {name: [] for name in found.processes()}

        def timed(name: str, spent: dict[str, list[float]] = spent) -> float:
            began_s, before_s = time.perf_counter(), _children_cpu_s()
            found.run(found.processes()[name])
            spent[name].append(_children_cpu_s() - before_s)
            return time.perf_counter() - began_s

        contestants = {name: (lambda name=name: timed(name)) for name in spent}
        samples = harness.interleave(contestants, each)
        wall.append({name: statistics.median(times) for name, times in samples.items()})
        cpu.append({name: statistics.median(times[1:]) for name, times in spent.items()})
    return [
        _row(command, reference, bar, what, medians)
        for command, reference, bar in (
            ("mx --version", "imports", VERSION_BAR),
            ("mx pull", "imports and two calls", PULL_BAR),
        )
        for what, medians in (("", wall), (", CPU time", cpu))
    ]


def _row(
    command: str, reference: str, bar: float, what: str, medians: list[dict[str, float]]
) -> harness.Row:
    samples = {name: [each[name] for each in medians] for name in (command, reference)}
    ratios = [each[command] / each[reference] for each in medians]
    own_s, reference_s = (statistics.median(samples[name]) for name in (command, reference))
    detail = (
        f"{own_s:.3f} s against {reference_s:.3f}; by round "
        f"{', '.join(f'{ratio:.2f}' for ratio in ratios)}"
    )
    work = f"{command}, cold{what} / {reference}"
    return harness.at_most(work, statistics.median(ratios), "x", bar, detail, samples, digits=2)


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def rows(rounds: int, each: int = 5) -> list[harness.Row]:
    """Return the rows of a small model that is served for them.

    Args:
        rounds: Each gives a ratio of medians.
        each: How many processes of each kind in a round.
    """
    with tempfile.TemporaryDirectory() as folder, closing(Cluster()) as cluster:
        return measure(cold(cluster, Path(folder)), rounds, each)


def main() -> None:
    """Print the rows."""
    parser = harness.parser(__doc__, rounds=3)
    parser.add_argument("--each", type=int, default=5, help="processes of each kind in a round")
    options = parser.parse_args()
    harness.show(rows(options.rounds, options.each), as_json=options.json)


if __name__ == "__main__":
    main()
