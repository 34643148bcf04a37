"""Measures how much more k links carry than one, and what a link costs in CPU time, as rows of the
table.

The links join network namespaces and are limited to 1 Gbit/s, so that the machine's own speed does
not count.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from . import harness
from .checkpoints import llama_shapes, write_checkpoint
from .hosts import Hosts, Link, unavailable

MBIT_PER_S = 1000
BAR = 0.95
COUNTS = (1, 2, 4)
START_TIMEOUT_S = 60.0
NEAR, FAR = "near", "far"
MX = (sys.executable, "-m", "mx")
#: The most that a pull over one link may cost, in CPU times of a bare socket that hashes.
CPU_BAR = 2.0
REFERENCE = Path(__file__).parent / "references" / "linked.py"
REFERENCE_PORT = 7700
#: Pulls once for each line of interfaces that it reads; the first pull loads the code.
TARGET = """
import json, sys
from benchmarks.references.linked import cpu_seconds
from mx import api, config
for line in sys.stdin:
    flags = {"coordinator": sys.argv[1], "insecure": True, "nics": line.strip()}
    before_s = cpu_seconds()
    with api.pull("m", transport="tcp", settings=config.load(flags)) as pull:
        report = pull.wait(120).to_json()
    print(json.dumps(report | {"cpu_s": cpu_seconds() - before_s}), flush=True)
