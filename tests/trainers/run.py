"""Random trainers, read and followed: each pull is one version, bit for bit, or fails by type."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import mx
from mx.errors import MxError
from tests.support.daemon import daemon
from tests.support.trainer import Ranks
from tests.trainers.rank import Drawn, drawn, values

KIND = "tests.trainers.rank:RandomRank"


class Fleet:
    """One trainer after another, of the same name."""

    def __init__(self, coordinator: str, seed: int) -> None:
        self.coordinator, self.seed, self.rng = coordinator, seed, random.Random(seed)
        self.version, self.lives = 0, 0
        self.ranks: Ranks | None = None
        self.drawn: Drawn = {}
        self.outcomes: Counter[str] = Counter()
        self.name = f"policy-{seed}"

    def begin(self) -> None:
        """Start a trainer. The model, and how it is sharded, are drawn anew."""
        self.end()
        self.lives += 1
        self.version += 1
        count, seed = self.rng.choice([1, 2, 3, 4]), self.rng.randrange(1 << 30)
        self.drawn = drawn(seed, count)
        self.ranks = Ranks(count, kind=KIND)
        said = self.ranks.ask(
            f"rank.serve({self.name!r}, {self.coordinator!r}, {seed}, {self.version})"
        )
        assert said[0].startswith(self.name), said

    def end(self) -> None:
        """Kill the trainer's ranks."""
        if self.ranks is not None:
            self.ranks.close()
            self.ranks = None

    def step(self) -> list[Any]:
        assert self.ranks is not None
        self.version += 1
        return self.ranks.ask(f"rank.step({self.version})")

    def expected(self, version: int, how: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return what a pull gets of a version."""
        found = {}
        for name, (dtype, shape, _) in self.drawn.items():
            if "only" in how and name not in how["only"]:
                continue
            whole = values(name, version, dtype, shape)
            if name in how.get("slices", {}):
                dim, begin, end = how["slices"][name]
                whole = whole.narrow(dim, begin, end - begin)
            found[name] = whole
        return found

    def how(self) -> dict[str, Any]:
        """Draw how a pull is made."""
        kind = self.rng.choice(["whole", "into", "only", "slices"])
        names = list(self.drawn)
        if kind == "only":
            return {"only": self.rng.sample(names, self.rng.randrange(1, len(names) + 1))}
        if kind == "slices":
            cut = {}
            for name, (_, shape, _) in self.drawn.items():
                dims = [dim for dim, size in enumerate(shape) if size > 1]
                if dims and self.rng.random() < 0.7:
                    dim = self.rng.choice(dims)
                    begin = self.rng.randrange(shape[dim])
                    cut[name] = (dim, begin, self.rng.randrange(begin, shape[dim]) + 1)
            return {"slices": cut} if cut else {}
        if kind == "into":
            return {"into": {n: torch.zeros_like(t) for n, t in self.expected(0, {}).items()}}
        return {}

    def pull(self, how: dict[str, Any], versions: tuple[int, ...], wait_s: float = 5.0) -> None:
        """Pull, and compare with each version that it may be."""
        with mx.pull(self.name, coordinator=self.coordinator, wait_s=wait_s, **how) as pull:
            pull.wait(60)
            got = pull.state_dict()
            for version in versions:
                wanted = self.expected(version, how)
                if got.keys() == wanted.keys() and all(same(got[n], wanted[n]) for n in wanted):
                    self.outcomes["right"] += 1
                    return
        raise AssertionError(f"a pull with {sorted(how)} is of none of the versions {versions}")


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors have equal bytes; NaNs are equal to themselves."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    flat = (each.contiguous().view(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(*flat)


def play(rounds: int, seed: int, say: Callable[[str], None] = print) -> int:
    """Play rounds; 0 if all went well."""
    with daemon(lease_s=1.0) as (_, coordinator):
        fleet = Fleet(coordinator, seed)
        began_s = time.monotonic()
        try:
            for number in range(rounds):
                if fleet.ranks is None or fleet.rng.random() < 0.02:
                    fleet.begin()
                try:
                    _round(fleet)
                except Exception:
                    say(f"round {number} of seed {seed}: {fleet.drawn}")
                    raise
        finally:
            fleet.end()
        took_s = time.monotonic() - began_s
        say(f"{rounds} rounds in {took_s:.0f} s, {fleet.lives} trainers: {dict(fleet.outcomes)}")
    return 0


def _round(fleet: Fleet) -> None:
    kind = fleet.rng.choices(["pull", "step", "both", "death"], [50, 25, 20, 3])[0]
    how = fleet.how()
    fleet.outcomes[kind] += 1
    if kind == "pull":
        fleet.pull(how, (fleet.version,), wait_s=30.0)  # on a busy machine ranks answer late
    elif kind == "step":
        said = fleet.step()
        assert all(str(each).startswith(fleet.name) for each in said), said
    elif kind == "both":
        before = fleet.version
        with _reading(fleet, how, (before, before + 1)):
            fleet.step()
    else:
        assert fleet.ranks is not None
        victim = fleet.rng.randrange(len(fleet.ranks.processes))
        with _reading(fleet, how, (fleet.version,)):
            time.sleep(fleet.rng.random() * 0.1)
            fleet.ranks.kill(victim)
        fleet.end()


@contextmanager
def _reading(fleet: Fleet, how: dict[str, Any], versions: tuple[int, ...]) -> Iterator[None]:
    """Pull during the block. The pull may fail by one of mx's errors."""
    failed: list[BaseException] = []

    def read() -> None:
        try:
            fleet.pull(how, versions)
        except MxError as error:
            fleet.outcomes[type(error).__name__] += 1
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield
    finally:
        reader.join(120)
    if failed:
        raise failed[0]
