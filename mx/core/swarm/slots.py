"""The slots of a source: who reads from it now, who waits, who is told of room. Events in, answers
out; no IO, and time is an argument. Readers are numbers, see `mx.core.swarm.receiver`."""

from __future__ import annotations

import enum
import itertools
from collections import deque
from typing import NamedTuple

from mx.core.swarm.standing import Reader, Slot, Standing

#: Reads that a source serves at a time. Few, since one at full speed and then the next has each
#: chunk at another holder sooner than both at half speed; but one alone leaves the link idle from
#: its end until the next has asked.
WIDTH = 2
#: How many of those that want to hear of room are told at a time. Some have found another by
#: then.
UNCHOKE_BATCH = 6
#: A reader that is told and does not answer for so long keeps the others waiting no longer.
UNCHOKE_S = 1.0
#: Slots that were taken back, of which the end is still of interest.
_MOST_OVERDUE = 64


class Answer(enum.Enum):
    ALLOW = "allow"  # read now
    WAIT = "wait"  # Go will follow
    REJECT = "reject"  # ask elsewhere, or want to hear of room


class Allow(NamedTuple):
    """The reader may read the chunk now."""

    reader: int
    chunk: int


class Unchoke(NamedTuple):
    """Tell the reader, which wanted to hear of it, that it may ask: it asks, or passes."""

    reader: int


class Reject(NamedTuple):
    """Tell the reader that it has the slot for this chunk no more."""

    reader: int
    chunk: int


