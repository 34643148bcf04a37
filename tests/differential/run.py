"""Plays rounds: each draws options, steps and moments from its seed, and compares every byte."""

from __future__ import annotations

import gc
import logging
import shutil
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

from tests.differential.steps import KINDS, STEPS, Step
from tests.differential.world import Coordinator, World, descriptors, expecting, settles
from tests.support import forkserver
from tests.support.commands import environment

#: Descriptors that come with the first rounds: gRPC's pollers, channels that linger.
SPARE_DESCRIPTORS = 24


def play(
    coordinator: Coordinator, folder: Path, seed: int, tally: Counter[str], steps: dict[Step, int]
) -> World:
    """Play one round, and return what is left of it. Raises AssertionError if it breaks a rule."""
    world = World(coordinator, folder, seed, tally)
    rng = world.rng
    try:
        for name in world.names:
            kind, speed = rng.choice(KINDS), rng.choice(["", "8MB", "8MB"])
            with expecting(world, f"serve {name.name} ({kind}, {speed or 'any speed'})"):
                world.serve(name, kind, speed=speed)
        for _ in range(rng.randint(2, 5)):
            (step,) = rng.choices(list(steps), list(steps.values()))
            tally[step.__name__] += 1
            step(world, rng.choice(world.names))
        for name in world.names:
            world.note(f"settle {name.name}")
            world.settle(name)
    except BaseException:
        print(f"seed {seed}:\n  " + "\n  ".join(world.log), file=sys.stderr)
        raise
    finally:
        world.close()
    return world


def run(rounds: int, seed: int, folder: Path, only: str = "") -> int:
    """Play rounds from a seed on, of all steps or those named. Returns the exit code: 1 after the
    first that breaks a rule."""
    began_s, most = time.monotonic(), 0
    tally: Counter[str] = Counter()
    named = only.split(",") if only else [step.__name__ for step in STEPS]
    steps = {step: often for step, often in STEPS.items() if step.__name__ in named}
    logging.getLogger("mx").setLevel(logging.CRITICAL)  # restarts and refusals are expected
    with forkserver.running(environment()):
        coordinator = Coordinator(folder / "state")
        try:
            for number in range(seed, seed + rounds):
                here = folder / str(number)
                try:
                    world = play(coordinator, here, number, tally, steps)
                    assert not settles(world.listed, 0), "sources are listed that were closed"
                    found = settles(descriptors, most) if most else descriptors()
                    assert not most or found <= most, f"{found} descriptors, of {most} at most"
                except Exception:  # noqa: BLE001 - whatever it is, the round has failed
                    traceback.print_exc()
                    print(f"failed: repeat it with --seed {number} --rounds 1", file=sys.stderr)
                    return 1
                finally:
                    shutil.rmtree(here, ignore_errors=True)
                    gc.collect()
                if number == seed:
                    most = descriptors() + SPARE_DESCRIPTORS
        finally:
            coordinator.close()
    done = ", ".join(f"{count} {what}" for what, count in sorted(tally.items()))
    took_s = time.monotonic() - began_s
    print(f"{rounds} rounds from seed {seed} in {took_s:.0f} s: all right ({done})")
    return 0
