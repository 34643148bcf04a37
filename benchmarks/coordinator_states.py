"""What mTLS, and a state that survives, cost a coordinator under a thousand sources.

Each round loads a coordinator that keeps its state in memory, and then one of each other way.

Run: `python -m benchmarks.coordinator_states [--rounds N] [--sources N] [--seconds S]`
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from mx.testing.certificates import certificates
from tests.support.redis_server import redis_server

from .coordinator import measure
from .processes import Cluster

#: Each way to run a coordinator; of Redis, what its append-only file has when it answers.
WAYS = ("memory", "mTLS", "sqlite", "redis everysec", "redis always")


@contextmanager
def _options(way: str, folder: Path) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Yield a coordinator's options, and the files of its clients' certificate."""
    if way == "mTLS":
        files, _ = certificates(folder)
        paths = files.certificate, files.key, files.authority
        named = zip(("--tls-cert", "--tls-key", "--tls-ca"), paths, strict=True)
        yield tuple(word for option in named for word in option), paths
    elif way == "sqlite":
        yield ("--state", f"sqlite:{folder / 'state'}"), ()
    elif way.startswith("redis"):
        with redis_server("--appendonly", "yes", "--appendfsync", way.split()[1]) as redis:
            yield ("--state", redis.url), ()
    else:
        yield (), ()


def _loaded(way: str, seconds: float, sources: int) -> Mapping[str, Any]:
    """Load one coordinator."""
    with (
        tempfile.TemporaryDirectory() as folder,
        _options(way, Path(folder)) as (options, tls),
        closing(Cluster(options=options, stderr=subprocess.DEVNULL)) as cluster,
    ):
        server = cluster.coordinator, cluster.coordinator_pid
        return measure(*server, seconds=seconds, tls=tls, sources=sources)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sources", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each way to send heartbeats")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    given = parser.parse_args()
    ways = [
        way for way in given.ways if shutil.which("redis-server") or not way.startswith("redis")
    ]
    runs: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for _ in range(given.rounds):
        for way in ways:
            runs[way].append(_loaded(way, given.seconds, given.sources))
    print("| way | p99 spread | p99 at once | CPU spread | CPU at once | storm | lost |")
    print("|---|---|---|---|---|---|---|")
    for way in ways:

        def median(*names: str, of: str = way) -> float:
            found = []
            for run in runs[of]:
                value: Any = run
                for name in names:
                    value = value[name]
                found.append(float(value))
            return statistics.median(found)

        p99s = [f"{median(how, 'p99_ms'):.1f} ms" for how in ("spread", "once")]
        cores = [f"{median(f'core_{how}'):.0%} of a core" for how in ("spread", "once")]
        lost = sum(sum(run["lost"].values()) for run in runs[way])
        print(f"| {way} | {' | '.join([*p99s, *cores])} | {median('storm_s'):.1f} s | {lost} |")


if __name__ == "__main__":
    main()
