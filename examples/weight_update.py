"""A trainer changes the weights that it lends, while readers fill their modules with them.

    python examples/weight_update.py [--readers 3] [--updates 5]

`source.changing()` keeps readers away while the trainer writes; leaving it makes a new revision.
Each reader follows: where the weights change while they arrive, it goes over to the new revision
and moves only what differs. What it ends with is one revision, whole.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Semaphore

import children
import torch

import mx

WIDTH, LAYERS = 1024, 24


def make_model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def step_of(model: torch.nn.Module) -> set[float]:
    """Return the training steps whose weights a model holds: one, if it is of one revision."""
    return {weight.flatten()[0].item() for weight in model.parameters()}


def train(model: torch.nn.Module, step: int) -> None:
    """Stand in for training: every tensor changes, and says in which step."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.99)
            weight.view(-1)[0] = step


def read(
    reader: int, name: str, coordinator: str, last: int, started: Semaphore, results: Queue[str]
) -> None:
    """Fill a module again and again, until it holds the last step."""
    children.end_with()
    model, pulls, moved = make_model(), 0, 0
    started.release()
    seen: list[int] = []
    while not seen or seen[-1] < last:
        # `wait_s`: there may be no source while the trainer writes.
        with mx.pull(name, into=model, follow=True, wait_s=30, coordinator=coordinator) as pull:
            report = pull.wait()
        (step,) = step_of(model)  # fails if the model is a mixture of two steps
        seen.append(int(step))
        pulls += 1
        moved += sum(path.bytes for path in report.paths if path.transport != "reuse")
    results.put(
        f"reader {reader}: filled its module {pulls} times, moved {moved / 1e6:.0f} MB,\n"
        f"  and held the weights of steps {sorted(set(seen))}, each time of one step alone"
    )


def main() -> None:
    children.end_on_signals()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readers", type=int, default=3)
    parser.add_argument("--updates", type=int, default=5)
    args = parser.parse_args()
    model = make_model()
    train(model, 0)
    name = f"policy-{os.getpid()}"  # a name of one run, bound to no other weights
    spawn = multiprocessing.get_context("spawn")
    results: Queue[str] = spawn.Queue()
    started = spawn.Semaphore(0)
    with mx.serve(model, model=name, copy=False, max_bandwidth="400MB/s") as source:
        readers = [
            spawn.Process(
                target=read,
                args=(i, name, source.coordinator_address, args.updates, started, results),
                daemon=True,
            )
            for i in range(args.readers)
        ]
        nbytes = sum(weight.nbytes for weight in model.parameters())
        print(f"A trainer lends {nbytes / 1e6:.0f} MB, where they are, at 400 MB/s in all, to")
        print(
            f"{args.readers} readers that follow it, and trains {args.updates} steps:", flush=True
        )
        for reader in readers:
            reader.start()
        for _ in readers:  # they import torch first
            started.acquire(timeout=120)
        for step in range(1, args.updates + 1):
            time.sleep(2)
            began_s = time.monotonic()
            with source.changing():
                entered_s = time.monotonic()
                train(model, step)
                trained_s = time.monotonic()
            print(
                f"step {step}: kept readers away after {entered_s - began_s:.3f} s, changed every "
                f"tensor,\n  listed them as {source.model} "
                f"{time.monotonic() - trained_s:.3f} s later",
                flush=True,
            )
        for _ in readers:
            print(results.get(timeout=120))
        for reader in readers:
            reader.join()


if __name__ == "__main__":
    main()
