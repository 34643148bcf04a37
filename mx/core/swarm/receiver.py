"""The receiving side of a swarm: which neighbour is asked for which chunk next. Events in, asks
out; no IO, no clock.

A receiver wants its lowest missing chunk first, and of those that hold it asks the one that has the
least to give to others, for its pace. An origin offers chunks of its own accord
(`mx.core.swarm.origin.Seeder`): what it offers comes before everything else. A neighbour without
room says "busy"; whoever then finds nobody else to ask says that it wants to hear of room there,
and is told. A chunk is asked of one neighbour; of another when it is late: instead of the first, or
near the end beside it (a hedge). A neighbour that does less than a quarter of what the median one
does is shunned: asked for nothing that somebody else can give. When nothing comes for long, chunks
are read from a whole source without asking (`mx.core.swarm.free`).

Sets of chunks are integers used as bit sets (bit c: chunk c): the union of two sets of 4,096
chunks, or the lowest member of one, costs a tenth of a microsecond in plain Python.

Peers are numbers that the caller gives, as lanes are in `mx.core.transfer`; `now_s` are readings of
one monotonic clock. What docs/swarm.md says was tried, and what came of it, explains the figures.
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

#: Asks outstanding, as many as a source serves at a time (`mx.core.swarm.slots.WIDTH`). Two hide
#: the round trips of a network of up to 1 Gbit/s; docs/swarm.md has those for faster ones.
WIDTH = 2
#: Holdings are told to neighbours this long after the first that they don't know of has landed ...
ANNOUNCE_S = 0.05
#: ... or, where chunks come faster, after this part of what the latest took.
ANNOUNCE_PART = 0.5
#: A neighbour that was busy, and says nothing more, is asked again after this.
BUSY_S = 0.5
#: A chunk is late after this many times what one takes from the median neighbour ...
LATE_FACTOR = 4.0
#: ... and not before this.
LATE_S = 0.3
#: A neighbour that takes this many times as long as the median one is shunned.
SLOW_FACTOR = 4.0
#: A neighbour's pace counts after this many chunks.
SEEN = 2
#: Late chunks are hedged when no more than this many are missing.
END_CHUNKS = 4
#: How much of the past each chunk leaves in a neighbour's pace.
_KEPT = 0.7


class Held(Protocol):
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
    waited_for: bool = False  # it was told to say when it has room
    shunned: bool = False
    bad: int = 0  # chunks that failed; not asked for again while anything else can be
    whole: bool = False  # it holds everything, whatever it says to hold

    @property
    def cost(self) -> float:
        """What asking it costs others: whoever holds much can give much. Whoever has given nothing
        so far comes first."""
        return self.seconds * (1 + self.have.bit_count())


class Receiver:
    """One pull's part in a swarm. Not thread-safe; every method that returns commands returns
    them in order. Events of peers that are gone, or about what was not asked, are ignored."""

    def __init__(
        self, chunks: int, holdings: Held, *, width: int = WIDTH, free_s: float = FREE_S
    ) -> None:
        """
        Args:
            chunks: How many the model has.
            holdings: Knows which of them are verified here; `landed` follows each change.
            width: How many requests may be outstanding. Late ones, which may never be answered,
                don't count.
            free_s: When nothing has come for so long, chunks are read without a request.
        """
        self.width = width
        self._holdings = holdings
        self._all = (1 << chunks) - 1
        self._free = FreeReading(free_s)
        self._taken: set[tuple[int, int]] = set()  # (peer, chunk) that are read without asking
        self._wanted = self._all & ~holdings.bits  # neither held, requested nor suggested
        self._requests = 0  # outstanding, and not late
        self._late: set[tuple[int, int]] = set()  # (peer, chunk): the others that are outstanding
        self._peers: dict[int, _Peer] = {}
        self._requesters: dict[int, list[int]] = {}  # chunk asked for -> of whom
        self._suggestions: deque[tuple[int, int]] = (
            deque()
        )  # (peer, chunk), taken when there is room
        self._announced = holdings.bits  # peers learn of these when they join
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
        """Is it reading without asking?"""
        return self._free.on

    @property
    def peers(self) -> tuple[int, ...]:
        return tuple(self._peers)

    @property
    def can_be_given(self) -> bool:
        """Does any neighbour hold something that is missing here?"""
        return any(peer.have & ~self.held for peer in self._peers.values())

    def requested(self, chunk: int) -> tuple[int, ...]:
        """Who is being asked for the chunk: at most one, and another as a hedge."""
        return tuple(self._requesters.get(chunk, ()))

    # -- neighbours -----------------------------------------------------------------------------

    def joined(self, peer: int, have: int = 0, *, whole: bool = False) -> int:
        """A neighbour, which holds `have`; `plan` follows. Returns what it is to be told first:
        all that is held here. `whole`: it holds everything, though it may not say so."""
        if peer in self._peers:
            raise ValueError(f"peer {peer} is there already")
        self._peers[peer] = _Peer(have, whole=whole)
        return self.held

    def gone(self, peer: int, now_s: float) -> list[Command]:
        """The neighbour is dead: what it was asked for is asked of others."""
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
        """The neighbour holds these too."""
        state = self._peers.get(peer)
        if state is None:
            return []
        state.have |= chunks
        if self._requests < self.width and chunks & self._wanted:
            return self.plan(now_s)
        return []

    # -- answers --------------------------------------------------------------------------------

    def suggested(self, peer: int, chunk: int, now_s: float) -> list[Command]:
        """The origin keeps this chunk for us. It is asked for as soon as there is room."""
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

    def busy(self, peer: int, chunk: int, now_s: float) -> list[Command]:
        """The neighbour has no room for this ask, or takes back the slot that it has given. What
        is being read may come all the same."""
        state = self._peers.get(peer)
        if state is None or (peer, chunk) in self._taken:
            return []
        if state.requested.pop(chunk, None) is None:
            return []
        state.busy_until_s = now_s + BUSY_S
        self._release(peer, chunk)
        return self.plan(now_s)

    def unchoked(self, peer: int, now_s: float) -> list[Command]:
        """The neighbour that was busy has room: it waits for an ask or a pass."""
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
        """The read failed, or brought wrong bytes: this one is not asked for the chunk again,
        unless it announces it again, or nothing else can be asked for (`tick`)."""
        state = self._peers.get(peer)
        if state is None or state.requested.pop(chunk, None) is None:
            return []
        state.have &= ~(1 << chunk)
        state.bad |= 1 << chunk
        self._release(peer, chunk)
        return self.plan(now_s)

    def landed(self, peer: int, chunk: int, now_s: float) -> list[Command]:
        """The chunk is here, verified, from `peer` (any number that is no peer's: from elsewhere,
        such as a disk). Also right when the ask was given up meanwhile."""
        commands: list[Command] = []
        self._free.landed(now_s)
        for other in self._requesters.pop(chunk, ()):
            state = self._peers[other]
            if other == peer and state.whole and (other, chunk) not in self._taken:
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
        """What to tell whom, now that `announce_at_s` has come: (peer, chunks). A neighbour is
        not told of what it holds itself."""
        news, self.announce_at_s = self.held & ~self._announced, None
        self._announced |= news
        return [(n, tell) for n, peer in self._peers.items() if (tell := news & ~peer.have)]

    # -- who is asked for what ------------------------------------------------------------------

    def plan(self, now_s: float) -> list[Command]:
        """Ask for as much as there is room for."""
        commands: list[Command] = []
        self._wanted &= ~self.held  # `landed` may be on its way
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
        """Nobody can be asked now: hear of room at those that were busy."""
        commands: list[Command] = []
        for number, peer in self._peers.items():
            refused = peer.busy_until_s > now_s and not peer.requested
            if refused and not peer.waited_for and peer.have & self._wanted:
                peer.waited_for = True
                commands.append(Interested(number))
        return commands

    def _pick(self, now_s: float) -> tuple[int, int] | None:
        """The cheapest holder of the lowest wanted chunk that may be asked for, and it."""
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
        """What only shunned ones can give is asked of them, rather than of nobody."""
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
        """One that was asked will not bring the chunk."""
        self._ended(number, chunk)
        requesters = self._requesters[chunk]
        requesters.remove(number)
        if not requesters:
            del self._requesters[chunk]
            self._wanted |= (1 << chunk) & ~self.held

    def _ended(self, number: int, chunk: int) -> None:
        self._taken.discard((number, chunk))
        if (number, chunk) in self._late:
            self._late.remove((number, chunk))
        else:
            self._requests -= 1

    # -- late and slow --------------------------------------------------------------------------

    def tick(self, now_s: float) -> list[Command]:
        """Time has passed; to be called a few times a second."""
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
                commands += self._again(requesters[0], chunk, now_s)
        commands += self.plan(now_s)
        if not self._requests and self._wanted:
            for peer in self._peers.values():
                peer.have |= peer.bad
                peer.bad = 0
            commands += self.plan(now_s)
        return commands + self._read_freely(now_s, limit_s)

    def _again(self, late: int, chunk: int, now_s: float) -> list[Command]:
        """Ask another for a late chunk, if there is one; if not, for other chunks at least."""
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
        # What it took so far is its pace at best.
        state.seconds = max(state.seconds, now_s - state.requested.pop(chunk))
        state.seen = max(state.seen + 1, SEEN)
        self._release(late, chunk)
        return [Cancel(late, chunk), self._request(other, chunk, now_s)]

    # -- without asking -------------------------------------------------------------------------

    def _read_freely(self, now_s: float, limit_s: float) -> list[Command]:
        """Take one chunk after the other from a whole source, beside what is asked for."""
        whole = {n: p.whole for n, p in self._peers.items() if p.whole or p.have == self._all}
        if not (self._free.due(now_s) and whole and self.left and self.width):
            return []
        commands: list[Command] = []
        for number, chunk in list(self._taken):
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
        self._taken.add((source, chunk))
        return [*commands, ReadFreely(source, chunk)]

    def _give_up(self, number: int, chunk: int) -> Cancel:
        del self._peers[number].requested[chunk]
        self._release(number, chunk)
        return Cancel(number, chunk)
