"""A session that fills GPU memory through a session that fills host memory only.

Reads are cut into parts of one pinned slot each. The inner session reads a part into its slot. This
session's own thread queues the copies to the device, and behind a read's last one what hashes it
there (`mx.transport.DeviceHashing`); waits for them in order, calls the sinks, and gives the slots
to the next parts. It alone calls the driver.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mx.cuda.device import Device
from mx.cuda.errors import CudaError
from mx.cuda.ring import PinnedRing, RingSlot
from mx.errors import ClosedError, LocalError, MxError, NotAllowedError
from mx.transport import (
    DeviceHashing,
    DeviceView,
    Growing,
    Piece,
    Read,
    ReportedErrors,
    Session,
    Span,
    View,
    slices,
    spans_of,
)
from mx.units import MIB

#: Of a slot at most, and of all. Each slot takes three calls of the driver: larger ones take fewer.
SLOT_BYTES, RING_BYTES = 8 * MIB, 48 * MIB
MOST_SLOTS = 32


def slots_for(chunk_nbytes: int) -> tuple[int, int]:
    """Return how many slots reads of chunks need, and their size in bytes."""
    nbytes = min(SLOT_BYTES, chunk_nbytes)
    return min(RING_BYTES // nbytes, MOST_SLOTS), nbytes


@dataclass(slots=True, eq=False)
class SlotPart:
    """The part of a read that goes through one slot."""

    job: _StagedRead
    pieces: list[Piece] = field(default_factory=list)
    nbytes: int = 0  # of all pieces
    slot: RingSlot | None = None
    landed: bool = False  # it was copied to the device, as far as the driver reports


@dataclass(slots=True, eq=False)
class _StagedRead:
    """A read of the caller's, and its progress."""

    read: Read
    parts: list[SlotPart] = field(default_factory=list)
    running: int = 0  # parts whose read or copy has not ended yet
    copied: int = 0  # parts whose copies were queued
    reported: int = 0  # parts that the sink's `landed` was called with
    reported_nbytes: int = 0
    error: MxError | None = None
    ended: bool = False


