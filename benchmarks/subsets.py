"""Two tensor-parallel ranks on one host pull their slices, together and each for itself.

    python benchmarks/subsets.py [--gb 0.5] [--rate 125MB] [--rounds 3]

The source sends at most RATE. Each rank is a process; a round takes until the slower one is done.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from benchmarks.checkpoints import llama_shapes, write_checkpoint
from benchmarks.harness import interleave, machine, median
from benchmarks.processes import Cluster

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


def measured(checkpoint: Path, rate: str, rounds: int) -> dict[str, object]:
    """Return the seconds of both ways, and what was moved to the host."""
    with closing(Cluster()) as cluster:
        source = cluster.start(
            "-m", "mx", "serve", str(checkpoint), "--model", "m", "--max-bandwidth", rate,
            "--coordinator", cluster.coordinator,
        )  # fmt: skip
        cluster.wait_for("m", source)
        arguments = [str(RANKS), ",".join(ROWS), ",".join(COLUMNS)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, cluster.coordinator, str(rank), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        moved: dict[str, int] = {}

        def run(how: str) -> float:
            began_s = time.perf_counter()
            for process in processes:
                assert process.stdin is not None
                process.stdin.write(f"{how}\n")
                process.stdin.flush()
            moved[how] = 0
            for process in processes:
                assert process.stdout is not None
                moved[how] += int(process.stdout.readline())
            return time.perf_counter() - began_s

        try:
            ways = {how: lambda how=how: run(how) for how in ("together", "alone")}
            samples = interleave(ways, rounds)
        finally:
            for process in processes:
                process.communicate()
    return {
        "samples_s": samples,
        "moved_bytes": moved,
        "ratio": round(median(samples, "alone") / median(samples, "together"), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=0.5)
    parser.add_argument("--rate", default="125MB")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    layer_nbytes = 2 * (4 * WIDTH * WIDTH + 3 * WIDTH * 4 * WIDTH)
    layers = max(1, round(given.gb * 1e9 / layer_nbytes))
    with tempfile.TemporaryDirectory(prefix="mx-subsets-") as folder:
        path = Path(folder) / "model.safetensors"
        nbytes = write_checkpoint(path, llama_shapes(layers, WIDTH, 4 * WIDTH, 1024))
        found = measured(path, given.rate, given.rounds)
    print(machine())
    print(json.dumps({"model_bytes": nbytes, "rate": given.rate} | found, indent=1))


if __name__ == "__main__":
    main()
