"""The target side of the GPU transports: threads that each have several copies under way.

A thread takes reads, cuts them into steps, and queues the copies of the next steps while it waits
for the oldest: bytes are reported to the sinks only when the event behind their copies has
happened, and the source, its grant and its generation were checked after that.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from mx.cuda.device import Device
from mx.cuda.errors import CudaError
from mx.errors import ClosedError, LocalError, MxError, NotAllowedError, PeerLostError, SourceError
from mx.transport import DeviceHashing, DeviceView, Grant, Read, ScatteredView, Span, spans_of
from mx.units import MIB
from mx_transports.toolkit.cuda import wire
from mx_transports.toolkit.cuda.copier import STAGES, Copier
from mx_transports.toolkit.cuda.hosts import HostOptions, HostSide
from mx_transports.toolkit.cuda.places import ScatterTable
from mx_transports.toolkit.cuda.remote import RemoteMemory, path_error, translated
from mx_transports.toolkit.cuda.wire import RemoteRegion
from mx_transports.toolkit.session import ThreadedSession
from mx_transports.toolkit.slicing import Slice, steps

#: With more bytes under way a thread takes no further read.
FULL_BYTES = 64 * MIB
#: Threads that fill slots from host memory, at least: on a machine with an H200 two move 9 to 12
#: GB/s of the 54 of its link, and eight 22.
SLOT_THREADS = 4


class _TakenRead:
    """A read that a thread has taken and not completed."""

    def __init__(self, read: Read) -> None:
        self.read = read
        sink = read.sink
        #: What the GPU hashes of it is queued by this.
        self.queued = sink.queued if isinstance(sink, DeviceHashing) else None

    def cut(self, step_nbytes: int) -> None:
        """Begin to cut the read into steps."""
        self.step_nbytes = step_nbytes
        self.steps: Iterator[tuple[list[Slice[Span]], int]] = steps(
            self.read, step_nbytes, lambda span: span
        )


class _StartedStep(NamedTuple):
    """A step that was started: its number, how many bytes of its read are in place with it, and how
    many it copies itself."""

    number: int
    job: _TakenRead
    landed: int
    nbytes: int


class _ThreadReads:
    """One thread's reads under way, oldest first."""

    def __init__(self) -> None:
        self.jobs: list[_TakenRead] = []
        self.flights: deque[_StartedStep] = deque()
        #: The job whose steps are being started: the last one, or None.
        self.current: _TakenRead | None = None
        self.started = 0

    @property
    def full(self) -> bool:
        """True with so much under way that another thread is to take the next read."""
        return sum(flight.nbytes for flight in self.flights) > FULL_BYTES


class Attachment:
    """Keeps attached memory mapped, and the source's memory in place, until the last view ends."""

    def __init__(self, remote: RemoteMemory) -> None:
        self._finalizer = weakref.finalize(self, remote.drop)
        # The process's end does it all at once.
        self._finalizer.atexit = False


class _MappedSpans(Sequence[DeviceView]):
    """The places of a region. Each is opened when it is looked at, unless it is open, and a slice
    at once; that raises SourceError. They are made for an `owner`, if any, and keep it."""

    def __init__(
        self, remote: RemoteMemory, places: ScatterTable, key: str, owner: Attachment | None
    ) -> None:
        self.lengths = places.lengths
        self._remote, self._addresses = remote, places.addresses
        self._key, self._owner = key, owner

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, at: Any) -> Any:
        if not isinstance(at, slice):
            return self[at : at + 1 or None][0]
        places = list(zip(self._addresses[at], self.lengths[at], strict=True))
        self._remote.open(places)
        found = [next(self._remote.maps.pieces(*place)) for place in places]
        return [DeviceView(self._key, here, nbytes, self._owner) for _, here, nbytes in found]

    def toreadonly(self) -> _MappedSpans:
        """Return them: that they are not written to is up to who has them."""
        return self


