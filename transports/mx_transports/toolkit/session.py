"""The target side: a queue of reads, and threads that carry them out.

Each thread has something of its own to move bytes with: a connection, a system call. It owns the
reads that it took: no other thread writes to their destinations or completes them, so that nothing
is touched after `done` or `failed`. A thread that has lost its connection fails its own reads and
stays, idle; once all have lost theirs, or the session is closed, they fail whatever is queued.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mx.errors import (
    ClosedError,
    MxError,
    NotAllowedError,
    PeerLostError,
    PeerRefusedError,
    SourceError,
    StaleGenerationError,
    release_frames,
)
from mx.transport import Cancellation, Grant, Read, ReportedErrors, Span, View
from mx_transports.toolkit import dial
from mx_transports.toolkit.stream import SocketStream


class ThreadedSession:
    """A session with a number of threads. See `mx.transport.Session`.

    A subclass implements `fetch`, or `carry` where a thread has several reads under way; `release`,
    where it holds anything; and `abort`, where its threads may block on the peer. Its constructor
    sets `depth` and ends with `start()`. It may read `grant`, `peer` (the grant's), `closed`, and
    `threads`, to which it may add before `start()`.

    Args:
        name: What the threads are called, with their numbers.
        grant: What the session was opened with.
        workers: How many threads carry reads.
    """

    #: See `mx.transport.Session`.
    depth: int

    def __init__(self, name: str, grant: Grant, workers: int) -> None:
        self.grant = grant
        self.peer = grant.peer
        #: The sizes of the source's regions in bytes, by index.
        self.sizes: Mapping[int, int] = dict(enumerate(grant.region_nbytes))
        self.closed = False
        #: Guards `closed` and the queue; notified when one of them changes.
        self._mutex = threading.RLock()  # its own, which a read enters without a call of Python
        self.lock = threading.Condition(self._mutex)
        self._name = name
        self.threads = [self._thread(worker) for worker in range(workers)]
        self._queue: deque[Read] = deque()
        #: How many threads carry reads, how many have not ended, and how many there ever were.
        self._live = self._running = self._numbered = workers
        self._lost = "the connection was lost"

    def start(self) -> None:
        """Start the threads. Where one can't be, all end, what the session has is released, and the
        error is raised."""
        try:
            for thread in self.threads:
                thread.start()
        except BaseException:
            self.close()
            for thread in reversed(self.threads):
                if thread.ident is None:
                    thread.run()  # here: it ends at once, since the session is closed
            raise

    def _thread(self, worker: int) -> threading.Thread:
        name = f"{self._name}-{worker}"
        return threading.Thread(target=self._main, args=(worker,), name=name, daemon=True)

    # --- what subclasses fill in

    def carry(self, worker: int) -> None:
        """Take reads and complete them until `take` returns None, on a thread of the session.

        Args:
            worker: The thread's number, from 0.

        Raises:
            MxError: The connection is lost. What was taken has been completed.
        """
        while (read := self.take()) is not None:
            self.complete(worker, read)

    def fetch(self, worker: int, read: Read) -> None:
        """Bring a read's bytes to their destinations, and report to its sink what has landed.

        Nothing may write to the read's destinations once this has returned or raised.

        Args:
            worker: The thread's number, from 0.
            read: A read within the source's regions, which the caller completes.

        Raises:
            MxError: The read fails. See `ends_connection`.
            OSError: The connection is lost.
        """
        raise NotImplementedError

    def ends_connection(self, error: MxError) -> bool:
        """Return True if no other read can succeed on this thread after `error` from `fetch`."""
        return isinstance(error, PeerLostError)

    def abort(self) -> None:
        """Make threads that block on the peer return soon. Called once, from `close`."""

    def release(self) -> None:
        """Free descriptors and mappings. Called once, by the last thread that carries reads."""

    # --- mx.transport.Session

    def read(self, reads: Sequence[Read]) -> None:
        with self._mutex:
            if self.closed:
                raise ClosedError(f"the session with {self.peer} is closed")
            self._queue.extend(reads)
            self.lock.notify_all()

    def close(self) -> None:
        with self.lock:
            if self.closed:
                return
            self.closed = True
            self.lock.notify_all()
        self.abort()

    def join(self, timeout_s: float | None = None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self.threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                return False
        return True

    def adopt(self, arena: Span) -> None:
        """Do nothing: threads write to any destination."""
        del arena

    def attach(self, region: int) -> View:
        raise NotAllowedError(f"{self.peer}: region {region} can't be attached this way")

    # --- for sessions that grow (`mx.transport.Growing`)

    @property
    def open_streams(self) -> int:
        """How many threads carry reads."""
        return self._live

    def add_threads(self, workers: int) -> None:
        """Start threads until there have been `workers`, as far as there are any to be had. Does
        nothing once the session is closed."""
        with self.lock, contextlib.suppress(RuntimeError):
            while self._numbered < workers and not self.closed:
                thread = self._thread(self._numbered)
                thread.start()
                self.threads.append(thread)
                self._numbered += 1
                self._live += 1
                self._running += 1
                self.depth += 2

    # --- for the threads

    def take(self, *, wait: bool = True) -> Read | None:
        """Take the next read.

        Args:
            wait: Whether to wait for a read while there is none.

        Returns:
            The read, which is the thread's to complete; None once the session is closed, or where
            there is none and `wait` is False.
        """
        with self._mutex:
            while wait and not self._queue and not self.closed:
                self.lock.wait()
            return self._queue.popleft() if self._queue and not self.closed else None

    def put_back(self, read: Read) -> None:
        """Put the read that was taken last, and not touched, back to the front of the queue."""
        with self.lock:
            self._queue.appendleft(read)

    def check_bounds(self, read: Read) -> None:
        """Raise PeerRefusedError for a piece outside of the source's regions."""
        sizes = self.sizes
        for piece in read.pieces:
            region, offset = piece.region, piece.region_offset
            nbytes = sizes.get(region)
            if nbytes is not None and 0 <= offset <= nbytes - len(piece.view):
                continue
            size = "" if nbytes is None else f", which has {nbytes} bytes"
            raise PeerRefusedError(
                f"{self.peer}: {len(piece.view)} bytes at {offset} are outside of its region "
                f"{region}{size}",
                peer=self.peer,
            )

    def complete(self, worker: int, read: Read) -> None:
        """Check, fetch and complete a read. Raises MxError if its failure ends the connection."""
        try:
            self.check_bounds(read)
            self.fetch(worker, read)
        except OSError as error:
            lost = dial.translate(error, self.peer, self.peer)
            self.fail(read, lost)
            raise lost from error
        except MxError as error:
            self.fail(read, error)
            if self.ends_connection(error):
                raise
        except BaseException:
            self.fail(read, PeerLostError(f"{self.peer}: abandoned", peer=self.peer))
            raise
        else:
            read.sink.done()

    def fail(self, read: Read, error: MxError) -> None:
        """Complete a read that nothing will write to again.

        Args:
            read: One that the calling thread has taken and not completed.
            error: Why it fails. The sink is given one of its type that names the read, or a
                ClosedError where the connection was lost because the session was closed.
        """
        with ReportedErrors():
            read.sink.failed(self._named(read, error))

    def check_generation(self, most: int) -> None:
        """Raise StaleGenerationError if the grant's generation is not between 0 and `most`."""
        if not 0 <= self.grant.generation <= most:
            raise StaleGenerationError(
                f"{self.peer}: {self.grant.generation} is not a generation", peer=self.peer
            )

    def _named(self, read: Read, error: MxError) -> MxError:
        if self.closed and isinstance(error, PeerLostError):
            return ClosedError(f"{read.tag}: the session with {self.peer} was closed")
        message = f"{read.tag}: {error.message}"
        if isinstance(error, SourceError):
            return type(error)(message, peer=self.peer, hint=error.hint)
        return type(error)(message, hint=error.hint)

    # --- a thread's life

    def _main(self, worker: int) -> None:
        with ReportedErrors():  # a sink that raises has cost this thread its connection
            try:
                self.carry(worker)
            except MxError as error:
                self._lost = error.message
                # Its traceback and its frames reference each other, and destinations.
                release_frames(error)
        with self.lock:
            self._live -= 1
            self.lock.notify_all()
        self._fail_queued()
        with self.lock:
            self._running -= 1
            last = not self._running
        if last:
            self.release()

    def _fail_queued(self) -> None:
        """Fail queued reads while no thread is left to carry them out, until the session closes."""
        while True:
            with self.lock:
                while not self.closed and (self._live or not self._queue):
                    self.lock.wait()
                if not self._queue:
                    return
                read = self._queue.popleft()
            self.fail(read, PeerLostError(f"{self.peer}: {self._lost}", peer=self.peer))


class StreamSession(ThreadedSession):
    """A session with a connection for each thread; a subclass implements `fetch` or `carry`.

    After an error other than a refusal, bytes of the read may still come: the connection ends.

    Args:
        name: What the threads are called, with their numbers.
        grant: What the session was opened with.
        streams: Its connections, which the session owns from here on.
    """

    def __init__(self, name: str, grant: Grant, streams: list[SocketStream]) -> None:
        super().__init__(name, grant, len(streams))
        self.streams = dict(enumerate(streams))
        self._opening = Cancellation()
        self.depth = 2 * len(streams)

    def carry(self, worker: int) -> None:
        try:
            super().carry(worker)
        finally:
            self.hang_up(worker)

    def ends_connection(self, error: MxError) -> bool:
        return not isinstance(error, (PeerRefusedError, StaleGenerationError))

    def hang_up(self, worker: int) -> None:
        """Close a thread's connection."""
        with self.lock:
            # Under the lock, so that `abort` never meets a descriptor that is another's.
            self.streams[worker].close()

    def abort(self) -> None:
        with self.lock:
            self._opening.set()
            for stream in self.streams.values():
                stream.abort()

    def release(self) -> None:
        self.streams.clear()


class GrowingSession(StreamSession):
    """A StreamSession that opens more connections by itself (`mx.transport.Growing`): over the
    network, as `dial.open_streams` has opened the first ones. A subclass sets `magic`, that of the
    source's exposure; a `carry` of its own begins with `stream`."""

    magic: bytes

    def grow(self, streams: int) -> None:
        self.add_threads(streams)

    def carry(self, worker: int) -> None:
        self.stream(worker)
        super().carry(worker)

    def stream(self, worker: int) -> SocketStream:
        """Return a thread's connection, on that thread; opens it if need be. Raises MxError."""
        if worker not in self.streams:
            grant = replace(self.grant, streams=1, cancelled=self._opening)
            (stream,) = dial.open_streams(self.magic, grant)
            with self.lock:
                self.streams[worker] = stream
                if self.closed:
                    stream.abort()
        return self.streams[worker]