class StagedSession:
    """See `mx.transport.Session`."""

    _make_ring: Callable[..., PinnedRing] = PinnedRing

    def __init__(
        self,
        inner: Session,
        device: Device,
        *,
        slot_nbytes: int = SLOT_BYTES,
        slots: int = RING_BYTES // SLOT_BYTES,
    ) -> None:
        """
        Args:
            inner: The session to read through, which this one owns.
            device: The GPU. The caller keeps it open until `join` has returned.
            slot_nbytes: The size of a slot of pinned memory.
            slots: How many slots there are.

        Raises:
            CudaMemoryError: The memory can't be pinned.
        """
        self._inner = inner
        self._device = device
        self._ring = self._make_ring(device, slot_nbytes=slot_nbytes, slots=slots)
        self.depth = inner.depth
        if not isinstance(inner, Growing):  # else the ring grows, too
            inner.adopt(self._ring.view)
        self._wake = threading.Condition()
        self._waiting: deque[SlotPart] = deque()
        self._read_parts: deque[SlotPart] = deque()
        self._copying: deque[SlotPart] = deque()  # the thread's alone
        self._jobs: set[_StagedRead] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._main, name="mx-staged", daemon=True)
        self._thread.start()

    # -- mx.transport.Session ----------------------------------------------------------------------

    def adopt(self, arena: Span) -> None:
        """Do nothing: the inner session reads into the ring only, which it has adopted."""
        del arena

    def read(self, reads: Sequence[Read]) -> None:
        jobs = [self._job(read) for read in reads]
        with self._wake:
            if self._closed:
                raise ClosedError("the session is closed")
            for job in jobs:
                self._jobs.add(job)
                self._waiting.extend(job.parts)
            self._wake.notify()

    def attach(self, region: int) -> Span:
        raise NotAllowedError(f"region {region} is host memory, which a GPU can't attach")

    def close(self) -> None:
        with self._wake:
            if self._closed:
                return
            self._closed = True
            self._wake.notify()
        self._inner.close()

    def join(self, timeout_s: float | None = None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._inner.join(timeout_s):
            return False
        self._thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    # -- cutting -----------------------------------------------------------------------------------

    def _job(self, read: Read) -> _StagedRead:
        job, key = _StagedRead(read), self._device.key
        spans = [span for piece in read.pieces for span in spans_of(piece.view)]
        if all(isinstance(span, DeviceView) and span.device == key for span in spans):
            for pieces, nbytes in self._cut(read):
                job.parts.append(SlotPart(job, pieces, nbytes))
        else:
            job.error = LocalError(f"{read.tag}: its place is not on {key}")
        job.parts = job.parts or [SlotPart(job)]  # the end of one part ends the read
        return job

    def _cut(self, read: Read) -> Iterator[tuple[list[Piece], int]]:
        """Yield the pieces of a read that go through one slot, and their bytes."""
        return slices(read, self._ring.slot_nbytes)

    # -- from the inner session's threads ----------------------------------------------------------

    def part_read(self, part: SlotPart, error: MxError | None) -> None:
        """Take a part that is in its slot; with `error`, its read failed."""
        if error is not None:
            # Its traceback refers to the reads, and they to the device's memory.
            error = error.with_traceback(None)
        with self._wake:
            part.job.error = part.job.error or error
            self._read_parts.append(part)
            self._wake.notify()

    # -- the session's thread ----------------------------------------------------------------------

    def _main(self) -> None:
        try:
            # Once: to make a context current for each call takes four calls more. Where it is gone,
            # each call says so.
            with contextlib.suppress(CudaError), contextlib.ExitStack() as ends:
                with contextlib.suppress(CudaError):
                    ends.enter_context(self._device.current())
                self._work()
        finally:
            self._ring.close()

    def _widen(self) -> None:
        """Get more slots, if more of them can be filled at a time."""

    def _work(self) -> None:
        while True:
            self._widen()
            with self._wake:
                while not self._read_parts and not self._copying and not self._can_issue():
                    if self._over():
                        return
                    self._wake.wait()
                part = self._read_parts.popleft() if self._read_parts else None
            if part is not None:
                self._copy(part)
            elif self._can_issue():
                self._issue()
            else:
                self._finish(self._copying.popleft())

    def _over(self) -> bool:
        return self._closed and not self._jobs

    def _can_issue(self) -> bool:
        return bool(self._waiting) and (self._ring.free > 0 or self._skips(self._waiting[0]))

    def _skips(self, part: SlotPart) -> bool:
        """Return True if the part is not read any more."""
        return self._closed or part.job.error is not None

    def _issue(self) -> None:
        """Read the next parts, as many as there are slots for."""
        reads: list[tuple[SlotPart, RingSlot]] = []
        skipped: list[tuple[SlotPart, MxError]] = []
        with self._wake:
            while self._can_issue():
                part = self._waiting.popleft()
                part.job.running += 1
                if self._skips(part):
                    error = ClosedError(f"{part.job.read.tag}: the session was closed")
                    skipped.append((part, error))
                    continue
                try:
                    part.slot = self._ring.take()
                except MxError as lost:  # the slot's last copy has failed, with the GPU
                    skipped.append((part, lost))
                else:
                    reads.append((part, part.slot))
        for part, reason in skipped:
            self.part_read(part, reason)
        if not reads:
            return
        try:
            self._inner.read([self._read(part, slot) for part, slot in reads])
        except MxError as error:
            for part, _ in reads:
                self.part_read(part, error)

    def _read(self, part: SlotPart, slot: RingSlot) -> Read:
        return Read(part.job.read.tag, self._pieces(part, slot.view), _SlotSink(self, part))

    def _pieces(self, part: SlotPart, slot: View) -> list[Piece]:
        """Return what the inner session reads into a slot."""
        pieces, at = [], 0
        for piece in part.pieces:
            view = slot[at : at + len(piece.view)]
            pieces.append(Piece(piece.region, piece.region_offset, view))
            at += len(view)
        return pieces

    def _copy(self, part: SlotPart) -> None:
        """Queue the copies of a part that is in its slot, and behind the last of a read what its
        sink queues."""
        job, slot = part.job, part.slot
        if slot is not None and job.error is None:
            try:
                self._ring.push_all(slot, self._places(part))
                job.copied += 1
                if job.copied == len(job.parts) and isinstance(job.read.sink, DeviceHashing):
                    job.read.sink.queued(self._ring.up)
            except MxError as error:
                job.error = error.with_traceback(None)
            try:
                self._ring.mark(slot)
            except MxError as error:
                job.error = job.error or error.with_traceback(None)
        self._copying.append(part)

    def _places(self, part: SlotPart) -> Iterator[tuple[int, int, int]]:
        """Yield (device address, offset in the slot, bytes) of what is copied as one."""
        start = end = 0
        target = -1
        for span in (span for piece in part.pieces for span in spans_of(piece.view)):
            assert isinstance(span, DeviceView)
            if span.address != target + (end - start):
                if end > start:
                    yield target, start, end - start
                start, target = end, span.address
            end += len(span)
        if end > start:
            yield target, start, end - start

    def _finish(self, part: SlotPart) -> None:
        """Finish the part whose copies were queued first: wait for them, free its slot, call the
        sink."""
        job, slot = part.job, part.slot
        if slot is not None:
            part.slot = None
            try:
                slot.wait()
            except MxError as error:
                job.error = job.error or error.with_traceback(None)
            finally:
                self._ring.give(slot)
        part.landed = job.error is None
        with self._wake:
            job.running -= 1
            over = not job.running and (
                job.error is not None or all(part.landed for part in job.parts)
            )
            if over:
                self._jobs.discard(job)
                # Drop the parts that were never issued.
                self._waiting = deque(p for p in self._waiting if p.job is not job)
        before = job.reported_nbytes
        while job.error is None and job.reported < len(job.parts):
            if not job.parts[job.reported].landed:
                break
            job.reported_nbytes += job.parts[job.reported].nbytes
            job.reported += 1
        if over:
            job.parts.clear()  # a reference cycle: parts refer to the job
        sink = job.read.sink
        if job.reported_nbytes > before and not _returns(sink.landed, job.reported_nbytes):
            # As the contract says, it costs the connection, and this session has one.
            job.error = job.error or LocalError(f"{job.read.tag}: its sink raised")
            self.close()
        if over and job.error is not None:
            _returns(sink.failed, job.error)
        elif over:
            _returns(sink.done)


class _Inner(Session, Growing, Protocol):
    """The session that one reads through."""


class GrowingStagedSession(StagedSession):
    """One through a session that opens more connections (`mx.transport.Growing`): there are more
    slots then, two for each connection."""

    _inner: _Inner
    _most_slots = MOST_SLOTS

    @property
    def open_streams(self) -> int:
        """See `mx.transport.Growing`."""
        return self._inner.open_streams

    def grow(self, streams: int) -> None:
        """See `mx.transport.Growing`."""
        self._inner.grow(streams)

    def _widen(self) -> None:
        self.depth = self._inner.depth
        more = min(self._most_slots, self.depth) - self._ring.slots
        if more > 0 and self._waiting and not self._ring.free:
            try:
                self._ring.extend(more)
            except MxError:  # what there is has to do
                self._most_slots = self._ring.slots


def _returns(call: Callable[..., None], *arguments: object) -> bool:
    """Call it. Returns False if it raised, which is reported."""
    with ReportedErrors():
        call(*arguments)
        return True
    return False


class _SlotSink:
    """The sink of one part's read. At its end it drops the part: the inner session may keep the
    sink for a while, by an error's traceback, and must not keep the device's memory with it."""

    __slots__ = ("_part", "_session")

    def __init__(self, session: StagedSession, part: SlotPart) -> None:
        self._session = session
        self._part: SlotPart | None = part

    def landed(self, nbytes: int) -> None:
        """Do nothing: a part is small, and is copied to the device as a whole."""

    def done(self) -> None:
        self._end(None)

    def failed(self, error: MxError) -> None:
        self._end(error)

    def _end(self, error: MxError | None) -> None:
        part, self._part = self._part, None
        if part is not None:
            self._session.part_read(part, error)