class GpuSession(ThreadedSession):
    """`remote` is connected and mapped, and the session's from here on. `home` is the target, or
    the GPU that copies into the host; `close_devices` is called at the end. A read of which all
    bytes in the host are reached in place is cut into steps as `host_options` says, any other one
    into those of `step_nbytes`."""

    def __init__(
        self,
        grant: Grant,
        remote: RemoteMemory,
        target: Device | None,
        home: Device,
        close_devices: Callable[[], None],
        step_nbytes: int,
        host_options: HostOptions,
    ) -> None:
        to_host = target is None
        self._host = host = HostSide(home, remote.regions, grant.peer, host_options, to_host)
        workers = max(1, grant.streams)
        if host.through_slots and workers > 1:  # more than one was not forbidden
            workers = max(workers, SLOT_THREADS)
        super().__init__(f"mx-{remote.path}", grant, workers)
        self.depth = STAGES * workers
        #: See `mx.transport.Session`.
        self.reads_trips = not host.through_slots
        self._remote = remote
        self._target, self._home = target, home
        self._close_devices = close_devices
        self._step_nbytes = step_nbytes
        self._in_place_step_nbytes = host_options.step_nbytes
        self.sizes = {index: region.nbytes for index, region in remote.regions.items()}
        self._copiers = [Copier(remote, host, target, home, step_nbytes) for _ in range(workers)]
        self._busy = 0
        self._detached: MxError | None = None
        #: Held while the source's memory is used by a thread that carries no reads.
        self._remote_lock = threading.Lock()
        self._closing = os.eventfd(0, os.EFD_CLOEXEC)
        self._workers = list(self.threads)
        self.threads.append(
            threading.Thread(target=self._watch, name=f"mx-{remote.path}-watch", daemon=True)
        )
        self.start()

    @property
    def detail(self) -> str:
        """Why bytes in the host went through slots; "" if they did not have to."""
        return self._host.reason

    def adopt(self, arena: Span) -> None:
        self._host.adopt(arena)

    def adopt_places(self, arena: ScatteredView) -> None:
        self._host.adopt(arena)

    def attach(self, region: int) -> DeviceView | ScatteredView:
        """Return the region on this session's GPU, in place. Raises NotAllowedError where it is on
        another one, in the host, or a place of it not in one piece here."""
        with self.lock:
            if self.closed:
                raise ClosedError(f"the session with {self.peer} is closed")
        with self._remote_lock:
            if self._detached is not None:
                raise _again(self._detached)
            found = self._in_one_piece(region)
            if self._target is None or found is None:
                raise NotAllowedError(
                    f"{self.peer}: region {region} is not in one piece on this GPU: it can be "
                    "copied, not attached"
                )
            self._remote.maps.lend()
            self._remote.hold()
        owner = Attachment(self._remote)
        # After this message the source waits for the view's end, even if the grant has ended by
        # now. So the source must get this message.
        self._remote.send(wire.HELD)
        poll = select.poll()
        self._remote.register(poll)
        self._remote.check(poll)
        places = found.places or ScatterTable([0], [found.address], [found.nbytes])
        spans = _MappedSpans(self._remote, places, self._target.key, owner)
        if found.places is None:
            return next(iter(spans))
        return ScatteredView.over(places.begins, spans, self.sizes[region])

    def source_view(self, region: int) -> ScatteredView | None:
        with self._remote_lock:
            found = self._in_one_piece(region)
            if self._target is not None or self._detached is not None or found is None:
                return None
        places = found.places or ScatterTable([0], [found.address], [found.nbytes])
        spans = _MappedSpans(self._remote, places, self._home.key, None)
        return ScatteredView.over(places.begins, spans, self.sizes[region])

    def _in_one_piece(self, region: int) -> RemoteRegion | None:
        """Return a region of which each place is in one piece on the GPU that copies; None for any
        other one."""
        found = self._remote.regions.get(region)
        if found is None or not found.on_gpu:
            return None
        there: Iterable[tuple[int, int]] = ((found.address, found.nbytes),)
        if found.places is not None:
            there = zip(found.places.addresses, found.places.lengths, strict=True)
        pieces = [list(self._remote.maps.pieces(*place)) for place in there]
        here = all(len(one) == 1 and one[0][0].uuid == self._home.uuid for one in pieces)
        return found if here else None

    # --- the end

    def abort(self) -> None:
        os.eventfd_write(self._closing, 1)

    def release(self) -> None:
        pass  # The watcher's, which comes after the other threads.

    def _watch(self) -> None:
        """Let go of the source's memory as soon as the source or this session ends."""
        poll = select.poll()
        poll.register(self._closing, select.POLLIN)
        self._remote.register(poll)
        poll.poll()
        self._detach()
        os.eventfd_read(self._closing)
        for worker in self._workers:
            worker.join()
        self._host.close()
        self._close_devices()
        os.close(self._closing)

    def _detach(self) -> None:
        for copier in self._copiers:
            # Where CUDA has broken, nothing runs any more.
            with contextlib.suppress(CudaError):
                copier.end()
        poll = select.poll()
        self._remote.register(poll)
        why: MxError = PeerLostError("closed", peer=self.peer)
        try:
            self._remote.check(poll)
        except SourceError as error:
            why = error.with_traceback(None)
        with self._remote_lock:
            self._detached = why
        self._remote.drop()

    # --- the threads that carry reads

    def carry(self, worker: int) -> None:
        copier = self._copiers[worker]
        with translated(self._remote.path, self.peer), copier.home.current():
            self._carry_on(copier)

    def _carry_on(self, copier: Copier) -> None:
        work, busy = _ThreadReads(), False
        try:
            while True:
                busy = self._start_steps(copier, work, busy)
                if work.flights:
                    self._land(copier, work)
                    continue
                # The source is notified at the end of a run of reads, not between them.
                busy = self._set_busy(busy, False)
                if not self._next(work, wait=True):
                    return
        finally:
            # By an error of the path, or of a sink: what was taken is completed all the same.
            self._synchronize(copier)
            for job in work.jobs:
                self.fail(job.read, PeerLostError(f"{self.peer}: abandoned", peer=self.peer))
            self._set_busy(busy, False)
            with contextlib.suppress(CudaError):
                copier.close()

    def _next(self, work: _ThreadReads, *, wait: bool) -> bool:
        read = self.take(wait=wait)
        if read is None:
            return False
        job = work.current = _TakenRead(read)
        work.jobs.append(job)
        # It stays so for all of the read.
        in_place = self._host.ready(read)
        job.cut(self._in_place_step_nbytes if in_place else self._step_nbytes)
        return True

    def _start_steps(self, copier: Copier, work: _ThreadReads, busy: bool) -> bool:
        """Start as many steps as there are stages. Return whether the thread is busy now."""
        while len(work.flights) < STAGES:
            if work.current is None and (work.full or not self._next(work, wait=False)):
                break
            busy = self._set_busy(busy, True)
            job = work.current
            assert job is not None
            try:
                flight = self._start_step(copier, job, work.started)
            except MxError as error:
                work.current = None
                self._give_up(copier, work, job, error)
                if isinstance(error, PeerLostError):
                    raise
                continue
            work.started += 1
            work.flights.append(flight)
            if flight.landed == job.read.nbytes:
                work.current = None
        return busy

    def _start_step(self, copier: Copier, job: _TakenRead, number: int) -> _StartedStep:
        parts, landed = next(job.steps, ([], 0))
        nbytes = sum(len(part.view) for part in parts)
        if landed <= job.step_nbytes:  # the first one
            self.check_bounds(job.read)
            self._check_target(job.read)
            self._open(copier, self._remote.places_of(job.read))
        with copier.lock:
            self._check_open(copier)
            self._remote.check_grant()
            try:
                copier.start(number, parts, job.queued if landed == job.read.nbytes else None)
            except CudaError as error:
                copier.discard(number)
                raise path_error(error, self._remote.path, self.peer) from error
            except MxError:
                copier.discard(number)
                raise
        return _StartedStep(number, job, landed, nbytes)

    def _open(self, copier: Copier, places: Iterable[tuple[int, int]]) -> None:
        """Have what a read touches mapped. Not with the lock, for which the session's end waits."""
        try:
            self._remote.open(places)
        except PeerLostError:
            with copier.lock:
                self._check_open(copier)  # raises why the memory was let go, if it was
            raise

    def _land(self, copier: Copier, work: _ThreadReads) -> None:
        number, job, landed, _ = work.flights.popleft()
        try:
            try:
                copier.finish(number)
            except CudaError as error:
                raise path_error(error, self._remote.path, self.peer) from error
            # After the bytes: what was read is good only if nothing had changed by then.
            with copier.lock:
                self._check_open(copier)
                self._remote.check(copier.poll)
        except MxError as error:
            if work.current is job:
                work.current = None
            self._give_up(copier, work, job, error)
            if isinstance(error, PeerLostError):
                raise  # no other read can succeed
            return
        if landed:
            job.read.sink.landed(landed)
        if landed == job.read.nbytes:
            work.jobs.remove(job)
            job.read.sink.done()

    def _give_up(self, copier: Copier, work: _ThreadReads, job: _TakenRead, error: MxError) -> None:
        """Fail a job once nothing of it runs any more."""
        self._synchronize(copier)
        kept = [flight for flight in work.flights if flight.job is not job]
        for flight in work.flights:
            if flight.job is job:
                copier.discard(flight.number)
        work.flights = deque(kept)
        work.jobs.remove(job)
        self.fail(job.read, error)

    def _synchronize(self, copier: Copier) -> None:
        # Where CUDA has broken, nothing runs any more.
        with contextlib.suppress(CudaError):
            copier.synchronize()

    def _check_open(self, copier: Copier) -> None:
        """Raise the error of a read once this session has let go; the copier's lock is held."""
        if self.closed:
            raise PeerLostError("closed", peer=self.peer)
        if copier.ended:
            # Its own detaching is under way, or through.
            with self._remote_lock:
                found = self._detached
            raise _again(found) if found is not None else self._ending()

    def _ending(self) -> MxError:
        return PeerLostError(f"{self.peer}: the source has ended", peer=self.peer)

    def _check_target(self, read: Read) -> None:
        """Raise LocalError for destinations that this session is not for."""
        device = "the host" if self._target is None else self._target.key
        for piece in read.pieces:
            for span in spans_of(piece.view):
                there = span.device if isinstance(span, DeviceView) else "the host"
                if there != device:
                    raise LocalError(
                        f"{self._remote.path}: the session is for {device}, not for {there}"
                    )

    def _set_busy(self, before: bool, now: bool) -> bool:
        """Change the count of busy threads; notify the source when it leaves 0 or returns to 0."""
        if before == now:
            return now
        with self._remote_lock:
            self._busy += 1 if now else -1
            # The first thread to begin, or the last to end.
            if self._busy == now and self._detached is None:
                self._remote.notify(wire.BUSY if now else wire.IDLE)
        return now


def _again(error: MxError) -> MxError:
    """Return the same error to be raised on another thread."""
    peer = getattr(error, "peer", "")
    return type(error)(error.message, peer=peer, hint=error.hint)  # type: ignore[call-arg]
