"""Measures how a trainer's step reaches replicas: mx beside gather and gloo's broadcast, as rows.

    python -m benchmarks.trainer [--rounds N] [--mb 64 1000] [--replicas 1 4]
        [--links none]

Two processes hold the weights sharded by rows, as FSDP2 does. A step of mx is: withdraw the shards,
hash and list them, and pull them into the tensors of all replicas, verified. One of gloo is: gather
the shards on the first rank, and broadcast them into the replicas' tensors, unverified. The
optimizer's own time is left out. For transport alone gloo's tensors are there, and are hashed with
blake3 at both ends; mx's are withdrawn. Over links each replica has a host of its own, and all
links carry 1 Gbit/s.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from . import harness
from .hosts import Hosts, Link, unavailable
from .processes import LOOPBACK, Child, Cluster

TRANSPORT_BAR, STEP_BAR, LINKS_BAR = 1.2, 0.75, 0.5
MBIT_PER_S = 1000
RANKS = 2
TRAINER = "trainer"
PROGRAM = str(Path(__file__).parent / "references" / "follower.py")


class _Rig:
    """A trainer of two ranks, and replicas."""

    def __init__(
        self, cluster: Cluster, hosts: Hosts | None, links: dict[str, Link], mb: int, replicas: int
    ) -> None:
        names = [f"replica-{number}" for number in range(replicas)]
        address = links[TRAINER].address(TRAINER) if links else LOOPBACK
        self.name, self._version, self.nbytes = f"policy-{mb}-{replicas}", 0, 0

        def start(kind: str, rank: int, host: str) -> Child:
            about = {
                "kind": kind, "rank": rank, "replicas": replicas, "mb": mb, "name": self.name,
                "coordinator": cluster.coordinator, "address": address,
                "device": links[host].device(host) if links else "lo",
                "own": links[host].address(host) if links else LOOPBACK,
            }  # fmt: skip
            prefix = hosts.prefix(host) if hosts else ()
            return cluster.start(PROGRAM, json.dumps(about), prefix=prefix)

        self._ranks = [start("rank", rank, TRAINER) for rank in range(RANKS)]
        port = self._ranks[0].hear()
        self._ranks[1].tell(port)
        self._replicas = [start("replica", n, host) for n, host in enumerate(names)]
        group = self._ranks[0].hear()
        for each in self._replicas:
            each.tell(group)
        for each in self._all:
            self.nbytes = int(each.hear())

    @property
    def _all(self) -> list[Child]:
        return self._ranks + self._replicas

    def _do(self, what: str, children: Sequence[Child] | None = None) -> list[float]:
        """Have processes do something at the same time. Returns the seconds of each."""
        children = self._all if children is None else children
        for each in children:
            each.tell(what)
        return [float(each.hear()) for each in children]

    def _filled(self) -> None:
        self._version += 1
        self._do(f"fill {self._version}", self._ranks)

    def mx(self) -> tuple[float, float]:
        """Make a step by mx. Returns the seconds of all of it, and of the transport."""
        self._do(f"expect {self._version + 1}", self._replicas)
        began_s = time.perf_counter()
        self._do("enter", self._ranks)
        entered_s = time.perf_counter() - began_s
        self._filled()
        began_s = time.perf_counter()
        self.listed_s = self._do(f"move {self._version}")[0]
        moved_s = time.perf_counter() - began_s
        self._do(f"check {self._version}", self._replicas)
        return entered_s + moved_s, moved_s

    def gloo(self) -> float:
        """Make a step by gathering and broadcasting. Returns its seconds."""
        self._do("enter", self._ranks)
        self._filled()
        began_s = time.perf_counter()
        self._do("gather", self._ranks)
        self._do("broadcast")
        took_s = time.perf_counter() - began_s
        self._do(f"check {self._version}", self._replicas)
        self._do("leave", self._ranks)
        return took_s

    def hashed(self) -> float:
        """Broadcast what was gathered before, hashed at both ends. Returns the seconds."""
        began_s = time.perf_counter()
        self._do("hashed")
        return time.perf_counter() - began_s


@contextlib.contextmanager
def _rig(mb: int, replicas: int, *, links: bool) -> Iterator[_Rig]:
    if not links:
        with contextlib.closing(Cluster()) as cluster:
            yield _Rig(cluster, None, {}, mb, replicas)
        return
    names = [TRAINER, *(f"replica-{number}" for number in range(replicas))]
    with Hosts() as hosts:
        star = hosts.star(names, up_mbit_per_s=MBIT_PER_S, down_mbit_per_s=MBIT_PER_S)
        at = star[TRAINER].address(TRAINER)
        with contextlib.closing(Cluster(at, hosts.prefix(TRAINER))) as cluster:
            yield _Rig(cluster, hosts, star, mb, replicas)


def rows(
    sizes_mb: Sequence[int], counts: Sequence[int], rounds: int, *, links: bool
) -> Iterator[harness.Row]:
    """Yield the rows of each size and number of replicas."""
    for mb in sizes_mb:
        for count in counts:
            with _rig(mb, count, links=links) as rig:
                yield from _measured(rig, mb, count, rounds, links=links)


def _measured(rig: _Rig, mb: int, count: int, rounds: int, *, links: bool) -> Iterator[harness.Row]:
    moved: list[float] = []

    def mx() -> float:
        took_s, moved_s = rig.mx()
        moved.append(moved_s)
        return took_s

    ways: dict[str, Callable[[], float]] = {"gloo": rig.gloo, "hashed": rig.hashed, "mx": mx}
    samples = harness.interleave(ways, rounds)
    samples["moved"] = moved[1:]
    what = f"{mb} MB to {count} replica{'s' * (count > 1)}{' over links' * links}"
    mx_s, moved_s, gloo_s, hashed_s = (
        harness.median(samples, name) for name in ("mx", "moved", "gloo", "hashed")
    )
    yield harness.at_most(
        f"transport of {what} / gloo's with blake3", moved_s / hashed_s, "x", TRANSPORT_BAR,
        f"{moved_s:.3f} s, listed after {rig.listed_s:.3f}, against {hashed_s:.3f}", samples,
        digits=2,
    )  # fmt: skip
    bar = LINKS_BAR if links and count > 1 else STEP_BAR
    row = (f"step of {what} / gather and gloo's broadcast", mx_s / gloo_s, "x")
    detail = f"{mx_s:.3f} s against {gloo_s:.3f}"
    # One replica at the end of a link gets each byte once, whichever way.
    if mb >= 1000 and (count > 1 or not links):
        yield harness.at_most(*row, bar, detail, samples, digits=2)
    else:
        yield harness.shown(*row, detail, samples)


def main() -> None:
    """Print the rows."""
    parser = harness.parser(__doc__, rounds=3)
    parser.add_argument("--mb", type=int, nargs="+", default=[64, 1000])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--links", choices=["none", "also", "only"], default="also")
    given = parser.parse_args()
    found: list[harness.Row] = []
    if given.links != "only":
        found += rows(given.mb, given.replicas, given.rounds, links=False)
    if given.links != "none":
        if reason := unavailable():
            harness.say(f"links: skipped, {reason}")
        else:
            found += rows(given.mb, given.replicas, given.rounds, links=True)
    harness.show(found, as_json=given.json)
    sys.exit(any(not row.ok for row in found))


if __name__ == "__main__":
    main()
