"""How the readers of a source use the slots that it gives them: until when a slot is held, and who
comes after whom. Events in, answers out; no IO, and time is an argument.

A slot that brings nothing is taken back, and its reader comes after all others for a while that
doubles each time. A reader that has read a whole chunk since then is *proven* and has a clean
record again. Reader ids can be made up freely, addresses cannot: the readers of an address that
are not proven share a record too, so that a new id does not make a new reader. A proven reader
has nothing to fear from others at its address, such as behind the same NAT.

All this orders readers: one that comes last still gets a slot that no other waits for.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from mx.units import KIB

#: A slot whose reader is sent nothing for this long is taken back; one whose reader fetches for
#: itself, where the source does not see it, at the soonest after this.
WINDOW_S = 3.0
#: What a reader that is sent to has to take of a chunk, per second: this at least, ...
LEAST_BYTES_PER_S = 64 * KIB
#: ... as much as brings the chunk within so long, ...
LONGEST_S = 60.0
#: ... and this part of what the median slot of late did.
SLOW_PART = 1 / 16
#: A reader that fetches for itself has the time that its chunk takes at this rate beside
#: `WINDOW_S`, or this many times what such slots took of late.
FETCH_BYTES_PER_S = 1e6
FETCH_FACTOR = 4.0
#: A reader that has taken so many times a chunk's bytes, and does not say that it has the chunk,
#: reads something else.
MOST_READ = 4
#: A slot that ends after this long without a byte counts as one that was taken back.
IDLE_S = 1.0
#: A reader comes after all others for so long, twice that the next time, up to the latter.
BACKOFF_S = 2.0
BACKOFF_MOST_S = 64.0
#: A reader that has lost so many slots one after the other is left for that long.
MOST_TAKEN_BACK = 3
#: Records of readers that have left are kept so long after the last slot that was taken back, ...
FORGET_S = 300.0
#: ... and no more of them than this.
MOST_RECORDS = 4096
_SAMPLES = 15


class Reader(NamedTuple):
    """Who reads: the address that its stream comes from, and the id that it gives itself."""

    address: str
    name: str


#: The bytes that a reader has been sent so far; None: it fetches for itself.
Progress = Callable[[Reader], int | None]


@dataclass(slots=True)
class Slot:
    """One read of a chunk. Times are those of the first `tick` since."""

    started_s: float
    nbytes: int | None  # of its reader at the start
    marked_s: float  # the window began then
    marked_nbytes: int


@dataclass(slots=True)
class _Record:
    """Of a reader, or of all at an address that are not proven."""

    taken_back: int = 0
    last_until_s: float = 0.0  # until then it comes after all others
    proven: bool = False
    from_nbytes: int = 0  # what it had been sent when it began to have to prove itself
    at_s: float = 0.0  # of the last slot that was taken back


@dataclass(slots=True)
class _Pace:
    """What slots took of late, in seconds per byte."""

    latest: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))

    def usual(self) -> float:
        return statistics.median_low(self.latest) if self.latest else 0.0


class Standing:
    """One source's readers. `chunk_nbytes` is what a slot is given for."""

    def __init__(self, chunk_nbytes: int = 0, progress: Progress | None = None) -> None:
        """Without `progress` no reader's bytes are seen."""
        self._chunk_nbytes = chunk_nbytes
        self._progress: Progress = progress or (lambda reader: None)
        self._readers: dict[int, Reader] = {}
        self._records: dict[Reader | str, _Record] = {}
        self._sent, self._fetched = _Pace(), _Pace()
        self._now_s = 0.0

    @property
    def clean(self) -> bool:
        """Was no slot taken back of late? Then all readers are alike."""
        return not self._records

    def joined(self, number: int, reader: Reader) -> None:
        """From now on this is who the number stands for; else it is a reader of its own."""
        self._readers[number] = reader

    def gone(self, number: int) -> None:
        """The record stays: a reader may come back under the same id, or another."""
        self._readers.pop(number, None)

    def reader(self, number: int) -> Reader:
        return self._readers.get(number) or Reader(f"#{number}", "")

    # -- slots ----------------------------------------------------------------------------------

    def begun(self) -> Slot:
        """A slot that was given since the last tick."""
        return Slot(self._now_s, None, self._now_s, -1)

    def overdue(self, number: int, slot: Slot) -> bool:
        """Is the slot to be taken back? Call it at each tick, after `tick`."""
        now_s, nbytes = self._now_s, self._progress(self.reader(number))
        seen_now = slot.nbytes is None and nbytes is not None  # until now it fetched for itself
        if slot.marked_nbytes < 0 or seen_now:  # its first tick
            slot.started_s = slot.marked_s = now_s
            slot.nbytes, slot.marked_nbytes = nbytes, nbytes or 0
            return False
        held_s = now_s - slot.started_s
        if nbytes is None:
            usual_s = self._fetched.usual() * self._chunk_nbytes
            limit_s = WINDOW_S + self._chunk_nbytes / FETCH_BYTES_PER_S
            return held_s > max(limit_s, min(FETCH_FACTOR * usual_s, LONGEST_S))
        if nbytes - (slot.nbytes or 0) > MOST_READ * self._chunk_nbytes:
            return True
        window_s = now_s - slot.marked_s
        if window_s < WINDOW_S:
            return False
        if nbytes - slot.marked_nbytes < window_s * self._least_bytes_per_s():
            return True
        slot.marked_s, slot.marked_nbytes = now_s, nbytes
        return False

    def _least_bytes_per_s(self) -> float:
        least = max(LEAST_BYTES_PER_S, self._chunk_nbytes / LONGEST_S)
        usual = self._sent.usual()
        return max(least, SLOW_PART / usual) if usual else least

    def ended(self, number: int, slot: Slot, *, read: bool) -> None:
        """A slot has ended, of itself or long after it was taken back. `read`: its reader says
        that it has the chunk."""
        held_s, nbytes = self._now_s - slot.started_s, self._progress(self.reader(number))
        if nbytes is None:
            if read:
                self._fetched.latest.append(held_s / max(1, self._chunk_nbytes))
                self.prove(number)
            return
        moved = nbytes - (slot.nbytes or 0)
        if read and moved >= self._chunk_nbytes:
            if held_s:
                self._sent.latest.append(held_s / moved)
            self.prove(number)
        elif moved <= 0 and held_s > IDLE_S:
            self.took_back(number)

    # -- records --------------------------------------------------------------------------------

    def took_back(self, number: int) -> None:
        """A slot of this reader brought nothing."""
        reader = self.reader(number)
        proven = (known := self._records.get(reader)) is not None and known.proven
        for key in (reader,) if proven else (reader, reader.address):
            record = self._records.setdefault(key, _Record())
            backoff_s = min(BACKOFF_S * 2 ** min(record.taken_back, 16), BACKOFF_MOST_S)
            record.taken_back += 1
            record.last_until_s = self._now_s + backoff_s
            record.at_s = self._now_s
            record.proven = False
        self._records[reader].from_nbytes = self._progress(self.reader(number)) or 0
        self._bound()

    def prove(self, number: int) -> None:
        """This reader has read a chunk: what was is forgiven."""
        if self._records:
            self._records[self.reader(number)] = _Record(proven=True, at_s=self._now_s)
            self._bound()

    def _bound(self) -> None:
        while len(self._records) > MOST_RECORDS:
            del self._records[min(self._records, key=lambda key: self._records[key].at_s)]

    def banned(self, reader: Reader) -> bool:
        """Has it lost so many slots that there is no use in it, of late?"""
        record = self._records.get(reader)
        return (
            record is not None
            and record.taken_back >= MOST_TAKEN_BACK
            and record.last_until_s > self._now_s
        )

    def last(self, number: int) -> bool:
        """Does it come after all others now?"""
        return bool(self._records) and self.waits(self.reader(number))

    def waits(self, reader: Reader) -> bool:
        """Does one that goes by this id and address come after all others now?"""
        record = self._records.get(reader)
        if record is not None and (record.proven or record.last_until_s > self._now_s):
            return not record.proven
        there = self._records.get(reader.address)
        return there is not None and there.last_until_s > self._now_s

    def rank(self, number: int) -> tuple[bool, bool, int]:
        """The lesser one comes first."""
        if not self._records:
            return (False, False, 0)
        reader = self.reader(number)
        record, there = self._records.get(reader), self._records.get(reader.address)
        proven = record is not None and record.proven
        count = 0 if proven or there is None else there.taken_back
        return (self.last(number), not proven, count)

    def unproven(self, number: int) -> bool:
        """Is it one of those that share their address's record, which is a bad one?"""
        reader = self.reader(number)
        record = self._records.get(reader)
        return reader.address in self._records and not (record is not None and record.proven)

    def tick(self, now_s: float) -> None:
        """Time has passed. Call it a few times a second, before `overdue`."""
        self._now_s = now_s
        if not self._records:
            return
        here = set(self._readers.values())
        for key in [k for k, r in self._records.items() if now_s - r.at_s > FORGET_S]:
            if not self._records[key].proven or key not in here:
                del self._records[key]
        if all(record.proven for record in self._records.values()):
            self._records.clear()
        for number, reader in self._readers.items() if self._records else ():
            record = self._records.get(reader)
            if record is not None and record.proven:
                continue
            nbytes = self._progress(self.reader(number))
            begun = 0 if record is None else record.from_nbytes
            if nbytes is not None and nbytes - begun >= max(1, self._chunk_nbytes):
                self.prove(number)
