"""A session that fills GPU memory through a session that fills host memory only.

Reads are cut into parts of one pinned slot each. The inner session reads a part into its slot. The
thread that brought the last byte queues the copy to the device, and has the sink hash the slot
meanwhile (`mx.transport.HostHashing`). This session's own thread waits for the copies in order,
calls the sinks, and gives the slots to the next parts.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from mx.cuda.device import Device
from mx.cuda.ring import SLOT_BYTES, SLOTS, PinnedRing, RingSlot
from mx.errors import ClosedError, LocalError, MxError, NotAllowedError
from mx.transport import (
    DeviceView,
    HostHashing,
    Piece,
    Read,
    ReportedErrors,
    Session,
    Span,
    slices,
    spans_of,
)


@dataclass(slots=True, eq=False)
class _SlotPart:
    """The part of a read that goes through one slot."""

    job: _StagedRead
    begin: int = 0  # among the read's bytes
    pieces: list[Piece] = field(default_factory=list)
    nbytes: int = 0  # of all pieces
    slot: RingSlot | None = None
    landed: bool = False  # it was copied to the device, as far as the driver reports


@dataclass(slots=True, eq=False)
class _StagedRead:
    """A read of the caller's, and its progress."""

    read: Read
    parts: list[_SlotPart] = field(default_factory=list)
    running: int = 0  # parts whose read or copy has not ended yet
    reported: int = 0  # parts that the sink's `landed` was called with
    reported_nbytes: int = 0
    error: MxError | None = None
    ended: bool = False


class StagedSession:
    """See `mx.transport.Session`."""

    def __init__(
        self,
        inner: Session,
        device: Device,
        *,
        slot_nbytes: int = SLOT_BYTES,
        slots: int = SLOTS,
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
        self._ring = PinnedRing(device, slot_nbytes=slot_nbytes, slots=slots)
        self.depth = inner.depth
        inner.adopt(self._ring.view)
        self._wake = threading.Condition()
        self._waiting: deque[_SlotPart] = deque()
        self._ended: deque[_SlotPart] = deque()
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
            begin, sizes = 0, _sizes(read, self._ring.slot_nbytes)
            for pieces, nbytes in slices(read, sizes):
                job.parts.append(_SlotPart(job, begin, pieces, nbytes))
                begin += nbytes
        else:
            job.error = LocalError(f"{read.tag}: its place is not on {key}")
        job.parts = job.parts or [_SlotPart(job)]  # the end of one part ends the read
        return job

    # -- from the inner session's threads ----------------------------------------------------------

    def part_read(self, part: _SlotPart, error: MxError | None) -> None:
        """Queue the copy of a part that is in its slot; with `error`, its read failed."""
        job = part.job
        if error is None and part.slot is not None:
            try:
                self._push(part, part.slot)
                if isinstance(job.read.sink, HostHashing):
                    # Nothing writes to the slot until this part is finished.
                    job.read.sink.passing(part.begin, part.slot.view[: part.nbytes])
            except MxError as failed:
                error = failed
        if error is not None:
            # Its traceback refers to the reads, and they to the device's memory.
            error = error.with_traceback(None)
        with self._wake:
            job.error = job.error or error
            self._ended.append(part)
            self._wake.notify()

    def _push(self, part: _SlotPart, slot: RingSlot) -> None:
        start = end = 0
        target = -1
        for span in (span for piece in part.pieces for span in spans_of(piece.view)):
            assert isinstance(span, DeviceView)
            if span.address != target + (end - start):
                if end > start:
                    self._ring.push(slot, target, end - start, offset=start)
                start, target = end, span.address
            end += len(span)
        if end > start:
            self._ring.push(slot, target, end - start, offset=start)

    # -- the session's thread ----------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._work()
        finally:
            if self._over():
                self._ring.close()
            else:  # a sink raised: end all other reads before this thread ends with the exception
                self.close()
                self._main()

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._ended and not self._can_issue() and not self._over():
                    self._wake.wait()
                if self._over():
                    return
                part = self._ended.popleft() if self._ended else None
            if part is None:
                self._issue()
            else:
                self._finish(part)

    def _over(self) -> bool:
        return self._closed and not self._jobs

    def _can_issue(self) -> bool:
        return bool(self._waiting) and (self._ring.free > 0 or self._skips(self._waiting[0]))

    def _skips(self, part: _SlotPart) -> bool:
        """Return True if the part is not read any more."""
        return self._closed or part.job.error is not None

    def _issue(self) -> None:
        """Read the next parts, as many as there are slots for."""
        reads: list[tuple[_SlotPart, RingSlot]] = []
        skipped: list[tuple[_SlotPart, MxError]] = []
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

    def _read(self, part: _SlotPart, slot: RingSlot) -> Read:
        pieces, at = [], 0
        for piece in part.pieces:
            view = slot.view[at : at + len(piece.view)]
            pieces.append(Piece(piece.region, piece.region_offset, view))
            at += len(view)
        return Read(part.job.read.tag, pieces, _SlotSink(self, part))

    def _finish(self, part: _SlotPart) -> None:
        """Finish a part whose read has ended: wait for its copy, free its slot, call the sink."""
        job, slot = part.job, part.slot
        if slot is not None:
            part.slot = None
            try:
                slot.wait()
                part.landed = job.error is None
            except MxError as error:
                job.error = job.error or error.with_traceback(None)
            finally:
                self._ring.give(slot)
        else:
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


def _returns(call: Callable[..., None], *arguments: object) -> bool:
    """Call it. Returns False if it raised, which is reported."""
    with ReportedErrors():
        call(*arguments)
        return True
    return False


def _sizes(read: Read, slot_nbytes: int) -> Iterator[int]:
    """Yield the sizes of a read's parts: as many whole blocks as a slot holds, where the sink
    hashes them; at the end, and where it does not, a slot's."""
    begin = before = 0
    ends = read.sink.block_ends() if isinstance(read.sink, HostHashing) else ()
    for end in ends:
        if end - begin > slot_nbytes and before > begin:
            yield before - begin
            begin = before
        before = end
    while True:
        yield slot_nbytes


class _SlotSink:
    """The sink of one part's read. At its end it drops the part: the inner session may keep the
    sink for a while, by an error's traceback, and must not keep the device's memory with it."""

    __slots__ = ("_part", "_session")

    def __init__(self, session: StagedSession, part: _SlotPart) -> None:
        self._session = session
        self._part: _SlotPart | None = part

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
