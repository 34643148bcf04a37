"""How a pull's work is divided among its connections, so that all end together and early layers
are early. Pure arithmetic on the connections and the bytes that are left.

A connection takes no more than its share of the work, by the speeds seen so far (`budget`): whole
chunks as long as there are many, smaller and smaller pieces towards the end, as guided
self-scheduling (Polychronopoulos and Kuck, 1987) does for loops on processors; and half of its
share at once, as factoring (Hummel, Schonberg and Flynn, 1992) does, since speeds vary. A slow
connection reads as many chunks ahead as the fast ones will have read when it is done (`rank`).

A source is not idle while the requests that it has keep it busy until the next one comes: for
a round trip. What is requested for that (`way_nbytes`) follows the measured speed and round trip.
Nearby it is next to nothing, and a connection has no more under way than its depth.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mx.core.grid import BLOCK_BYTES
from mx.units import MIB

#: Beyond half of its depth a connection has no more in flight than it reads in this time.
AHEAD_S = 0.15
#: The largest part is what a connection reads in this time: other connections can't read what a
#: slow one holds.
PART_S = 0.06
#: The smallest piece of a chunk is what a connection reads in this time, in whole blocks.
PIECE_S = 0.005
#: How much of its budget a connection takes at once.
TAKEN = 0.5
#: The first part of a connection, where there are several: enough to measure its speed, and a slow
#: connection completes it before it counts as late.
PROBE_NBYTES = BLOCK_BYTES
#: So many times what a connection carries in a round trip is requested ahead. More than once: the
#: speed is that of what was requested, and would not rise to what the way can carry.
ROUND_TRIPS = 2.0
#: What a connection carries in a round trip counts beyond this part of what one read brings: a
#: source that waits for less than that loses little.
WORTH = 1 / 8
#: The most reads of a connection that are under way, of chunks of 16 MiB: those of 100 Gbit/s in
#: 0.3 s. Where some are read aside, into buffers, fewer.
MOST_READS, MOST_READS_ASIDE = 256, 32
#: The most bytes of a trip, and how many trips of a connection are under way: each has a stream of
#: its own, and one is copied while the other is hashed.
MOST_TRIP_NBYTES, TRIPS = 256 * MIB, 2
#: A connection does not count as late before this.
LATE_S = 1.0
#: A connection is late if the others could do its work this many times before it is done.
LATE_FACTOR = 2.0
#: A connection has slowed down when its speed is less than this part of its average.
SLOWED = 0.25


class Part(NamedTuple):
    """Blocks `begin` to `end` (half-open) of a chunk."""

    chunk: int
    begin: int
    end: int


@dataclass(slots=True)
class ConnectionLoad:
    """What one connection reads now, what came through it, and how fast."""

    source: str
    depth: int
    pace: Pace
    peer: str = ""
    answers: bool = False  # its source can be asked whether a chunk is right in its memory
    most: int = 0  # reads in flight over a way that is long
    round_trip_s: float = 0.0  # from a request to its first byte; 0: not known, or not to count
    trip_s: float = 0.0  # it reads by trips, of runs of parts, which take so long; 0: part by part
    #: Part -> when its read was issued, the oldest first.
    in_flight: dict[Part, float] = field(default_factory=dict)
    nbytes: int = 0  # of those
    verified_nbytes: int = 0  # payload bytes that came through it and were verified
    verified_at_s: float = 0.0  # when the last of them were
    wrong_parts: int = 0  # that came through it, and had wrong digests


def way_nbytes(bytes_per_s: float, round_trip_s: float) -> int:
    """Return how many bytes to have requested beyond those that come now, for the source never to
    wait for a request."""
    return int(ROUND_TRIPS * bytes_per_s * round_trip_s)


def wants_more(load: ConnectionLoad, chunk_nbytes: int, *, begins: bool = False) -> bool:
    """Return True if the connection should read more now. Beyond half of its depth it has to be
    measured as fast, or its way as long: other connections can't read what a slow one holds. A
    chunk's bytes measure its speed; by the first small parts alone, a fast connection and its
    rivals are ranked wrongly. What `begins` is another trip: it waits until there is room for a
    whole one, else a short one would follow each short one."""
    if load.trip_s:
        trip = trip_nbytes(load, chunk_nbytes)
        return load.nbytes + (trip if begins else chunk_nbytes) <= TRIPS * trip
    reads, always = len(load.in_flight), -(-load.depth // 2)
    if reads < always:
        return True
    measured_nbytes, rate = load.pace.measured_nbytes, load.pace.bytes_per_s
    fast = load.nbytes + chunk_nbytes <= rate * AHEAD_S and measured_nbytes >= chunk_nbytes
    if fast and reads < load.depth:
        return True
    if reads >= load.most or not measured_nbytes or not load.round_trip_s:
        return False
    way, part = way_nbytes(rate, load.round_trip_s), part_nbytes(load, chunk_nbytes)
    return part * WORTH <= way and load.nbytes < always * part + way


def trip_nbytes(load: ConnectionLoad, chunk_nbytes: int) -> int:
    """Return the most bytes of a trip of this connection: what it reads in `trip_s`, in whole
    chunks."""
    nbytes = min(int(load.pace.bytes_per_s * load.trip_s), MOST_TRIP_NBYTES)
    return max(nbytes // chunk_nbytes, 1) * chunk_nbytes


def part_nbytes(load: ConnectionLoad, chunk_nbytes: int) -> int:
    """Return the most bytes that a part for this connection has, by its measured speed."""
    if load.trip_s or not load.pace.measured_nbytes:
        return chunk_nbytes
    nbytes = int(load.pace.bytes_per_s * PART_S)
    return chunk_nbytes if nbytes >= chunk_nbytes else max(nbytes, BLOCK_BYTES)


def piece_nbytes(load: ConnectionLoad, chunk_nbytes: int) -> int:
    """Return the fewest bytes that are worth a read of their own on this connection."""
    blocks = int(load.pace.bytes_per_s * PIECE_S) // BLOCK_BYTES
    return min(max(1, blocks) * BLOCK_BYTES, chunk_nbytes)


def through_s(load: ConnectionLoad, chunk_nbytes: int) -> float:
    """Return the seconds until the connection would be done with one more piece, whose first byte
    comes after a round trip at the earliest."""
    rate = load.pace.bytes_per_s
    return max(load.nbytes / rate, load.round_trip_s) + piece_nbytes(load, chunk_nbytes) / rate


def is_first(
    load: ConnectionLoad, connections: Collection[ConnectionLoad], chunk_nbytes: int
) -> bool:
    """Return True if no other connection, busy or not, would be done with a piece sooner."""
    own_s = through_s(load, chunk_nbytes)
    return all(through_s(other, chunk_nbytes) >= own_s for other in connections)


def budget(
    load: ConnectionLoad, connections: Collection[ConnectionLoad], left_nbytes: int
) -> float:
    """Return how many bytes more the connection may take for all to end together."""
    total = sum(each.pace.bytes_per_s for each in connections)
    work = left_nbytes + sum(each.nbytes for each in connections)
    return work * load.pace.bytes_per_s / total - load.nbytes


def rank(
    load: ConnectionLoad,
    connections: Collection[ConnectionLoad],
    chunk_nbytes: int,
    left_nbytes: int,
) -> int:
    """Return how many chunks the other connections will have taken by the time that this one is
    done with its next, or with its next trip."""
    nbytes = float(chunk_nbytes)
    if load.trip_s:
        part = TAKEN * budget(load, connections, left_nbytes)
        nbytes = max(nbytes, min(trip_nbytes(load, chunk_nbytes), part))
    own_s = (load.nbytes + nbytes) / load.pace.bytes_per_s
    found = 0
    for other in connections:
        if other is not load:
            chunks = (other.pace.bytes_per_s * own_s - other.nbytes) / chunk_nbytes
            found += max(0, -int(-chunks // 1) - 1)
    return found


def has_its_part(
    load: ConnectionLoad, connections: Collection[ConnectionLoad], left_nbytes: int
) -> bool:
    """Return True if a connection that reads by trips has enough under way beside others: half of
    its share, and before it is measured one read."""
    if not load.trip_s or not load.in_flight or len(connections) < 2:
        return False
    share = budget(load, connections, left_nbytes) + load.nbytes
    return not load.pace.measured_nbytes or load.nbytes >= TAKEN * share


def is_late(
    load: ConnectionLoad,
    others: Sequence[ConnectionLoad],
    left_nbytes: int,
    now_s: float,
    landed_nbytes: Callable[[ConnectionLoad], int],
) -> bool:
    """Return True if early layers wait for this connection: the others could do its work
    `LATE_FACTOR` times before it is done, after all other work that is left, or, if it has slowed
    down, before that work.

    Args:
        load: The connection.
        others: Those that may read what it reads.
        left_nbytes: The bytes that are missing and not in flight.
        now_s: The time.
        landed_nbytes: Returns how many bytes of a connection's parts in flight have landed.
    """
    oldest = next(iter(load.in_flight.values()), now_s)
    if not others or now_s - oldest < LATE_S:
        return False

    def rate(each: ConnectionLoad) -> float:
        if not each.in_flight:
            return each.pace.bytes_per_s
        return max(each.pace.now_bytes_per_s(now_s, landed_nbytes(each)), 1.0)

    work = left_nbytes + load.nbytes + sum(each.nbytes - landed_nbytes(each) for each in others)
    own_rate = rate(load)
    if load.pace.measured_nbytes and own_rate < SLOWED * load.pace.bytes_per_s:
        work = load.nbytes
    # A block at least: else the last bytes of a stopped connection would always seem near.
    own_s = max(load.nbytes - landed_nbytes(load), BLOCK_BYTES) / own_rate
    return own_s > LATE_FACTOR * work / sum(map(rate, others))


#: The weight of the past when a part completes: the last eight or so make the average, more than
#: complete at once over the streams of a connection.
_KEPT = 0.88
#: A part that completes within this fraction of a part's usual time belongs to the same burst as
#: the one before, as with parallel streams. A burst has at most so many parts.
_TOGETHER, _MOST_TOGETHER = 0.25, 8
#: The estimate where nothing is known: 1 GB/s.
_UNKNOWN_BYTES_PER_S = 1e9


class Pace:
    """The pace of one connection. `now_s` are readings of one monotonic clock.

    The average is of decayed bytes over decayed busy time, so that parts which complete in
    bursts, as those of parallel streams do, do not look like fast ones and slow ones. Bytes and
    time decay between bursts, never within one: a burst's time is counted with its first part, and
    when it decayed while the other parts completed, four streams looked 22% faster than one.
    """

    __slots__ = ("_nbytes", "_seconds", "_since_s", "_together", "bytes_per_s", "measured_nbytes")

    def __init__(self, estimate_bytes_per_s: float, weight_nbytes: int) -> None:
        """The estimate counts as much as `weight_nbytes` of measured transfer."""
        rate = estimate_bytes_per_s if estimate_bytes_per_s > 0 else _UNKNOWN_BYTES_PER_S
        self._nbytes = float(weight_nbytes)
        self._seconds = weight_nbytes / rate
        self._since_s = 0.0
        self._together = 1  # parts of the present burst
        self.measured_nbytes = 0
        #: The average over the parts that have completed.
        self.bytes_per_s = self._nbytes / self._seconds

    def busy_from(self, now_s: float) -> None:
        """Start the clock: the connection was idle, and has a read from now on."""
        self._since_s = now_s

    def completed(self, nbytes: int, now_s: float) -> None:
        """Count a part of `nbytes` that has landed."""
        elapsed_s = max(now_s - self._since_s, 0.0)
        together = elapsed_s * self.bytes_per_s < nbytes * _TOGETHER
        if together and self._together < _MOST_TOGETHER:
            self._together += 1
        else:
            kept = _KEPT**self._together
            self._nbytes *= kept
            self._seconds *= kept
            self._together = 1
        self._nbytes += nbytes
        self._seconds += elapsed_s
        self._since_s = now_s
        self.measured_nbytes += nbytes
        self.bytes_per_s = self._nbytes / max(self._seconds, 1e-9)

    def doubt(self, asked_nbytes: int, now_s: float) -> None:
        """Lower the estimate if by it all of `asked_nbytes`, the reads in flight, would have landed
        by now. Does nothing once a part has completed."""
        elapsed_s = now_s - self._since_s
        if not self.measured_nbytes and asked_nbytes > 0:
            self._seconds = max(self._seconds, self._nbytes * elapsed_s / asked_nbytes)
            self.bytes_per_s = self._nbytes / max(self._seconds, 1e-9)

    def now_bytes_per_s(self, now_s: float, landed_nbytes: int) -> float:
        """Return the pace of a busy connection: the average, with the bytes of incomplete parts
        that have landed since. It falls as long as nothing lands."""
        seconds = self._seconds * _KEPT + max(now_s - self._since_s, 0.0)
        return min(self.bytes_per_s, (self._nbytes * _KEPT + landed_nbytes) / max(seconds, 1e-9))
