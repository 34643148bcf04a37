"""How a pull's work is shared out among its lanes, so that all end together and early layers
are early. Pure arithmetic on lanes and what is left.

A lane takes no more than its part of all the work there is, by the speeds seen so far (`budget`):
whole chunks as long as there are many, smaller and smaller pieces towards the end, as guided
self-scheduling (Polychronopoulos and Kuck, 1987) does for loops on processors; and of its part
half at once, as factoring (Hummel, Schonberg and Flynn, 1992) does, since speeds vary. A slow lane
takes chunks from as far ahead as the fast ones will be by the time it is through (`rank`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from mx.core.pace import Pace
from mx.core.types import BLOCK_BYTES

#: A lane beyond half of its depth asks ahead for no more than it does in this time.
AHEAD_S = 0.15
#: The largest is what it does in this time: what a slow lane holds for long is missing elsewhere.
PART_S = 0.06
#: The smallest piece of a chunk is what a lane does in this time, in whole blocks.
PIECE_S = 0.005
#: How much of what a lane may take for all to end together it takes at once.
TAKEN = 0.5
#: What a lane is asked for first where there are several: enough to see how fast it is, and for a
#: slow one soon enough not to be called late.
PROBE_NBYTES = BLOCK_BYTES
#: A lane is not called late before this.
LATE_S = 1.0
#: How many times the others could do a lane's work before it is through with it: then it is late.
LATE_FACTOR = 2.0
#: A lane has slowed down when it does less than this part of what it did.
SLOWED = 0.25


@dataclass(frozen=True, slots=True)
class Part:
    """Blocks `begin` to `end` (half-open) of a chunk."""

    chunk: int
    begin: int
    end: int


@dataclass(slots=True)
class ConnectionLoad:
    """What one connection is busy with, what came through it, and how fast."""

    source: str
    depth: int
    pace: Pace
    peer: str = ""
    #: Part -> when its read was issued, the oldest first.
    in_flight: dict[Part, float] = field(default_factory=dict)
    nbytes: int = 0  # of those
    verified_nbytes: int = 0  # payload that came through it and was right
    verified_at_s: float = 0.0  # the last of it


def wants_more(load: ConnectionLoad, chunk_nbytes: int) -> bool:
    """Should the lane be asked for more? Beyond half its depth only if it was seen to be fast:
    what a slow one holds is missing elsewhere."""
    asked = len(load.in_flight)
    if asked < -(-load.depth // 2):
        return True
    if asked >= load.depth or not load.pace.measured_nbytes:
        return False
    return load.nbytes + chunk_nbytes <= load.pace.bytes_per_s() * AHEAD_S


def part_nbytes(load: ConnectionLoad, chunk_nbytes: int) -> int:
    """The most that a lane is asked for at once, by what was seen of it."""
    if not load.pace.measured_nbytes:
        return chunk_nbytes
    return min(max(int(load.pace.bytes_per_s() * PART_S), BLOCK_BYTES), chunk_nbytes)


def piece_nbytes(load: ConnectionLoad, chunk_nbytes: int) -> int:
    """The smallest piece that is worth a read of its own on this lane."""
    blocks = int(load.pace.bytes_per_s() * PIECE_S) // BLOCK_BYTES
    return min(max(1, blocks) * BLOCK_BYTES, chunk_nbytes)


def through_s(load: ConnectionLoad, chunk_nbytes: int) -> float:
    """When the lane would be through with one more piece, counted from now."""
    return (load.nbytes + piece_nbytes(load, chunk_nbytes)) / load.pace.bytes_per_s()


def is_first(
    load: ConnectionLoad, connections: Collection[ConnectionLoad], chunk_nbytes: int
) -> bool:
    """Would no other lane, busy or not, be through with a piece sooner?"""
    own_s = through_s(load, chunk_nbytes)
    return all(through_s(other, chunk_nbytes) >= own_s for other in connections)


def budget(
    load: ConnectionLoad, connections: Collection[ConnectionLoad], left_nbytes: int
) -> float:
    """How many bytes more the lane may take for all to end together."""
    total = sum(each.pace.bytes_per_s() for each in connections)
    work = left_nbytes + sum(each.nbytes for each in connections)
    return work * load.pace.bytes_per_s() / total - load.nbytes


def rank(load: ConnectionLoad, connections: Collection[ConnectionLoad], chunk_nbytes: int) -> int:
    """How many chunks the other lanes will have taken by the time this one is through with its
    next."""
    own_s = (load.nbytes + chunk_nbytes) / load.pace.bytes_per_s()
    found = 0
    for other in connections:
        if other is not load:
            chunks = (other.pace.bytes_per_s() * own_s - other.nbytes) / chunk_nbytes
            found += max(0, -int(-chunks // 1) - 1)
    return found


def is_late(
    load: ConnectionLoad,
    others: Sequence[ConnectionLoad],
    left_nbytes: int,
    now_s: float,
    landed_nbytes: Callable[[ConnectionLoad], int],
) -> bool:
    """Could the others, who may read what it reads, do its work `LATE_FACTOR` times before it is
    through, after all else that is left, or, if it has slowed down, before that? Then early layers
    wait for it. `landed_nbytes` says how much of what a lane was asked for has landed."""
    oldest = next(iter(load.in_flight.values()), now_s)
    if not others or now_s - oldest < LATE_S:
        return False

    def rate(each: ConnectionLoad) -> float:
        if not each.in_flight:
            return each.pace.bytes_per_s()
        return max(each.pace.now_bytes_per_s(now_s, landed_nbytes(each)), 1.0)

    work = left_nbytes + load.nbytes + sum(each.nbytes - landed_nbytes(each) for each in others)
    own_rate = rate(load)
    if load.pace.measured_nbytes and own_rate < SLOWED * load.pace.bytes_per_s():
        work = load.nbytes
    # A block at least: the last bytes of one that has stopped would else seem near for ever.
    own_s = max(load.nbytes - landed_nbytes(load), BLOCK_BYTES) / own_rate
    return own_s > LATE_FACTOR * work / sum(map(rate, others))
