"""Measures how much more k links carry than one, and what a link costs in CPU time, as rows of the
table.

The links join network namespaces and are limited to 1 Gbit/s, so that the machine's own speed does
not count.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from . import harness
from .checkpoints import llama_shapes, write_checkpoint
from .hosts import Hosts, unavailable
from .processes import Child, Cluster, cpu_s

MBIT_PER_S = 1000
BAR = 0.95
COUNTS = (1, 2, 4)
NEAR, FAR = "near", "far"
#: The most that a pull over one link may cost, in CPU times of a bare socket that hashes.
CPU_BAR = 2.0
REFERENCE = Path(__file__).parent / "references" / "linked.py"
REFERENCE_PORT = 7700
#: Pulls once for each line of interfaces that it reads; the first pull loads the code.
TARGET = f"""
import json, sys
from {__package__}.references.linked import cpu_seconds
from mx import api, config
for line in sys.stdin:
    flags = {{"coordinator": sys.argv[1], "insecure": True, "nics": line.strip()}}
    before_s = cpu_seconds()
    with api.pull("m", transport="tcp", settings=config.load(flags)) as pull:
        report = pull.wait(120).to_json()
    print(json.dumps(report | {{"cpu_s": cpu_seconds() - before_s}}), flush=True)
"""


class _Rig:
    """A source on one host, links to another host, and a process that pulls there."""

    def __init__(self, hosts: Hosts, cluster: Cluster, checkpoint: Path) -> None:
        self._hosts, self._cluster = hosts, cluster
        self._links = [hosts.link(NEAR, FAR, mbit_per_s=MBIT_PER_S) for _ in range(max(COUNTS))]
        nics = ",".join(link.device(NEAR) for link in self._links)
        self._source, _ = self._cluster.serve(checkpoint, "m", "--nics", nics)
        self._target = self._start(FAR, "-c", TARGET, self._cluster.coordinator)

    def _start(self, host: str, *arguments: str) -> Child:
        return self._cluster.start(*arguments, prefix=self._hosts.prefix(host))

    def pull(self, count: int) -> dict[str, Any]:
        """Pull over so many links in a running process. Returns the report, with the CPU seconds of
        the target (`cpu_s`) and of the source (`source_cpu_s`)."""
        before_s = cpu_s(self._source.pid)
        nics = ",".join(link.device(FAR) for link in self._links[:count])
        report: dict[str, Any] = json.loads(self._target.ask(nics))
        if len(report["paths"]) != count:
            raise RuntimeError(f"{len(report['paths'])} of {count} links were used")
        return report | {"source_cpu_s": cpu_s(self._source.pid) - before_s}

    def seconds(self, count: int) -> float:
        """Return how long such a pull takes."""
        return float(self.pull(count)["seconds"])

    def bare(self, nbytes: int) -> Callable[[], dict[str, float]]:
        """Return a function that moves as many bytes through a socket over one link, and returns
        the CPU seconds of both ends, named as by `pull`."""
        where = (self._links[0].address(NEAR), str(REFERENCE_PORT), str(nbytes))
        sender = self._start(NEAR, str(REFERENCE), "send", *where)
        receiver = self._start(FAR, str(REFERENCE), "receive", *where)
        sender.hear()  # it listens

        def move() -> dict[str, float]:
            return {"cpu_s": float(receiver.ask()), "source_cpu_s": float(sender.hear())}

        return move


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
    with Hosts() as hosts:
        at = hosts.link(NEAR, FAR).address(NEAR)
        with contextlib.closing(Cluster(at, hosts.prefix(NEAR))) as cluster:
            yield _Rig(hosts, cluster, checkpoint), checkpoint.stat().st_size


def rows(folder: Path, rounds: int, say: Callable[[str], None]) -> list[harness.Row]:
    """Return a row for each k but 1; none if hosts can't be made."""
    with _rig(folder, say) as found:
        if found is None:
            return []
        rig, nbytes = found
        contestants: dict[str, Callable[[], float]] = {
            _name(count): partial(rig.seconds, count) for count in COUNTS
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
        work = f"CPU of a {end} at 1 Gbit/s / a raw socket's that hashes"
        detail = f"{own_s:.2f} s against {bare_s:.2f} for {nbytes / 1e9:.2f} GB"
        made.append(harness.at_most(work, own_s / bare_s, "x", CPU_BAR, detail, samples, digits=2))
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