class Slots:
    """Who reads now, who waits, who wants to. Used by every source, relay or origin.

    While others wait a reader has one slot, and one address leaves a slot to the others: what a
    reader or an address holds beyond that, and the slots of readers that come last
    (`mx.core.swarm.standing`), count for nothing when another asks. So there may be more slots
    than `width` for as long as some hold more than their share, though less than twice as many.
    """

    def __init__(self, *, width: int = WIDTH, standing: Standing | None = None) -> None:
        """`width`: how many read at a time."""
        self._width = width
        self._standing = standing or Standing()
        self._reading: dict[tuple[int, int], Slot] = {}
        self._overdue: dict[tuple[int, int], Slot] = {}  # taken back
        self._waiting: deque[tuple[int, int]] = deque()  # promised
        self._interested: dict[int, None] = {}  # in the order of their coming
        self._unchoked: dict[int, float] = {}  # that there is room, without an answer so far; when
        self._now_s = 0.0

    @property
    def reading(self) -> int:
        return len(self._reading)

    def request(self, reader: int, chunk: int, *, suggested: bool = False) -> Answer:
        """`promised`: the source has offered the chunk, and does not refuse it now."""
        self._unchoked.pop(reader, None)
        request = reader, chunk
        if request in self._reading:
            return Answer.ALLOW
        if request in self._waiting:
            return Answer.WAIT
        if self._may_have_slot(reader):
            self._begin(request)
            return Answer.ALLOW
        if suggested and not self._standing.last(reader):
            self._waiting.append(request)
            return Answer.WAIT
        return Answer.REJECT

    def interested(self, reader: int, *, later: bool = False) -> list[Allow | Unchoke]:
        """The reader was refused, finds nobody else to ask, and is to be told when there is room.
        `later`: not before the next read has ended, whatever room there is."""
        self._unchoked.pop(reader, None)
        self._interested[reader] = None
        return [] if later else self.next()

    def done(self, reader: int, chunk: int, *, read: bool = True) -> list[Allow | Unchoke]:
        """The read has ended, well or not (`read`), or is not wanted any more. Those that were
        told of room before, and did not answer, hold up nobody."""
        self._unchoked.clear()
        self._end((reader, chunk), read=read)
        if (reader, chunk) in self._waiting:
            self._waiting.remove((reader, chunk))
        return self.next()

    def not_interested(self, reader: int) -> list[Allow | Unchoke]:
        """The reader was told of room and wants nothing."""
        self._unchoked.pop(reader, None)
        return self.next()

    def gone(self, reader: int) -> list[Allow | Unchoke]:
        """The reader is dead, or has left."""
        for request in [a for a in (*self._reading, *self._overdue) if a[0] == reader]:
            self._end(request, read=False)
        self._waiting = deque(request for request in self._waiting if request[0] != reader)
        self._interested.pop(reader, None)
        self._unchoked.pop(reader, None)
        return self.next()

    def tick(self, now_s: float) -> list[Allow | Unchoke | Reject]:
        """Time has passed: take back the slots of those that do not read. A few times a second."""
        self._now_s = now_s
        self._standing.tick(now_s)
        answers: list[Allow | Unchoke | Reject] = []
        for request, slot in list(self._reading.items()):
            if self._standing.overdue(request[0], slot):
                self._overdue[request] = self._reading.pop(request)
                self._standing.took_back(request[0])
                answers.append(Reject(*request))
        while len(self._overdue) > _MOST_OVERDUE:
            del self._overdue[next(iter(self._overdue))]
        for reader in [
            n for n, unchoked_s in self._unchoked.items() if now_s - unchoked_s > UNCHOKE_S
        ]:
            del self._unchoked[reader]
        return answers + self.next()

    def next(self) -> list[Allow | Unchoke]:
        """Let in who waits, then tell some of those that want to hear of room."""
        answers: list[Allow | Unchoke] = []
        while self._waiting and self._spare():
            request = next(
                (request for request in self._waiting if self._may_have_slot(request[0])), None
            )
            if request is None:
                break
            self._waiting.remove(request)
            self._begin(request)
            answers.append(Allow(*request))
        if not self._interested or not self._spare():
            return answers
        # Those that come first, in the order of their coming.
        interested = list(self._interested)
        if not self._standing.clean:
            interested.sort(key=self._standing.rank)
        for reader in interested:
            if len(self._unchoked) >= UNCHOKE_BATCH:
                break
            if self._may_have_slot(reader):
                del self._interested[reader]
                self._unchoked[reader] = self._now_s
                answers.append(Unchoke(reader))
        return answers

    # -- whose turn it is -----------------------------------------------------------------------

    def _begin(self, request: tuple[int, int]) -> None:
        self._overdue.pop(request, None)
        self._reading[request] = self._standing.begun()

    def _end(self, request: tuple[int, int], *, read: bool) -> None:
        slot = self._reading.pop(request, None)
        if slot is None:
            slot = self._overdue.pop(request, None)
            if slot is None or not read:
                return  # what it was to be blamed for it was
        self._standing.ended(request[0], slot, read=read)

    def _may_have_slot(self, number: int) -> bool:
        """May this reader have a slot now?"""
        standing, me = self._standing, self._standing.reader(number)
        contested = any(
            standing.reader(other) != me and not standing.last(other)
            for other in itertools.chain(
                self._interested, self._unchoked, (reader for reader, _ in self._waiting)
            )
        )
        if not contested and len(self._reading) < self._width:
            return True
        if standing.last(number):
            return False
        holders = [holder for holder, _ in self._reading]
        if any(standing.reader(holder) == me for holder in holders):
            return False
        if contested and standing.unproven(number):
            there = [h for h in holders if standing.reader(h).address == me.address]
            if any(standing.unproven(holder) for holder in there):
                return False
        return self._counted(me.address) < self._width

    def _spare(self) -> bool:
        """Might there be room for anybody?"""
        return len(self._reading) < self._width or self._counted(None) < self._width

    def _counted(self, address: str | None) -> int:
        """The slots that count when a reader of this address asks, or one of a new address."""
        held: dict[str, set[Reader]] = {}
        for number, _ in self._reading:
            if not self._standing.last(number):
                reader = self._standing.reader(number)
                held.setdefault(reader.address, set()).add(reader)
        most = max(1, self._width - 1)
        return sum(
            len(readers) if where == address else min(len(readers), most)
            for where, readers in held.items()
        )
