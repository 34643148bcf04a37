"""The slots of a source: which readers read now, which ones wait for a slot, and which ones are
unchoked when a slot is free. Events in, answers out; no IO, and time is an argument. Readers are
numbers, see `mx.core.swarm.receiver`."""

from __future__ import annotations

import enum
import itertools
from collections import deque
from typing import NamedTuple

from mx.core.swarm.standing import Reader, Slot, Standing

#: Reads that a source serves at a time. Few, since one read at full speed and then the next bring
#: each chunk to a second holder sooner than both at half speed; but a single one leaves the link
#: idle from its end until the next request. A reader has as many requests outstanding: two hide the
#: round trips of a network of up to 1 Gbit/s; docs/swarm.md has those for faster ones.
WIDTH = 2
#: How many interested readers are unchoked at a time. Some have found another source by then.
UNCHOKE_BATCH = 6
#: An unchoked reader that does not answer for this long no longer keeps others waiting.
UNCHOKE_S = 1.0
#: The most slots that were taken back and whose end is still recorded.
_MOST_OVERDUE = 64


class Answer(enum.Enum):
    """The answer to a request for a chunk."""

    ALLOW = "allow"  # read now
    WAIT = "wait"  # an Allow will follow
    REJECT = "reject"  # request the chunk elsewhere, or say `interested`


class Allow(NamedTuple):
    """The reader may read the chunk now."""

    reader: int
    chunk: int


class Unchoke(NamedTuple):
    """Tell the interested reader that a slot is free: it sends a request or `not_interested`."""

    reader: int


class Reject(NamedTuple):
    """Tell the reader that its slot for this chunk was taken back."""

    reader: int
    chunk: int


class Slots:
    """The slots of one source, relay or origin.

    While others wait, a reader has a right to one slot, and one address leaves a slot to the
    others. Slots beyond that, and those of readers that come last (`mx.core.swarm.standing`), do
    not count when another reader requests one. So there may be more slots than `width` while some
    readers hold more than their share, but less than twice as many.
    """

    def __init__(self, *, width: int = WIDTH, standing: Standing | None = None) -> None:
        """
        Args:
            width: The number of reads at a time.
            standing: The records of the readers; by default new ones.
        """
        self._width = width
        self._standing = standing or Standing()
        self._reading: dict[tuple[int, int], Slot] = {}
        self._overdue: dict[tuple[int, int], Slot] = {}  # taken back
        self._waiting: deque[tuple[int, int]] = deque()  # requests for suggested chunks
        self._interested: dict[int, None] = {}  # in the order of arrival
        self._unchoked: dict[int, float] = {}  # without an answer so far: reader -> since when
        self._now_s = 0.0

    @property
    def reading(self) -> int:
        """The number of slots in use."""
        return len(self._reading)

    @property
    def idle(self) -> bool:
        """True if time alone changes nothing: `tick` has nothing to do until the next event."""
        return not (self._reading or self._waiting or self._unchoked) and self._standing.clean

    def request(self, reader: int, chunk: int, *, suggested: bool = False) -> Answer:
        """Answer a reader's request for a chunk.

        Args:
            reader: The reader.
            chunk: The chunk.
            suggested: The source has suggested the chunk: the request waits for a slot, and is not
                rejected, unless the reader comes last.
        """
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
        """Record that a rejected reader has no other source to request from.

        Args:
            reader: The reader. It will be unchoked when a slot is free.
            later: Unchoke it only after the next read has ended, even if a slot is free now.
        """
        self._unchoked.pop(reader, None)
        self._interested[reader] = None
        return [] if later else self.next()

    def done(self, reader: int, chunk: int, *, read: bool = True) -> list[Allow | Unchoke]:
        """Record that a read has ended, or that a request is cancelled.

        Unchoked readers that have not answered yet no longer keep others waiting.

        Args:
            reader: The reader.
            chunk: The chunk.
            read: True if the reader has the chunk.
        """
        self._unchoked.clear()
        self._end((reader, chunk), read=read)
        if (reader, chunk) in self._waiting:
            self._waiting.remove((reader, chunk))
        return self.next()

    def not_interested(self, reader: int) -> list[Allow | Unchoke]:
        """Record that an unchoked reader requests nothing."""
        self._unchoked.pop(reader, None)
        return self.next()

    def gone(self, reader: int) -> list[Allow | Unchoke]:
        """Remove a reader that has left or is lost."""
        for request in [a for a in (*self._reading, *self._overdue) if a[0] == reader]:
            self._end(request, read=False)
        self._waiting = deque(request for request in self._waiting if request[0] != reader)
        self._interested.pop(reader, None)
        self._unchoked.pop(reader, None)
        return self.next()

    def tick(self, now_s: float) -> list[Allow | Unchoke | Reject]:
        """Take back the slots of readers that do not read. Call this a few times a second."""
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
        """Give free slots to waiting requests, then unchoke some of the interested readers."""
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
        # By rank, and within a rank in the order of arrival.
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

    # -- the order of readers -------------------------------------------------------------------

    def _begin(self, request: tuple[int, int]) -> None:
        self._overdue.pop(request, None)
        self._reading[request] = self._standing.begun()

    def _end(self, request: tuple[int, int], *, read: bool) -> None:
        slot = self._reading.pop(request, None)
        if slot is None:
            slot = self._overdue.pop(request, None)
            if slot is None or not read:
                return  # the reader has been penalised already
        self._standing.ended(request[0], slot, read=read)

    def _may_have_slot(self, number: int) -> bool:
        """Return True if this reader may have a slot now."""
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
        """Return True if some reader might get a slot."""
        return len(self._reading) < self._width or self._counted(None) < self._width

    def _counted(self, address: str | None) -> int:
        """Return the number of slots that count against a request from this address; None: from an
        address that holds no slot."""
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
