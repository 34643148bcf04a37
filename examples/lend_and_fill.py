"""A module lends its weights where they are, and another process fills its own module in place.

    python examples/lend_and_fill.py [--gb 0.25]

Nothing is copied on either side: the lender's tensors are read where they lie, by TCP and then by
the kernel (process_vm_readv), and arrive in the tensors of the other module.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from multiprocessing.connection import Connection

import children
import torch

import mx

WIDTH = 2048


def make_model(gb: float, *, seed: int) -> torch.nn.Module:
    """Return a stack of layers with about so many gigabytes of weights, and a tied head."""
    torch.manual_seed(seed)
    layers = max(2, round(gb * 1e9 / (4 * WIDTH * WIDTH)))
    model = torch.nn.Sequential(
        *(torch.nn.Linear(WIDTH, WIDTH, device="meta") for _ in range(layers))
    ).to_empty(device="cpu")
    with torch.no_grad():
        for weight in model.parameters():
            weight.uniform_(-0.03, 0.03)
    model.append(torch.nn.Linear(WIDTH, WIDTH, bias=False))
    model[-1].weight = model[0].weight  # tied, as heads often are
    return model


def checksum(model: torch.nn.Module) -> int:
    """Return a sum over the bits of all weights."""
    return sum(int(weight.view(torch.int32).sum()) for weight in model.parameters())


def resident_mb() -> float:
    """Return this process's proportional share of memory, in MB."""
    with open("/proc/self/smaps_rollup", encoding="utf-8") as file:
        kb = next(line.split()[1] for line in file if line.startswith("Pss:"))
    return int(kb) * 1024 / 1e6


def fill(gb: float, name: str, coordinator: str, conn: Connection) -> None:
    """Fill a module in place, by each transport, and say what came of it."""
    children.end_with()
    model = make_model(gb, seed=2)
    for transport in ("tcp", "shm"):
        places = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
        before_mb = resident_mb()
        with mx.pull(name, into=model, transport=transport, coordinator=coordinator) as pull:
            report = pull.wait()
            grown_mb = resident_mb() - before_mb
        unmoved = places == {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
        print(
            f"{transport}: {report.bytes / 1e6:.0f} MB in {report.seconds:.2f} s, verified by "
            f"{report.verified};\n  tensors where they were: {unmoved}; "
            f"memory grew by {grown_mb:.0f} MB"
        )
        conn.send((unmoved, checksum(model)))
        with torch.no_grad():
            for weight in model.parameters():
                weight.zero_()


def main() -> None:
    children.end_on_signals()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=0.25)
    gb = parser.parse_args().gb
    model = make_model(gb, seed=1)
    name = f"lent-{os.getpid()}"  # a name of one run, bound to no other weights
    before_mb, began_s = resident_mb(), time.monotonic()
    with mx.serve(model, model=name, copy=False) as source, torch.no_grad():
        seconds, grown_mb = time.monotonic() - began_s, resident_mb() - before_mb
        print(f"lent in {seconds:.2f} s, memory grew by {grown_mb:.0f} MB:\n  {source}")
        here, there = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        reader = spawn.Process(
            target=fill, args=(gb, name, source.coordinator_address, there), daemon=True
        )
        reader.start()
        for _ in range(2):
            unmoved, filled = here.recv()
            assert unmoved and filled == checksum(model), "the modules differ"
        reader.join()
    print("both modules hold the same weights, bit for bit")


if __name__ == "__main__":
    main()
