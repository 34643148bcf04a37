"""Measures eight separate `mx pull` commands at once against one, each a new process, and the same
of bare processes.

    python -m benchmarks.swarm_commands [--targets 8] [--mbit 250] [--mib 256] [--rounds 5]
        [--svg FILE]

Hosts are those of `benchmarks.swarm`. Time runs from the start of all commands to the end of the
last. The bare processes (`benchmarks/references/relay.py`) import what mx has to, and pass the same
bytes on in the ideal schedule: what they take longer than one of them is the machine's. `--svg`
traces one more round of all commands, and draws it (`benchmarks.swarm_trace`).
"""

from __future__ import annotations

import compileall
import functools
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import mx
import mx_transports
from mx.units import MIB

from . import harness, swarm_trace
from .hosts import Hosts, unavailable
from .processes import Cluster
from .swarm import ORIGIN, checkpoint

BAR = 1.2
_PORT = 7099
_RELAY = Path(__file__).parent / "references" / "relay.py"
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Round:
    """What the commands of one round took: until the last had ended, and of CPU time by command;
    `origin_copies` is what the origin sent, in models."""

    finish_s: float
    cpu_s: float
    origin_copies: float


class Rig:
    """An origin with a coordinator and a bare one beside it, and hosts for commands."""

    def __init__(
        self,
        hosts: Hosts,
        folder: Path,
        targets: int,
        mib: int,
        mbit_per_s: float,
        congestion: str | None = None,
    ) -> None:
        """
        Args:
            hosts: Makes the hosts.
            folder: For the checkpoint.
            targets: How many hosts there are for commands.
            mib: The model's size.
            mbit_per_s: The speed of the links.
            congestion: How TCP avoids congestion there; None: as on this machine.
        """
        self._hosts, self._pieces = hosts, mib
        self.names = [f"t{number}" for number in range(targets)]
        every = [ORIGIN, *self.names]
        self._links = hosts.star(every, up_mbit_per_s=mbit_per_s, down_mbit_per_s=mbit_per_s)
        self._at = {name: self._links[name].address(name) for name in every}
        self.origin = self._at[ORIGIN]
        for name in every if congestion else ():
            chosen = f"net.ipv4.tcp_congestion_control={congestion}"
            subprocess.run([*hosts.prefix(name), "sysctl", "-qw", chosen], check=True)
        self._environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        with ExitStack() as stack:
            prefix = hosts.prefix(ORIGIN)
            cluster = stack.enter_context(closing(Cluster(self.origin, prefix)))
            self._coordinator = cluster.coordinator
            origin, _ = cluster.serve(checkpoint(folder, mib), "m")
            #: The processes at the origin's host, by what they are.
            self.servers = {"coordinator": cluster.coordinator_pid, "origin": origin.pid}
            bare = (str(_RELAY), "origin", self.origin, str(_PORT), str(mib))
            cluster.start(*bare).hear()
            self._processes = stack.pop_all()

    def pull(self, targets: int, *, traces: Path | None = None) -> Round:
        """Run `mx pull` at so many hosts at once, with traces in a folder where it is named."""
        commands = []
        for name in self.names[:targets]:
            run = ["-m", "mx"]
            if traces is not None:
                run = ["-m", f"{__package__}.traced", str(traces / f"{name}.json")]
            flags = ("--transport", "tcp", "--insecure", "--quiet")
            listen = ("--listen", f"{self._at[name]}:0")
            commands.append(
                [*run, "pull", "m", "--coordinator", self._coordinator, *listen, *flags]
            )
        if traces is None:
            return self._run(commands)
        switch = self._links[ORIGIN].b
        ports = {self._links[name].device(switch): name for name in self._at}
        sampler = swarm_trace.Sampler(self._hosts.prefix(switch), ports, self.servers, traces)
        with closing(sampler):
            return self._run(commands)

    def relay(self, targets: int) -> Round:
        """Run as many bare processes at once."""
        used = [self._at[name] for name in self.names[:targets]]
        origin = (self.origin, str(_PORT))
        return self._run(
            [
                [str(_RELAY), "host", str(self._pieces), str(number), *origin, *used]
                for number in range(targets)
            ]
        )

    def _run(self, commands: Sequence[Sequence[str]]) -> Round:
        """Run a command at each host, with Python's arguments, until all have ended."""
        link = self._links[ORIGIN]
        before = self._hosts.sent_nbytes(link, ORIGIN)
        spent_s, began_s = _children_cpu_s(), time.monotonic()
        running = [
            subprocess.Popen(
                [*self._hosts.prefix(name), sys.executable, *arguments],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
            for name, arguments in zip(self.names, commands, strict=False)
        ]
        try:
            codes = [process.wait(_TIMEOUT_S) for process in running]
        finally:
            for process in running:
                process.kill()
        finish_s = time.monotonic() - began_s
        spent_s = _children_cpu_s() - spent_s
        if any(codes):
            raise RuntimeError(f"a command has failed: exit codes {codes}")
        time.sleep(1.0)
        sent = self._hosts.sent_nbytes(link, ORIGIN) - before
        return Round(finish_s, spent_s / len(running), sent / (self._pieces * MIB))

    def close(self) -> None:
        """End all processes."""
        self._processes.close()


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _rows(found: dict[str, list[Round]], targets: int) -> list[harness.Row]:
    rows = []
    for kind, bar in (("mx pull", BAR), ("bare", None)):
        one, many = found[f"{kind}, one"], found[f"{kind}, all"]
        ratios = [all_.finish_s / each.finish_s for each, all_ in zip(one, many, strict=True)]
        median = functools.partial(_median, one), functools.partial(_median, many)
        seconds, cpu = ([of(what) for of in median] for what in (_finish_s, _cpu_s))
        detail = (
            f"{seconds[1]:.2f} s against {seconds[0]:.2f}; CPU s by command {cpu[1]:.2f} and "
            f"{cpu[0]:.2f}; the origin sent {median[1](_copies):.2f} models; by round "
            f"{', '.join(f'{ratio:.2f}' for ratio in ratios)}"
        )
        work = f"{targets} cold at once / one: {kind}"
        value, samples = statistics.median(ratios), {"ratios": ratios}
        if bar is None:
            rows.append(harness.shown(work, value, "x", detail, samples))
        else:
            rows.append(harness.at_most(work, value, "x", bar, detail, samples, digits=2))
    ratios = [
        all_.finish_s / bare.finish_s
        for all_, bare in zip(found["mx pull, all"], found["bare, all"], strict=True)
    ]
    detail = f"by round {', '.join(f'{ratio:.2f}' for ratio in ratios)}"
    value, samples = statistics.median(ratios), {"ratios": ratios}
    rows.append(
        harness.shown(f"{targets} cold at once: mx pull / bare", value, "x", detail, samples)
    )
    return rows


def _median(rounds: Sequence[Round], of: Callable[[Round], float]) -> float:
    return statistics.median(map(of, rounds))


def _finish_s(of: Round) -> float:
    return of.finish_s


def _cpu_s(of: Round) -> float:
    return of.cpu_s


def _copies(of: Round) -> float:
    return of.origin_copies


def main() -> None:
    """Print the rows."""
    parser = harness.parser(__doc__, rounds=5)
    parser.add_argument("--targets", type=int, default=8)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--mbit", type=float, default=250)
    parser.add_argument("--congestion", metavar="NAME", help="of TCP at all hosts, such as reno")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw a traced round")
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="keep its traces here")
    given = parser.parse_args()
    reason = unavailable()
    if reason is not None:
        sys.exit(reason)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for each in (mx, mx_transports):
        compileall.compile_dir(next(iter(each.__path__)), quiet=1)
    with tempfile.TemporaryDirectory() as temporary, Hosts() as hosts:
        folder = Path(temporary)
        rig = Rig(hosts, folder, given.targets, given.mib, given.mbit, given.congestion)
        with closing(rig):
            contestants: dict[str, Callable[[], Round]] = {
                "mx pull, one": lambda: rig.pull(1),
                "mx pull, all": lambda: rig.pull(given.targets),
                "bare, one": lambda: rig.relay(1),
                "bare, all": lambda: rig.relay(given.targets),
            }
            found: dict[str, list[Round]] = {name: [] for name in contestants}
            for number in range(given.rounds):
                # Memory that was freed just before is quicker: each comes after the other in turn.
                order = list(contestants) if number % 2 == 0 else list(contestants)[::-1]
                for name in order:
                    found[name].append(contestants[name]())
                    harness.say(f"{name}: {found[name][-1]}")
            if given.svg is not None:
                traces = given.traces or folder
                traced = rig.pull(given.targets, traces=traces)
                harness.say(f"traced: {traced}")
                given.svg.write_text(swarm_trace.picture(traces, rig.names, rig.origin, given.mbit))
    if given.rounds:
        harness.show(_rows(found, given.targets), as_json=given.json)


if __name__ == "__main__":
    main()
