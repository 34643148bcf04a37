"""Two tensor-parallel ranks on one host pull their slices, together and each for itself.

    python -m benchmarks.subsets [--gb 0.5] [--rate 125MB] [--rounds 3]

The source sends at most RATE. Each rank is a process; a round takes until the slower one is done.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import closing
from functools import partial
from pathlib import Path

from . import harness
from .checkpoints import llama_shapes, write_checkpoint
from .processes import Cluster

RANKS = 2
WIDTH = 2048
ROWS = ("q", "k", "v", "gate", "up")
COLUMNS = ("o", "down")

#: What each rank runs: for each line "together" or "alone" it pulls, and prints what it moved.
RANK = """
import sys, mx
coordinator, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
slices = {f"*.{n}_proj.weight": mx.Shard(0, rank, ranks) for n in sys.argv[4].split(",")}
slices |= {f"*.{n}_proj.weight": mx.Shard(1, rank, ranks) for n in sys.argv[5].split(",")}
for line in sys.stdin:
    here = mx.LocalRanks(rank, ranks, wait_s=60) if line == "together\\n" else None
    with mx.pull("m", coordinator=coordinator, transport="tcp", slices=slices,
                 local_ranks=here) as pull:
        print(pull.wait().moved_bytes, flush=True)
"""


def rows(checkpoint: Path, nbytes: int, rate: str, rounds: int) -> list[harness.Row]:
    """Return the row of both ways; what was moved to the host is its detail.

    Args:
        checkpoint: The model.
        nbytes: Its size.
        rate: What the source sends at most, in a second.
        rounds: How many.
    """
    with closing(Cluster()) as cluster:
        cluster.serve(checkpoint, "m", "--max-bandwidth", rate)
        arguments = (str(RANKS), ",".join(ROWS), ",".join(COLUMNS))
        ranks = [
            cluster.start("-c", RANK, cluster.coordinator, str(rank), *arguments)
            for rank in range(RANKS)
        ]
        moved: dict[str, int] = {}

        def run(how: str) -> float:
            began_s = time.perf_counter()
            for rank in ranks:
                rank.tell(how)
            moved[how] = sum(int(rank.hear()) for rank in ranks)
            return time.perf_counter() - began_s

        samples = harness.interleave(
            {how: partial(run, how) for how in ("together", "alone")}, rounds
        )
    value = harness.median(samples, "alone") / harness.median(samples, "together")
    detail = ", ".join(
        f"{how} {harness.median(samples, how):.2f} s, {moved[how] / 1e6:.0f} MB" for how in samples
    )
    work = f"two ranks' pulls of {nbytes / 1e6:.0f} MB at {rate}, each for itself / together"
    return [harness.shown(work, value, "x", detail, samples)]


def main() -> None:
    parser = harness.parser(__doc__, rounds=3)
    parser.add_argument("--gb", type=float, default=0.5)
    parser.add_argument("--rate", default="125MB")
    given = parser.parse_args()
    layer_nbytes = 2 * (4 * WIDTH * WIDTH + 3 * WIDTH * 4 * WIDTH)
    layers = max(1, round(given.gb * 1e9 / layer_nbytes))
    with tempfile.TemporaryDirectory(prefix="mx-subsets-") as folder:
        path = Path(folder) / "model.safetensors"
        nbytes = write_checkpoint(path, llama_shapes(layers, WIDTH, 4 * WIDTH, 1024))
        found = rows(path, nbytes, given.rate, given.rounds)
    harness.show(found, as_json=given.json)


if __name__ == "__main__":
    main()
