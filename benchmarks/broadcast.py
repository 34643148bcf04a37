"""Measures `mx.broadcast` against bare broadcasts of the same tensors, over gloo on loopback.

    PYTHONPATH=.:transports python -m benchmarks.broadcast [--ranks 2] [--mib 512] [--rounds 3]

Every rank is a process of its own. *bare* calls torch.distributed.broadcast once for each tensor;
*hashed* does the same, and hashes what mx hashes with the same digest and as many threads: all of
it at the source first, and at the receivers each tensor after it has landed. Rounds interleave the
three; a ratio is one of medians, between barriers, at the source.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mx.units import MIB

from . import harness

if TYPE_CHECKING:
    import torch

NORM_BYTES = 8192


def weights(nbytes: int, value: int) -> dict[str, torch.Tensor]:
    """Layers as a small Llama has them: seven matrices, and two norms of some KiB."""
    import torch

    layers = max(1, nbytes // (32 * MIB))
    sizes = [MIB, MIB, 4 * MIB, 4 * MIB, 7 * MIB, 7 * MIB, 8 * MIB, NORM_BYTES, NORM_BYTES]
    return {
        f"model.layers.{layer}.w{i}": torch.full((size,), value, dtype=torch.uint8)
        for layer in range(layers)
        for i, size in enumerate(sizes)
    }


def run_rank(rank: int, ranks: int, store: str, nbytes: int, rounds: int) -> None:
    """Run one rank; the first one prints the seconds of each contestant, round by round."""
    import torch.distributed as dist

    from mx.core.digest import block_digest
    from mx.core.grid import BLOCK_BYTES
    from mx.fleet.broadcasting import broadcast
    from mx.threads import Threads

    at, limit = f"file://{store}", timedelta(minutes=5)
    dist.init_process_group("gloo", at, rank=rank, world_size=ranks, timeout=limit)
    tensors = weights(nbytes, rank)

    def digests(tensor: torch.Tensor, threads: Threads) -> None:
        view = tensor.numpy().data
        for _ in threads.map(
            block_digest, [view[at : at + BLOCK_BYTES] for at in range(0, len(view), BLOCK_BYTES)]
        ):
            pass

    def bare(*, hashed: bool) -> None:
        with Threads(2, "hash") as threads:
            if hashed and rank == 0:
                for tensor in tensors.values():
                    digests(tensor, threads)
            for tensor in tensors.values():
                dist.broadcast(tensor, src=0)
                if hashed and rank:
                    digests(tensor, threads)

    def timed(work: Callable[[], object]) -> float:
        if rank:
            for tensor in tensors.values():
                tensor.fill_(rank)
        dist.barrier()
        began_s = time.perf_counter()
        work()
        dist.barrier()
        took_s = time.perf_counter() - began_s
        if any(int(tensor[-1]) for tensor in tensors.values()):
            raise SystemExit(f"rank {rank} did not get the weights")
        return took_s

    contestants: dict[str, Callable[[], object]] = {
        "mx": partial(broadcast, tensors),
        "hashed": partial(bare, hashed=True),
        "bare": partial(bare, hashed=False),
    }
    samples = harness.interleave(
        {name: partial(timed, work) for name, work in contestants.items()}, rounds
    )
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(samples))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        common = (options.ranks, str(Path(folder, "store")), options.mib * MIB, options.rounds)
        code = (
            f"import sys, json; from {__package__}.broadcast import run_rank; "
            "run_rank(*json.loads(sys.argv[1]))"
        )
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", code, json.dumps((rank, *common))],
                stdout=subprocess.PIPE,
                env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in range(options.ranks)
        ]
        said = [process.communicate()[0] for process in processes]
        if any(process.returncode for process in processes):
            sys.exit("a rank failed")
    samples = json.loads(said[0])
    median = {name: statistics.median(times) for name, times in samples.items()}
    print(harness.machine())
    for name, took_s in median.items():
        spread = ", ".join(f"{each:.2f}" for each in samples[name])
        print(
            f"{name:7} {took_s:6.2f} s  {options.mib * MIB / took_s / 1e9:5.2f} GB/s  ({spread})  "
            f"mx at {took_s / median['mx']:.2f} x its speed"
        )


if __name__ == "__main__":
    main()
