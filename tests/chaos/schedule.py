"""Draws a round of chaos from its seed: the pulls and their faults.

A round depends on its seed alone, so that the seed repeats it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

#: The sources of each model. "f" is the source whose memory changes.
MODELS = {
    "one": ("s0",),
    "two": ("s0", "s1"),
    "three": ("s0", "s1", "s2"),
    "fickle": ("f",),
    "mixed": ("s0", "f"),
}
TARGETS = ("t0", "t1", "t2", "t3")
COORDINATOR = "c"
PLACES = ("loopback", "hosts")


class What(StrEnum):
    """The kind of a fault; undone after `Fault.for_s` if possible, else after the round."""

    KILL = "kill"  # SIGKILL; a source or coordinator restarts after `for_s`
    STOP = "stop"  # SIGSTOP, then SIGCONT
    CHANGE = "change"  # a source's memory changes, with its generation
    CORRUPT = "corrupt"  # a source's memory changes, without its generation
    GIVE_UP = "give up"  # the user closes the pull
    CUT = "cut"  # a host's link loses its carrier
    MUTE_UP = "mute up"  # what a host sends is lost
    MUTE_DOWN = "mute down"  # what is sent to a host is lost
    SLOW = "slow"  # a host's link carries `value` Mbit/s each way


class Damage(StrEnum):
    """The damage that a fault proxy does to a connection, `Wire.offset` bytes after its start."""

    FLIP = "flip"
    TRUNCATE = "truncate"
    GARBAGE = "garbage"
    STALL = "stall"  # `after_s` after the pull's start, for `for_s`
    RESET = "reset"  # `after_s` after the pull's start


@dataclass(frozen=True)
class Fault:
    """A fault.

    `at_s` counts from the round's start, or with `reading` from when every pull has a layer or has
    ended.
    """

    what: What
    who: str
    at_s: float
    for_s: float = 0.0
    value: float = 0.0
    reading: bool = False

    def __str__(self) -> str:
        after = " after the first layers" if self.reading else ""
        long = f" for {self.for_s:.3f} s" if self.for_s else ""
        value = f" ({self.value:g})" if self.value else ""
        return f"{self.at_s:.3f} s{after}: {self.what} {self.who}{value}{long}"


@dataclass(frozen=True)
class Wire:
    """Damage to a pull's connections with one source (or with the coordinator)."""

    damage: Damage
    peer: str
    towards_target: bool = True
    offset: int = 0
    once: bool = True  # to one connection only
    after_s: float = 0.0
    for_s: float = 0.0

    def __str__(self) -> str:
        path = "from" if self.towards_target else "to"
        times = "once" if self.once else "each time"
        if self.damage in (Damage.STALL, Damage.RESET):
            return f"{self.damage} {path} {self.peer} at {self.after_s:.3f} s, {self.for_s:.3f} s"
        return f"{self.damage} {path} {self.peer} at byte {self.offset}, {times}"


@dataclass(frozen=True)
class PullSpec:
    """One pull. `mbyte_per_s` is the limit of each of its connections (None: no limit)."""

    target: str
    start_s: float
    transport: str | None = "tcp"
    attach: bool = False
    strong: bool = False
    out: bool = False
    full_disk: bool = False
    hold: bool = False
    command: bool = False
    mbyte_per_s: float | None = None
    wires: tuple[Wire, ...] = ()

    def __str__(self) -> str:
        said = [f"{self.target} at {self.start_s:.3f} s by {self.transport or 'any'}"]
        flags = ("attach", "strong", "out", "full_disk", "hold", "command")
        said += [name for name in flags if getattr(self, name)]
        if self.mbyte_per_s is not None:
            said.append(f"{self.mbyte_per_s:g} MB/s")
        return ", ".join([*said, *map(str, self.wires)])


@dataclass(frozen=True)
class Round:
    seed: int
    place: str
    model: str
    pulls: tuple[PullSpec, ...]
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        return "\n".join(
            [
                f"seed {self.seed}: {self.place}, model {self.model!r} of "
                + ", ".join(MODELS[self.model]),
                *(f"  pull   {pull}" for pull in self.pulls),
                *(f"  fault  {fault}" for fault in self.faults),
            ]
        )

    def must_succeed(self, pull: PullSpec) -> bool:
        """Return True if a source and its connection have no fault: then no error is excused."""
        if pull.full_disk:
            return False
        for fault in self.faults:
            if fault.who == pull.target:
                return False
            if fault.who == COORDINATOR and not fault.reading:
                return False
        hurt = {fault.who for fault in self.faults} | {wire.peer for wire in pull.wires}
        if pull.transport == "ucx":
            hurt.add("f")  # it can't serve over shm: its memory is not sealed
        return COORDINATOR not in {wire.peer for wire in pull.wires} and any(
            source not in hurt for source in MODELS[self.model]
        )


def draw(seed: int, places: Sequence[str] = PLACES) -> Round:
    """Return the round of this seed. `places` are those that can be made here."""
    rng = random.Random(seed)
    place = rng.choices(PLACES, (2, 1))[0]
    # Drawn in any case, so that a seed means the same round on every machine that can play it.
    drawn = _hosts(rng, seed) if place == "hosts" else _loopback(rng, seed)
    if place not in places:
        return replace(_loopback(random.Random(seed), seed), place="loopback")
    return drawn


