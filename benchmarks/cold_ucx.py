"""Measures how soon ucx starts: over several links from a cold command, and in a process that has
used it.

- 192 MB over four links of 500 Mbit/s and over one, each by a new `mx pull`, in turn; for ucx and,
  to compare, for tcp. Time runs from the call of `mx.pull`, as its report says. The source has
  given by both transports before, unless `--cold-source` is given: then it is a new process, too.
- A model of one layer of 1 MiB over loopback, by ucx and by tcp, pulled again and again by one
  process: from the call to the layer.

    python -m benchmarks.cold_ucx [--rounds 3] [--cold-source] [--json]
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import mx
from mx import config

from . import harness
from .checkpoints import write_checkpoint
from .cold import compiled
from .hosts import Hosts, Link, unavailable
from .links import FAR, NEAR
from .processes import LOOPBACK, Cluster

MBIT_PER_S = 500
COUNTS = (1, 4)
TRANSPORTS = ("ucx", "tcp")
LINKS_BAR, FIRST_BAR = 3.4, 3.0
#: 12 layers of 16 MB.
LAYERS, SHAPE = 12, (2000, 4000)
_MX = "from mx.cli import main; main()"


class _Rig:
    """A host with a source, joined by four links to another."""

    def __init__(self, hosts: Hosts, cluster: Cluster, checkpoint: Path, *, cold: bool) -> None:
        self._hosts, self._cluster, self._checkpoint, self._cold = hosts, cluster, checkpoint, cold
        self._links: list[Link] = [
            hosts.link(NEAR, FAR, mbit_per_s=MBIT_PER_S) for _ in range(max(COUNTS))
        ]
        self._served = 0
        self._environment = compiled(checkpoint.parent)
        self._model = self._serve()

    def _serve(self) -> str:
        self._served += 1
        model = f"m{self._served}"
        nics = ",".join(link.device(NEAR) for link in self._links)
        self._cluster.serve(self._checkpoint, model, "--nics", nics, "--trusted-fabric")
        return model

    def seconds(self, transport: str, count: int) -> float:
        """Return how long a cold command pulls over so many links."""
        if self._cold:
            self._model = self._serve()
        report = self._pull(
            *("--transport", transport, "--trusted-fabric", "--no-attach", "--nics"),
            ",".join(link.device(FAR) for link in self._links[:count]),
        )
        if len(report["paths"]) != count:
            raise RuntimeError(f"{len(report['paths'])} of {count} links were used")
        return float(report["seconds"])

    def _pull(self, *options: str) -> dict[str, Any]:
        command = ["pull", self._model, "--coordinator", self._cluster.coordinator, "--insecure"]
        done = subprocess.run(
            [*self._hosts.prefix(FAR), sys.executable, "-c", _MX, *command, *options, "--json"],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
            timeout=120,
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found


@contextlib.contextmanager
def _rig(folder: Path, *, cold: bool) -> Iterator[_Rig]:
    checkpoint = folder / "links.safetensors"
    write_checkpoint(checkpoint, {f"model.layers.{n}.weight": SHAPE for n in range(LAYERS)})
    with Hosts() as hosts:
        at = hosts.link(NEAR, FAR).address(NEAR)
        with closing(Cluster(at, hosts.prefix(NEAR))) as cluster:
            yield _Rig(hosts, cluster, checkpoint, cold=cold)


def links_rows(folder: Path, rounds: int, *, cold: bool) -> list[harness.Row]:
    """Return a row for each transport.

    Args:
        folder: For the checkpoint.
        rounds: Interleaved rounds.
        cold: Whether each pull has a source of its own, which nothing has read from.
    """
    with _rig(folder, cold=cold) as rig:
        contestants: dict[str, Callable[[], float]] = {
            f"{transport}, {count}": partial(rig.seconds, transport, count)
            for transport in TRANSPORTS
            for count in COUNTS
        }
        samples = harness.interleave(contestants, rounds)
    return [_links_row(transport, samples) for transport in TRANSPORTS]


def _links_row(transport: str, samples: dict[str, list[float]]) -> harness.Row:
    few, many = (f"{transport}, {count}" for count in COUNTS)
    ratios = [one / all_ for one, all_ in zip(samples[few], samples[many], strict=True)]
    one_s, all_s = harness.median(samples, few), harness.median(samples, many)
    value = one_s / all_s
    detail = f"{all_s:.2f} s against {one_s:.2f}; by round {_listed(ratios)}"
    return harness.Row(
        f"{max(COUNTS)} links of {MBIT_PER_S} Mbit/s, cold, {transport} / one",
        round(value, 2),
        "x",
        f">= {LINKS_BAR:g} x",
        value >= LINKS_BAR,
        detail,
        {name: samples[name] for name in (few, many)},
    )


def first_row(folder: Path, rounds: int) -> harness.Row:
    """Return the row of the first layer in a process that has used ucx.

    Args:
        folder: For the checkpoint.
        rounds: Interleaved rounds.
    """
    checkpoint = folder / "first.safetensors"
    write_checkpoint(checkpoint, {"model.layers.0.weight": (1 << 10, 1 << 9)})
    with closing(Cluster(LOOPBACK)) as cluster:
        cluster.serve(checkpoint, "first")
        settings = config.load({"coordinator": cluster.coordinator})

        def seconds(transport: str) -> float:
            with mx.pull("first", transport=transport, attach=False, settings=settings) as pull:
                return pull.wait(60).first_layer_s

        contestants = {transport: partial(seconds, transport) for transport in TRANSPORTS}
        samples = harness.interleave(contestants, rounds)
    own_s, reference_s = (harness.median(samples, transport) for transport in TRANSPORTS)
    ratios = [own / other for own, other in zip(*samples.values(), strict=True)]
    detail = f"{own_s * 1e3:.1f} ms against {reference_s * 1e3:.1f}; by round {_listed(ratios)}"
    work = "first layer, a process that has used ucx / tcp"
    return harness.at_most(work, own_s / reference_s, "x", FIRST_BAR, detail, samples, digits=2)


def _listed(ratios: Sequence[float]) -> str:
    return ", ".join(f"{ratio:.2f}" for ratio in ratios)


def rows(
    rounds: int, say: Callable[[str], None], *, cold_source: bool = False
) -> list[harness.Row]:
    """Return all rows; without those of links, with the reason to `say`, if hosts can't be made.

    Args:
        rounds: Interleaved rounds.
        say: Reports what is left out.
        cold_source: Whether each pull has a source of its own, which nothing has read from.
    """
    reason = unavailable()
    with tempfile.TemporaryDirectory() as folder:
        found = [first_row(Path(folder), max(5, rounds))]
        if reason is None:
            found += links_rows(Path(folder), rounds, cold=cold_source)
        else:
            say(f"links: skipped, {reason}")
    return found


def main() -> None:
    """Print the rows."""
    parser = harness.parser(__doc__, rounds=3)
    parser.add_argument("--cold-source", action="store_true", help="a new source for each pull")
    options = parser.parse_args()
    found = rows(options.rounds, harness.say, cold_source=options.cold_source)
    harness.show(found, as_json=options.json)


if __name__ == "__main__":
    main()