"""
COORDINATOR = (sys.executable, "-c", "from mx.cli import coordinator_main; coordinator_main()")


class _Rig:
    """A source on one host, links to another host, and a process that pulls there."""

    def __init__(self, hosts: Hosts, checkpoint: Path) -> None:
        self._hosts = hosts
        control = hosts.link(NEAR, FAR)
        self._links = [hosts.link(NEAR, FAR, mbit_per_s=MBIT_PER_S) for _ in range(max(COUNTS))]
        at = control.address(NEAR)
        self._options = ("--coordinator", f"{at}:7600", "--insecure", "--json")
        self._start(NEAR, [*COORDINATOR, "--listen", f"{at}:7600", "--insecure"])
        self._answer(NEAR, [*MX, "models", *self._options], START_TIMEOUT_S, retry=True)
        nics = self._nics(NEAR, self._links)
        serving = [*MX, "serve", str(checkpoint), "--model", "m", "--listen", f"{at}:0", *nics]
        self._source = self._start(NEAR, [*serving, *self._options])
        sources = [*MX, "sources", "m", *self._options]
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._answer(NEAR, sources, START_TIMEOUT_S, retry=True).get("sources"):
            if time.monotonic() > deadline_s:
                raise RuntimeError("the source did not register")

        command = [*hosts.prefix(FAR), sys.executable, "-c", TARGET, f"{at}:7600"]
        self._asked = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)]

    def pull(self, count: int) -> dict[str, Any]:
        """Pull over so many links in a running process. Returns the report, with the CPU seconds of
        the target (`cpu_s`) and of the source (`source_cpu_s`)."""
        before_s = _cpu_seconds_of(self._source.pid)
        nics = ",".join(link.device(FAR) for link in self._links[:count])
        report: dict[str, Any] = json.loads(_ask(self._asked[0], nics))
        if len(report["paths"]) != count:
            raise RuntimeError(f"{len(report['paths'])} of {count} links were used")
        return report | {"source_cpu_s": _cpu_seconds_of(self._source.pid) - before_s}

    def bare(self, nbytes: int) -> Callable[[], dict[str, float]]:
        """Return a function that moves as many bytes through a socket over one link, and returns
        the CPU seconds of both ends, named as by `pull`."""
        where = (self._links[0].address(NEAR), str(REFERENCE_PORT), str(nbytes))
        ends = [
            subprocess.Popen(
                [*self._hosts.prefix(host), sys.executable, str(REFERENCE), what, *where],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for host, what in ((NEAR, "send"), (FAR, "receive"))
        ]
        self._asked += ends
        sender, receiver = ends
        assert sender.stdout is not None
        sender.stdout.readline()  # it listens

        def move() -> dict[str, float]:
            cpu_s = float(_ask(receiver, ""))
            assert sender.stdout is not None
            return {"cpu_s": cpu_s, "source_cpu_s": float(sender.stdout.readline())}

        return move

    def close(self) -> None:
        """End the processes that are asked; the hosts end all others."""
        for process in self._asked:
            process.kill()
            process.communicate()

    def _nics(self, host: str, connector: Sequence[Link]) -> tuple[str, str]:
        return ("--nics", ",".join(link.device(host) for link in connector))

    def _start(self, host: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        return self._hosts.start(
            host, command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def _answer(
        self, host: str, command: Sequence[str], timeout_s: float, *, retry: bool = False
    ) -> dict[str, Any]:
        """Return the JSON that a command prints; `retry` repeats it until `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            done = subprocess.run(
                [*self._hosts.prefix(host), *command],
                check=False,
                capture_output=True,
                timeout=timeout_s,
            )
            if not done.returncode:
                found: dict[str, Any] = json.loads(done.stdout)
                return found
            if not retry or time.monotonic() > deadline_s:
                text = (done.stdout + done.stderr).decode(errors="replace")
                raise RuntimeError(f"{' '.join(command)}: {text.strip()}")
            time.sleep(0.2)


def _ask(process: subprocess.Popen[bytes], line: str) -> bytes:
    """Write a line to a process, and return the line that it answers."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{line}\n".encode())
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise RuntimeError("a process of the benchmark has failed: see above")
    return answer


def _cpu_seconds_of(pid: int) -> float:
    """Return the user and system seconds of another process, from /proc/PID/stat."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _rig(folder: Path, say: Callable[[str], None]) -> Iterator[tuple[_Rig, int] | None]:
    """Give a rig, and the size of its model; None, with the reason to `say`, if hosts can't be
    made."""
    reason = unavailable()
    if reason is not None:
        say(f"links: skipped, {reason}")
        yield None
        return
    checkpoint = folder / "links-1gb.safetensors"
    if not checkpoint.exists():
        unfinished = checkpoint.with_suffix(".part")
        write_checkpoint(unfinished, llama_shapes(14, 1536, 4096, 32000))
        unfinished.rename(checkpoint)
    with contextlib.ExitStack() as stack:
        rig = _Rig(stack.enter_context(Hosts()), checkpoint)
        stack.callback(rig.close)
        yield rig, checkpoint.stat().st_size


def rows(folder: Path, rounds: int, say: Callable[[str], None]) -> list[harness.Row]:
    """Return a row for each k but 1; none if hosts can't be made."""
    with _rig(folder, say) as found:
        if found is None:
            return []
        rig, nbytes = found
        contestants: dict[str, Callable[[], float]] = {
            _name(count): lambda count=count: rig.pull(count)["seconds"]  # type: ignore[misc]
            for count in COUNTS
        }
        samples = harness.interleave(contestants, rounds)
    return [_row(count, samples, nbytes) for count in COUNTS if count > 1]


def cpu_rows(folder: Path, rounds: int, say: Callable[[str], None]) -> list[harness.Row]:
    """Return what a pull over one link costs target and source, next to a bare socket that hashes;
    none if hosts can't be made. The pulling process has pulled before."""
    with _rig(folder, say) as found:
        if found is None:
            return []
        rig, nbytes = found
        bare = rig.bare(nbytes)
        rig.pull(1)
        bare()
        pairs = [(rig.pull(1), bare()) for _ in range(rounds)]
    made = []
    for end, key in (("target", "cpu_s"), ("source", "source_cpu_s")):
        samples = {"mx": [p[key] for p, _ in pairs], "socket": [b[key] for _, b in pairs]}
        own_s, bare_s = (harness.median(samples, name) for name in ("mx", "socket"))
        made.append(
            harness.Row(
                f"CPU of a {end} at 1 Gbit/s / a raw socket's that hashes",
                round(own_s / bare_s, 2),
                "x",
                f"<= {CPU_BAR:g} x",
                own_s <= CPU_BAR * bare_s,
                f"{own_s:.2f} s against {bare_s:.2f} for {nbytes / 1e9:.2f} GB",
                samples,
            )
        )
    return made


def _name(count: int) -> str:
    return "1 link" if count == 1 else f"{count} links"


def _row(count: int, samples: dict[str, list[float]], nbytes: int) -> harness.Row:
    one_s, all_s = (harness.median(samples, _name(n)) for n in (1, count))
    value = one_s / all_s / count
    wire = MBIT_PER_S / 8000
    detail = (
        f"{nbytes / all_s / 1e9:.3f} GB/s against {nbytes / one_s / 1e9:.3f} over one, "
        f"links of {wire:g} GB/s with headers"
    )
    return harness.Row(
        f"{count} links of 1 Gbit/s, tcp / {count} x one",
        round(value, 3),
        "x",
        f">= {BAR:g} x",
        value >= BAR,
        detail,
        {name: samples[name] for name in (_name(1), _name(count))},
    )
