"""The receiving side of a swarm: which chunk is requested next, and from which neighbour. Events
in, commands out; no IO, and time is an argument.

A receiver requests its lowest missing chunk from the least-loaded peer that holds it. An origin
suggests chunks (`mx.core.swarm.origin.Seeder`): suggestions come before everything else. A
neighbour without a free slot rejects the request. A receiver with no other peer to turn to then
says that it is interested, and the neighbour announces its next free slot. A chunk is requested
from one neighbour, and when it is late from another: in place of the first, or beside it near the
end (a hedge). A neighbour that takes more than four times as long as the median one is shunned: it
gets requests only for chunks that no other peer can serve. When no chunk has come for long, chunks
are read from a whole source without requests (`mx.core.swarm.free`).

Sets of chunks are integers used as bit sets (bit c: chunk c): the union of two sets of 4,096
chunks, or the lowest chunk of one, costs a tenth of a microsecond in plain Python.

Peers are numbers that the caller chooses, like connections in `mx.core.transfer`; `now_s` are
readings of one monotonic clock. docs/swarm.md explains the figures: it says what was tried, and
with which result.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from mx.core.holdings import members
from mx.core.swarm.commands import (
    Cancel,
    Command,
    Decline,
    Interested,
    NotInterested,
    ReadFreely,
    Request,
)
from mx.core.swarm.free import FREE_S, FreeReading
from mx.core.swarm.slots import WIDTH

#: New chunks are announced to neighbours this long after the first of them has landed ...
ANNOUNCE_S = 0.05
#: ... or, where chunks come faster, after this part of the giver's time per chunk.
ANNOUNCE_PART = 0.5
#: A neighbour that rejected a request, and announces no free slot, gets requests again after this.
BUSY_S = 0.5
#: A chunk is late after this many times the median neighbour's time per chunk ...
LATE_FACTOR = 4.0
#: ... and not before this.
LATE_S = 0.3
#: A neighbour that takes this many times as long as the median one is shunned.
SLOW_FACTOR = 4.0
#: A neighbour's time per chunk counts after this many chunks.
SEEN = 2
#: Late chunks are hedged when no more than this many are missing.
END_CHUNKS = 4
#: The weight of the past in a neighbour's average time per chunk.
_KEPT = 0.7


class VerifiedChunks(Protocol):
    """The chunks that are verified here, as a bit set: `mx.core.holdings.Holdings`."""

    @property
    def bits(self) -> int: ...


@dataclass(slots=True)
class _Peer:
    have: int
    requested: dict[int, float] = field(default_factory=dict)  # chunk -> when
    seconds: float = 0.0  # per chunk, averaged over the latest
    seen: int = 0
    busy_until_s: float = 0.0
    waited_for: bool = False  # it knows that we are interested in its next free slot
    shunned: bool = False
    bad: int = 0  # chunks that failed; requested again only when nothing else can be
    whole: bool = False  # it holds everything, whatever it announces

    @property
    def cost(self) -> float:
        """The peer's load, as far as it can be known: a peer that holds much gets many requests.
        One that has served nothing so far comes first."""
        return self.seconds * (1 + self.have.bit_count())


class Receiver:
    """One pull's requests. Not thread-safe. Methods return commands in the order in which they are
    to be carried out. Events of peers that are gone, or about chunks that were not requested, are
    ignored."""

    def __init__(
        self, chunks: int, holdings: VerifiedChunks, *, width: int = WIDTH, free_s: float = FREE_S
    ) -> None:
        """
        Args:
            chunks: How many chunks the model has.
            holdings: The chunks that are verified here; the caller reports each change by `landed`.
            width: How many requests may be outstanding: as many as a source serves at a time. Late
                ones, which may never be answered, don't count.
            free_s: Seconds without a chunk after which chunks are read without a request.
        """
        self.width = width
        self._holdings = holdings
        self._all = (1 << chunks) - 1
        self._free = FreeReading(free_s)
        # (peer, chunk) that are read without a request
        self._unrequested: set[tuple[int, int]] = set()
        self._wanted = self._all & ~holdings.bits  # neither held, requested nor suggested
        self._requests = 0  # outstanding, and not late
        self._late: set[tuple[int, int]] = set()  # (peer, chunk): the others that are outstanding
        self._peers: dict[int, _Peer] = {}
        self._requesters: dict[int, list[int]] = {}  # requested chunk -> from which peers
        # (peer, chunk), to be requested when fewer than `width` requests are outstanding
        self._suggestions: deque[tuple[int, int]] = deque()
        self._announced = holdings.bits  # announced to peers that join by `joined`
        self.announce_at_s: float | None = None  # when `announcements` is to be called
        self.hedges = 0

    @property
    def held(self) -> int:
        """The chunks that are verified here, as a bit set."""
        return self._holdings.bits

    @property
    def left(self) -> int:
        """How many chunks are not verified yet."""
        return (self._all & ~self._holdings.bits).bit_count()

    @property
    def free(self) -> bool:
        """Return True while chunks are read without requests."""
        return self._free.on

    @property
    def peers(self) -> tuple[int, ...]:
        return tuple(self._peers)

    @property
    def can_be_given(self) -> bool:
        """Return True if a neighbour holds a chunk that is missing here."""
        return any(peer.have & ~self.held for peer in self._peers.values())

    def requested(self, chunk: int) -> tuple[int, ...]:
        """Return the peers from which the chunk is requested: at most one, and one as a hedge."""
        return tuple(self._requesters.get(chunk, ()))

    # -- neighbours -----------------------------------------------------------------------------

    def joined(self, peer: int, have: int = 0, *, whole: bool = False) -> int:
        """Add a neighbour. The caller calls `plan` next.

        Args:
            peer: Its number, not in use.
            have: The chunks that it holds.
            whole: True if it holds everything, though it may not announce that.

        Returns:
            The chunks to announce to it first: all that are held here.
        """
        if peer in self._peers:
            raise ValueError(f"peer {peer} is there already")
        self._peers[peer] = _Peer(have, whole=whole)
        return self.held

    def gone(self, peer: int, now_s: float) -> list[Command]:
        """Remove a neighbour that is gone: its chunks are requested from others."""
        state = self._peers.pop(peer, None)
        if state is None:
            return []
        for chunk in state.requested:
            self._release(peer, chunk)
        for suggestion in [suggestion for suggestion in self._suggestions if suggestion[0] == peer]:
            self._suggestions.remove(suggestion)
            self._wanted |= (1 << suggestion[1]) & ~self.held
        return self.plan(now_s)

    def announced(self, peer: int, chunks: int, now_s: float) -> list[Command]:
        """Record that the neighbour holds these chunks too."""
        state = self._peers.get(peer)
        if state is None:
            return []
        state.have |= chunks
        if self._requests < self.width and chunks & self._wanted:
            return self.plan(now_s)
        return []

    # -- answers --------------------------------------------------------------------------------

    def suggested(self, peer: int, chunk: int, now_s: float) -> list[Command]:
        """Follow the origin's suggestion: the chunk is requested as soon as fewer than `width`
        requests are outstanding. A chunk that is not wanted any more is declined."""
        if (
            peer not in self._peers
            or peer in self.requested(chunk)
            or (peer, chunk) in self._suggestions
        ):
            return []
        if not self._wanted >> chunk & 1:
            return [Decline(peer, chunk)]
        self._wanted &= ~(1 << chunk)
        self._suggestions.append((peer, chunk))
        return self.plan(now_s)

    def rejected(self, peer: int, chunk: int, now_s: float) -> list[Command]:
        """Turn to other peers: the neighbour rejects the request, or takes its slot back. A read
        that runs may still complete."""
        state = self._peers.get(peer)
        if state is None or (peer, chunk) in self._unrequested:
            return []
        if state.requested.pop(chunk, None) is None:
            return []
        state.busy_until_s = now_s + BUSY_S
        self._release(peer, chunk)
        return self.plan(now_s)

    def unchoked(self, peer: int, now_s: float) -> list[Command]:
        """Answer a neighbour that has a free slot with a request, or with NotInterested."""
        state = self._peers.get(peer)
        if state is None:
            return []
        state.busy_until_s = 0.0
        state.waited_for = False
        commands = self.plan(now_s)
        if not any(type(each) is Request and each.peer == peer for each in commands):
            commands.append(NotInterested(peer))
        return commands

    def failed(self, peer: int, chunk: int, now_s: float) -> list[Command]:
        """Record that the read failed, or brought wrong bytes. The chunk is not requested from this
        peer again, unless it announces it again, or nothing else can be requested (`tick`)."""
        state = self._peers.get(peer)
        if state is None or state.requested.pop(chunk, None) is None:
            return []
        state.have &= ~(1 << chunk)
        state.bad |= 1 << chunk
        self._release(peer, chunk)
        return self.plan(now_s)

    def landed(self, peer: int, chunk: int, now_s: float) -> list[Command]:
        """Record that the chunk is verified here, whether it is still requested or not.

        Args:
            peer: The peer that sent it. Any number that is not a peer's if it came from elsewhere,
                such as a disk.
            chunk: Its number.
            now_s: The time.
        """
        commands: list[Command] = []
        self._free.landed(now_s)
        for other in self._requesters.pop(chunk, ()):
            state = self._peers[other]
            if other == peer and state.whole and (other, chunk) not in self._unrequested:
                self._free.slot_given()
            self._ended(other, chunk)
            seconds = now_s - state.requested.pop(chunk)
            if other != peer:
                commands.append(Cancel(other, chunk))
                continue
            state.seen += 1
            kept = _KEPT if state.seen > 1 else 0.0
            state.seconds = kept * state.seconds + (1 - kept) * seconds
        self._wanted &= ~(1 << chunk)
        if not self._announced >> chunk & 1 and self.announce_at_s is None:
            delay_s = ANNOUNCE_S
            if (giver := self._peers.get(peer)) is not None and giver.seen:
                delay_s = min(delay_s, ANNOUNCE_PART * giver.seconds)
            self.announce_at_s = now_s + delay_s
        return commands + self.plan(now_s)

    def announcements(self) -> list[tuple[int, int]]:
        """Return (peer, chunks to announce to it), once `announce_at_s` has come. Chunks are not
        announced to a neighbour that holds them."""
        news, self.announce_at_s = self.held & ~self._announced, None
        self._announced |= news
        return [(n, chunks) for n, peer in self._peers.items() if (chunks := news & ~peer.have)]

    # -- requests -------------------------------------------------------------------------------

    def plan(self, now_s: float) -> list[Command]:
        """Request chunks until `width` requests are outstanding."""
        commands: list[Command] = []
        self._wanted &= ~self.held  # their `landed` may not have been called yet
        while self._requests < self.width:
            if self._suggestions:
                number, chunk = self._suggestions.popleft()
                if self.held >> chunk & 1:
                    commands.append(Decline(number, chunk))
                else:
                    commands.append(self._request(number, chunk, now_s))
                continue
            picked = self._pick(now_s) if self._wanted else None
            if picked is None:
                commands += self._wait(now_s)
                break
            commands.append(self._request(*picked, now_s))
        return commands

    def _wait(self, now_s: float) -> list[Command]:
        """No request can be sent now: be interested in free slots of the neighbours that rejected
        one."""
        commands: list[Command] = []
        for number, peer in self._peers.items():
            refused = peer.busy_until_s > now_s and not peer.requested
            if refused and not peer.waited_for and peer.have & self._wanted:
                peer.waited_for = True
                commands.append(Interested(number))
        return commands

    def _pick(self, now_s: float) -> tuple[int, int] | None:
        """Return the least-loaded holder of the lowest wanted chunk that can be requested, and the
        chunk."""
        wanted = self._wanted
        lowest = 0  # of the best, as a bit
        cost = 0.0
        found = -1
        for number, peer in self._peers.items():
            if peer.requested or peer.busy_until_s > now_s:
                continue
            there = peer.have & wanted
            if not there or peer.shunned:
                continue
            low = there & -there
            if found < 0 or low < lowest or (low == lowest and peer.cost < cost):
                found, lowest, cost = number, low, peer.cost
        if found < 0:
            return None if self._requests else self._last_resort(now_s)
        return found, lowest.bit_length() - 1

    def _last_resort(self, now_s: float) -> tuple[int, int] | None:
        """Return a request for a chunk that only shunned or late peers hold, if there is one."""
        there = self._wanted
        late = {number for number, _ in self._late}
        for number, peer in self._peers.items():
            if not peer.shunned and number not in late:
                there &= ~peer.have
        able = [
            (chunks & -chunks, peer.cost, number)
            for number, peer in self._peers.items()
            if (chunks := peer.have & there) and not peer.requested and peer.busy_until_s <= now_s
        ]
        if not able:
            return None
        lowest, _, found = min(able)
        return found, lowest.bit_length() - 1

    def _request(self, number: int, chunk: int, now_s: float) -> Request:
        peer = self._peers[number]
        peer.requested[chunk] = now_s
        peer.waited_for = False
        self._requests += 1
        self._wanted &= ~(1 << chunk)
        self._requesters.setdefault(chunk, []).append(number)
        return Request(number, chunk)

    def _release(self, number: int, chunk: int) -> None:
        """End a request: this peer does not serve the chunk."""
        self._ended(number, chunk)
        requesters = self._requesters[chunk]
        requesters.remove(number)
        if not requesters:
            del self._requesters[chunk]
            self._wanted |= (1 << chunk) & ~self.held

    def _ended(self, number: int, chunk: int) -> None:
        self._unrequested.discard((number, chunk))
        if (number, chunk) in self._late:
            self._late.remove((number, chunk))
        else:
            self._requests -= 1

    # -- late and slow --------------------------------------------------------------------------

    def tick(self, now_s: float) -> list[Command]:
        """Look for late chunks and slow peers. To be called a few times a second."""
        paces = [peer.seconds for peer in self._peers.values() if peer.seen >= SEEN]
        commands: list[Command] = []
        usual_s = 0.0
        if paces:
            usual_s = statistics.median_low(paces)
            for peer in self._peers.values():
                peer.shunned = peer.seen >= SEEN and peer.seconds > SLOW_FACTOR * usual_s
        limit_s = max(LATE_S, LATE_FACTOR * usual_s) if paces else 4 * LATE_S
        for chunk, requesters in list(self._requesters.items()):
            if (
                len(requesters) == 1
                and now_s - self._peers[requesters[0]].requested[chunk] > limit_s
            ):
                commands += self._request_elsewhere(requesters[0], chunk, now_s)
        commands += self.plan(now_s)
        if not self._requests and self._wanted:
            for peer in self._peers.values():
                peer.have |= peer.bad
                peer.bad = 0
            commands += self.plan(now_s)
        return commands + self._read_freely(now_s, limit_s)

    def _request_elsewhere(self, late: int, chunk: int, now_s: float) -> list[Command]:
        """Request a late chunk from another peer. If no other can serve it, its request does not
        count as outstanding, so that other chunks are requested."""
        able = [
            (peer.shunned, peer.cost, number)
            for number, peer in self._peers.items()
            if peer.have >> chunk & 1 and not peer.requested and peer.busy_until_s <= now_s
        ]
        if (not able or self.left <= END_CHUNKS) and (late, chunk) not in self._late:
            self._late.add((late, chunk))
            self._requests -= 1
        if not able:
            return []
        other = min(able)[2]
        if self.left <= END_CHUNKS:
            self.hedges += 1
            return [self._request(other, chunk, now_s)]
        state = self._peers[late]
        # Its time per chunk is at least the time that it has taken so far.
        state.seconds = max(state.seconds, now_s - state.requested.pop(chunk))
        state.seen = max(state.seen + 1, SEEN)
        self._release(late, chunk)
        return [Cancel(late, chunk), self._request(other, chunk, now_s)]

    # -- without requests -----------------------------------------------------------------------

    def _read_freely(self, now_s: float, limit_s: float) -> list[Command]:
        """Read one chunk after the other from a whole source, beside the requests to others."""
        whole = {n: p.whole for n, p in self._peers.items() if p.whole or p.have == self._all}
        if not (self._free.due(now_s) and whole and self.left and self.width):
            return []
        commands: list[Command] = []
        for number, chunk in list(self._unrequested):
            slow = now_s - self._peers[number].requested[chunk] > max(self._free.after_s, limit_s)
            if not slow or len(whole) == 1:
                return []
            commands.append(self._give_up(number, chunk))
        suggested = sum({1 << chunk for _, chunk in self._suggestions})
        chunks = self._wanted | suggested or sum({1 << chunk for _, chunk in self._late})
        if not chunks:
            return commands
        source = self._free.choose(whole)
        chunk = next(members(chunks & ~self._peers[source].bad or chunks))
        self._suggestions = deque(each for each in self._suggestions if each[1] != chunk)
        given_up = [self._give_up(requested, chunk) for requested in self.requested(chunk)]
        commands += [each for each in given_up if each.peer != source]
        self._request(source, chunk, now_s)
        self._unrequested.add((source, chunk))
        return [*commands, ReadFreely(source, chunk)]

    def _give_up(self, number: int, chunk: int) -> Cancel:
        del self._peers[number].requested[chunk]
        self._release(number, chunk)
        return Cancel(number, chunk)
