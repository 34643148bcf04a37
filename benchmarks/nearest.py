"""Measures hosts that have a copy of their own: four pulls at once as a multiple of one alone, and
how much of the model comes over a host's link meanwhile.

Five hosts are network namespaces around a switch, at 100 Mbit/s each way. Each has a whole source
at its own address, limited to what four of them can serve on this machine, and pulls by tcp.

    python -m benchmarks.nearest [--rounds N]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from .checkpoints import llama_shapes, write_checkpoint
from .hosts import Hosts, unavailable
from .processes import Child, Cluster

MBIT_PER_S = 100
SOURCE_RATE = "80MB/s"
ORIGIN, TARGETS = "origin", ("t0", "t1", "t2", "t3")
#: Four at once take at most so many times as long as one alone,
BAR = 1.3
#: and a host gets less than this part of the model over its link.
MOST_OVER_LINK = 0.02
#: Pulls once for each line that it reads; the first pull loads the code.
TARGET = """
import json, sys
from mx import api, config
for line in sys.stdin:
    with api.pull(
        "m",
        transport="tcp",
        settings=config.load({"coordinator": sys.argv[1], "insecure": True, "listen": sys.argv[2]}),
    ) as pull:
        print(json.dumps(pull.wait(600).to_json()), flush=True)
"""


def together(targets: Sequence[Child]) -> float:
    """Have these processes pull at once; return the seconds until the last one is done."""
    began_s = time.monotonic()
    for target in targets:
        target.tell()
    for target in targets:
        json.loads(target.hear())
    return time.monotonic() - began_s


def measure(checkpoint: Path, rounds: int) -> bool:
    """Print each round and the result; return True if both bars are kept."""
    nbytes = checkpoint.stat().st_size
    alone: list[float] = []
    at_once: list[float] = []
    most_nbytes = 0
    with Hosts() as hosts:
        names = (ORIGIN, *TARGETS)
        links = hosts.star(names, up_mbit_per_s=MBIT_PER_S, down_mbit_per_s=MBIT_PER_S)
        at = {name: links[name].address(name) for name in names}
        with contextlib.closing(Cluster(at[ORIGIN], hosts.prefix(ORIGIN))) as cluster:
            cluster.serve(checkpoint, "m")
            limited = ("--max-bandwidth", SOURCE_RATE)
            targets = []
            for name in TARGETS:
                prefix, listen = hosts.prefix(name), f"{at[name]}:0"
                cluster.serve(checkpoint, "m", "--listen", listen, *limited, prefix=prefix)
                targets.append(
                    cluster.start("-c", TARGET, cluster.coordinator, listen, prefix=prefix)
                )
            together(targets)
            for number in range(rounds):
                alone.append(together(targets[number % len(targets) :][:1]))
                before = [hosts.sent_nbytes(links[name], links[name].b) for name in TARGETS]
                at_once.append(together(targets))
                after = [hosts.sent_nbytes(links[name], links[name].b) for name in TARGETS]
                most_nbytes = max(most_nbytes, *map(int.__sub__, after, before))
                print(f"alone {alone[-1]:.2f} s, four at once {at_once[-1]:.2f} s", flush=True)
    ratio = statistics.median(at_once) / statistics.median(alone)
    part = most_nbytes / nbytes
    print(f"four at once / one alone: {ratio:.2f} x (bar: <= {BAR:g} x)")
    print(f"most over a host's link: {part:.2%} of the model (bar: < {MOST_OVER_LINK:.0%})")
    return ratio <= BAR and part < MOST_OVER_LINK


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if reason := unavailable():
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "model.safetensors"
        write_checkpoint(checkpoint, llama_shapes(8, 1024, 2816, 16384))
        raise SystemExit(0 if measure(checkpoint, arguments.rounds) else 1)


if __name__ == "__main__":
    main()