def _count(rng: random.Random) -> int:
    return rng.choices((1, 2, 3, 4), (3, 3, 2, 3))[0]


def _starts(rng: random.Random, count: int) -> list[float]:
    together = rng.random() < 0.5
    return [0.0 if together or not n else round(rng.uniform(0, 0.6), 3) for n in range(count)]


def _when(rng: random.Random) -> tuple[float, bool]:
    """Draw the time of a fault: at any time, or certainly in the middle of the pulls."""
    if rng.random() < 0.6:
        return round(rng.uniform(0, 0.15), 3), True
    return round(rng.uniform(0, 0.8), 3), False


def _long(rng: random.Random, most_s: float) -> float:
    return round(most_s * rng.random() ** 2 + 0.05, 3)


def _process_fault(rng: random.Random, model: str, targets: Sequence[str]) -> Fault:
    at_s, reading = _when(rng)
    kind = rng.choices(("source", "coordinator", "target"), (4, 2, 4))[0]
    if kind == "source":
        who = rng.choice(MODELS[model])
        whats = [What.KILL, What.STOP]
        if who == "f":
            whats += [What.CHANGE, What.CORRUPT] * 2
        what = rng.choice(whats)
    elif kind == "coordinator":
        who, what = COORDINATOR, rng.choice((What.KILL, What.STOP))
    else:
        who, what = rng.choice(targets), rng.choice((What.KILL, What.STOP, What.GIVE_UP))
    for_s = _long(rng, 3.0) if what in (What.STOP, What.KILL) else 0.0
    if what is What.KILL and kind == "target":
        for_s = 0.0
    return Fault(what, who, at_s, for_s=for_s, reading=reading)


def _wire(rng: random.Random, model: str) -> Wire:
    damage = rng.choices(list(Damage), (5, 4, 2, 3, 3))[0]
    peer = rng.choice(MODELS[model])
    if rng.random() < 0.15:
        peer = COORDINATOR
    # Most bytes come from the source, and few go to it.
    towards_target = rng.random() < 0.75
    most = 4 << 20 if towards_target and peer != COORDINATOR else 4000
    return Wire(
        damage,
        peer,
        towards_target=towards_target,
        offset=int(most * rng.random() ** 2),
        once=rng.random() < 0.6,
        after_s=round(rng.uniform(0, 0.5), 3),
        for_s=_long(rng, 2.5),
    )


def _loopback(rng: random.Random, seed: int) -> Round:
    model = rng.choices(list(MODELS), (2, 3, 3, 2, 3))[0]
    targets = TARGETS[: _count(rng)]
    pulls = []
    for target, start_s in zip(targets, _starts(rng, len(targets)), strict=True):
        transport = rng.choices(("tcp", "shm", None, "ucx"), (16, 2, 2, 1))[0]
        out = rng.random() < 0.15
        pulls.append(
            PullSpec(
                target,
                start_s,
                transport=transport,
                attach=transport is None and rng.random() < 0.5,
                strong=rng.random() < 0.2,
                out=out,
                full_disk=out and rng.random() < 0.3,
                hold=not out and rng.random() < 0.4,
                command=rng.random() < 0.03,
                mbyte_per_s=rng.choice((5, 10, 20, 40, None)),
                wires=tuple(_wire(rng, model) for _ in range(rng.choices((0, 1, 2), (6, 3, 1))[0])),
            )
        )
    count = rng.choices((0, 1, 2, 3), (4, 5, 2, 1))[0]
    faults = tuple(_process_fault(rng, model, targets) for _ in range(count))
    return Round(seed, "loopback", model, tuple(pulls), faults)


def _hosts(rng: random.Random, seed: int) -> Round:
    model = rng.choices(("one", "two"), (2, 3))[0]
    targets = TARGETS[: _count(rng)]
    pulls = []
    for target, start_s in zip(targets, _starts(rng, len(targets)), strict=True):
        out = rng.random() < 0.1
        pulls.append(
            PullSpec(
                target,
                start_s,
                transport=rng.choices(("tcp", None), (3, 1))[0],
                strong=rng.random() < 0.1,
                out=out,
                hold=not out and rng.random() < 0.4,
            )
        )
    faults = []
    for _ in range(rng.choices((0, 1, 2, 3), (1, 6, 4, 2))[0]):
        if rng.random() < 0.3:
            faults.append(_process_fault(rng, model, targets))
            continue
        at_s, reading = _when(rng)
        who = rng.choice((*MODELS[model], *MODELS[model], *targets, COORDINATOR))
        what = rng.choice((What.CUT, What.MUTE_UP, What.MUTE_DOWN, What.SLOW, What.SLOW))
        value = rng.choice((5, 20, 50)) if what is What.SLOW else 0.0
        faults.append(Fault(what, who, at_s, _long(rng, 4.0), value, reading))
    return Round(seed, "hosts", model, tuple(pulls), tuple(faults))
