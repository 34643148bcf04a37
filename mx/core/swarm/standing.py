"""The records of how readers use the slots of a source. They decide when a slot is taken back, and
in which order readers get slots. Events in, answers out; no IO, and time is an argument.

A slot that brings nothing is taken back, and its reader comes after all others for a time that
doubles each time. A reader that has read a whole chunk since then is *proven* and has a clean
record again. Reader ids can be made up freely, addresses cannot: the unproven readers of an
address share a record too, so that a new id does not make a new reader. Others at the same
address, such as behind the same NAT, cannot harm a proven reader.

All this only orders readers: one that comes last still gets a slot that no other reader waits for.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from mx.units import KIB

#: A slot is taken back if its reader is sent nothing for this long. If the reader fetches for
#: itself, unseen by the source, its slot is not taken back before this time has passed.
WINDOW_S = 3.0
#: The least bytes per second that a reader that is sent to has to take of a chunk ...
LEAST_BYTES_PER_S = 64 * KIB
#: ... are at least as many as complete the chunk within this time, ...
LONGEST_S = 60.0
#: ... and at least this part of the rate of the median slot of late.
SLOW_PART = 1 / 16
#: A reader that fetches for itself has `WINDOW_S` and the time that its chunk takes at this rate,
#: or this many times the time that such slots took of late.
FETCH_BYTES_PER_S = 1e6
FETCH_FACTOR = 4.0
#: A reader that has taken this many times a chunk's bytes without reporting the chunk reads
#: something else.
MOST_READ = 4
#: A slot that ends after this long without a byte counts as taken back.
IDLE_S = 1.0
#: A reader comes after all others for this long, twice as long the next time, up to the maximum.
BACKOFF_S = 2.0
BACKOFF_MOST_S = 64.0
#: A reader that has lost this many slots in a row is banned until its backoff is over.
MOST_TAKEN_BACK = 3
#: How long the records of readers that have left are kept after the last slot taken back ...
FORGET_S = 300.0
#: ... and the most records that are kept.
MOST_RECORDS = 4096
_SAMPLES = 15


class Reader(NamedTuple):
    """A reader: the address that its stream comes from, and the id that it gives itself."""

    address: str
    name: str


#: Returns the bytes that a reader has been sent so far; None if it fetches for itself.
Progress = Callable[[Reader], int | None]


@dataclass(slots=True)
class Slot:
    """One read of a chunk. The byte counts are totals of its reader."""

    started_s: float  # at the first `tick` after the start
    nbytes: int | None  # at the start
    marked_s: float  # when the current window began
    marked_nbytes: int


@dataclass(slots=True)
class _Record:
    """The record of one reader, or of all unproven readers at one address."""

    taken_back: int = 0
    last_until_s: float = 0.0  # until then it comes after all others
    proven: bool = False
    from_nbytes: int = 0  # the bytes it had been sent when its last slot was taken back
    at_s: float = 0.0  # when its last slot was taken back, or when it was proven


@dataclass(slots=True)
class _SlotPace:
    """The pace of recent slots, in seconds per byte."""

    latest: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))

    def usual(self) -> float:
        """Return the median pace, or 0 without a sample."""
        return statistics.median_low(self.latest) if self.latest else 0.0


class Standing:
    """The readers of one source, and their records."""

    def __init__(self, chunk_nbytes: int = 0, progress: Progress | None = None) -> None:
        """
        Args:
            chunk_nbytes: The size of a chunk, which one slot serves.
            progress: By default every reader fetches for itself, unseen.
        """
        self._chunk_nbytes = chunk_nbytes
        self._progress: Progress = progress or (lambda reader: None)
        self._readers: dict[int, Reader] = {}
        self._records: dict[Reader | str, _Record] = {}
        self._sent, self._fetched = _SlotPace(), _SlotPace()
        self._now_s = 0.0

    @property
    def clean(self) -> bool:
        """True if no slot was taken back of late: then all readers have the same rank."""
        return not self._records

    def joined(self, number: int, reader: Reader) -> None:
        """Record which reader a number stands for. Other numbers are readers of their own."""
        self._readers[number] = reader

    def gone(self, number: int) -> None:
        """Forget a number. The record stays: the reader may return, under this id or another."""
        self._readers.pop(number, None)

    def reader(self, number: int) -> Reader:
        """Return the reader that a number stands for."""
        return self._readers.get(number) or Reader(f"#{number}", "")

    # -- slots ----------------------------------------------------------------------------------

    def begun(self) -> Slot:
        """Return a new slot, given now."""
        return Slot(self._now_s, None, self._now_s, -1)

    def overdue(self, number: int, slot: Slot) -> bool:
        """Return True if the slot is to be taken back. Call this once after each `tick`."""
        now_s, nbytes = self._now_s, self._progress(self.reader(number))
        seen_now = slot.nbytes is None and nbytes is not None  # it fetched for itself until now
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
        """Record that a slot has ended, by itself or after it was taken back.

        Args:
            number: The reader.
            slot: The slot.
            read: The reader reports that it has the chunk.
        """
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
        """Record that a slot of this reader brought nothing."""
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
        """Record that this reader has read a chunk, which clears its record."""
        if self._records:
            self._records[self.reader(number)] = _Record(proven=True, at_s=self._now_s)
            self._bound()

    def _bound(self) -> None:
        while len(self._records) > MOST_RECORDS:
            del self._records[min(self._records, key=lambda key: self._records[key].at_s)]

    def banned(self, reader: Reader) -> bool:
        """Return True if the reader has lost too many slots, and its backoff is not over."""
        record = self._records.get(reader)
        return (
            record is not None
            and record.taken_back >= MOST_TAKEN_BACK
            and record.last_until_s > self._now_s
        )

    def last(self, number: int) -> bool:
        """Return True if the reader comes after all others now."""
        return bool(self._records) and self.comes_last(self.reader(number))

    def comes_last(self, reader: Reader) -> bool:
        """Return True if a reader with this id and address comes after all others now."""
        record = self._records.get(reader)
        if record is not None and (record.proven or record.last_until_s > self._now_s):
            return not record.proven
        there = self._records.get(reader.address)
        return there is not None and there.last_until_s > self._now_s

    def rank(self, number: int) -> tuple[bool, bool, int]:
        """Return the sort key of a reader: lower ones get slots first."""
        if not self._records:
            return (False, False, 0)
        reader = self.reader(number)
        record, there = self._records.get(reader), self._records.get(reader.address)
        proven = record is not None and record.proven
        count = 0 if proven or there is None else there.taken_back
        return (self.last(number), not proven, count)

    def unproven(self, number: int) -> bool:
        """Return True if its address has a record that the reader shares, since it is unproven."""
        reader = self.reader(number)
        record = self._records.get(reader)
        return reader.address in self._records and not (record is not None and record.proven)

    def tick(self, now_s: float) -> None:
        """Advance the clock: records end, and readers that took a chunk's bytes are proven.

        Call this a few times a second, before `overdue`.
        """
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
