"""Draws an engine's start, and what befalls it, from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

CHECKPOINT, LOADED, PROCESSED, ORDINARY = "checkpoint", "loaded", "processed", "ordinary"
COORDINATOR, ENGINE = "coordinator", "engine"
#: What an engine starts from, best first.
ORDER = (PROCESSED, LOADED, CHECKPOINT, ORDINARY)
#: The layers of the model.
LAYERS = 8


class What(StrEnum):
    """What happens to a process; `Luck.for_s` later it goes on, or never if that is 0."""

    KILL = "kill"  # SIGKILL; a coordinator starts anew, and knows nothing
    STOP = "stop"  # SIGSTOP, then SIGCONT
    SLEEP = "sleep"  # a replica sleeps, and wakes up
    DISCARD = "discard"  # a replica's sleep discards its weights
    UPDATE = "update"  # a replica gets other weights, as the next revision
    WRITE = "write"  # a replica's weights are written to, unannounced
    SUPERSEDE = "supersede"  # another checkpoint is served as the name's newest revision
    INTERRUPT = "interrupt"  # SIGINT
    TERMINATE = "terminate"  # SIGTERM


#: What may happen to a replica, to a source of the checkpoint, to the coordinator.
REPLICAS = (
    What.KILL, What.STOP, What.TERMINATE, What.SLEEP, What.DISCARD, What.UPDATE, What.WRITE,
)  # fmt: skip
SOURCES = (What.KILL, What.STOP, What.TERMINATE, What.SUPERSEDE)
COORDINATORS = (What.KILL, What.STOP)
ENGINES = (What.INTERRUPT, What.TERMINATE, What.KILL)
#: What may happen while the engine sleeps, and its peers are to have what it has discarded.
ASLEEP = "asleep"


@dataclass(frozen=True)
class Luck:
    """Something that happens to `who`, `after_s` after the engine has come to `point`."""

    what: What
    who: str
    point: str
    after_s: float = 0.0
    for_s: float = 0.0

    def __str__(self) -> str:
        late = f", {self.after_s:.3f} s later" if self.after_s else ""
        long = f" for {self.for_s:.3f} s" if self.for_s else ""
        return f"at {self.point}{late}: {self.what} {self.who}{long}"


@dataclass(frozen=True)
class Start:
    """One engine's start.

    `states` are those that replicas lend; with `second_hand` the loaded one is of a replica that
    has it from another, which has ended. `folder` is "whole", "bare" (its configuration only),
    "absent", or "other" (with other weights). `named` says how the engine's user names the model:
    by "name", by "pin", or by a folder with the same "files". `memory` is where mx remembers:
    "usual", "absent", or a "full" disk. `then` is what the engine does once it has started: "",
    "sleep" or "discard", after which it wakes up.
    """

    seed: int
    states: tuple[str, ...]
    second_hand: bool
    checkpoint: bool
    folder: str
    named: str
    state: str
    fallback: bool | None
    lend: bool
    transport: str
    mbyte_per_s: int
    memory: str
    then: str
    luck: tuple[Luck, ...]

    def __str__(self) -> str:
        held = [*self.states, *([CHECKPOINT] if self.checkpoint else [])]
        asked = f"state {self.state}, fallback {self.fallback}, lend {self.lend}"
        lines = [
            f"seed {self.seed}: {', '.join(held) or 'nothing'} at peers"
            f"{' (second hand)' if self.second_hand else ''}, folder {self.folder}, "
            f"memory {self.memory}",
            f"  named by {self.named}, {asked}, {self.transport or 'any transport'}, "
            f"{self.mbyte_per_s or 'any'} MB/s, then {self.then or 'no sleep'}",
        ]
        return "\n".join([*lines, *(f"  {each}" for each in self.luck)])


def points_of(state: str) -> list[str]:
    """Return where an engine comes by while it loads a state, in this order."""
    layers = [f"{state}:layer:{n}" for n in range(LAYERS)]
    work = [] if state == PROCESSED else [f"{state}:processing:{n}" for n in range(LAYERS)]
    return [f"{state}:chosen", *layers, f"{state}:filled", *work, f"{state}:started"]


def draw(seed: int) -> Start:
    """Return the start of this seed."""
    rng = random.Random(seed)
    states = tuple(each for each in (PROCESSED, LOADED) if rng.random() < 0.7)
    checkpoint = rng.random() < 0.75
    folder = rng.choices(("whole", "bare", "absent", "other"), (5, 2, 2, 1))[0]
    named = rng.choices(("name", "pin", "files"), (5, 2, 2))[0]
    memory = rng.choices(("usual", "absent", "full"), (4, 1, 1))[0]
    if named == "files":
        folder, checkpoint, memory = "whole", True, "usual"
    if named == "pin" and folder == "other":
        folder = "whole"
    state = rng.choices(("auto", PROCESSED, LOADED, CHECKPOINT), (8, 1, 1, 1))[0]
    lend = rng.random() < 0.8
    then = rng.choices(("", "sleep", "discard"), (5, 1, 2))[0] if lend else ""
    second_hand = LOADED in states and rng.random() < 0.2
    coming = [
        *(
            each
            for each in states
            if state in ("auto", each) and not (second_hand and each == LOADED)
        ),
        *([CHECKPOINT] if checkpoint else []),
    ]
    return Start(
        seed=seed,
        states=states,
        second_hand=second_hand,
        checkpoint=checkpoint,
        folder=folder,
        named=named,
        state=state,
        fallback=rng.choices((None, True, False), (5, 2, 1))[0],
        lend=lend,
        transport=rng.choice(("", "tcp", "shm")),
        mbyte_per_s=rng.choice((0, 0, 3, 6, 12)),
        memory=memory,
        then=then,
        luck=tuple(_luck(rng, coming, then)),
    )


def _luck(rng: random.Random, coming: list[str], then: str) -> list[Luck]:
    """Draw two to six strokes at points that the engine comes by if the first ones tell: each
    state that it begins with may fail in the middle, and then it begins with the next one."""
    found: list[Luck] = []
    order = [each for each in ORDER if each in coming]
    passed: list[list[str]] = []
    for state in order:
        points = points_of(state)
        late = rng.random() < 0.3
        at = rng.randrange(len(points) if late else 1 + LAYERS)
        failing = SOURCES if state == CHECKPOINT else REPLICAS
        found.append(_stroke(rng, rng.choice(failing), state, points[at]))
        if late:  # it has all by then, and begins with no other
            passed.append(points)
            break
        passed.append(points[: at + 1])
    else:
        passed.append(points_of(ORDINARY))
    first = True
    while len(found) < 2 or first or (rng.random() < 0.4 and len(found) < 5):
        who = rng.choices((COORDINATOR, ENGINE, *order), (3, 2, *[2] * len(order)))[0]
        kinds = {COORDINATOR: COORDINATORS, ENGINE: ENGINES, CHECKPOINT: SOURCES}.get(who, REPLICAS)
        # The engine certainly comes by the first points.
        points = passed[0] if first else rng.choice(passed)
        found.append(_stroke(rng, rng.choice(kinds), who, rng.choice(points)))
        first = False
    if then:
        who = rng.choice((COORDINATOR, *coming))
        found.append(_stroke(rng, rng.choice((What.KILL, What.STOP)), who, ASLEEP))
    return found


def _stroke(rng: random.Random, what: What, who: str, point: str) -> Luck:
    late = who == ENGINE and rng.random() < 0.6
    after_s = round(rng.uniform(0, 0.4), 3) if late else 0.0
    returns = what in (What.STOP, What.SLEEP) or (what, who) == (What.KILL, COORDINATOR)
    goes_on = returns and rng.random() < 0.5
    return Luck(what, who, point, after_s, round(rng.uniform(0.2, 3), 3) if goes_on else 0.0)
