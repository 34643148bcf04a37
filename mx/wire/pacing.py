"""Limits a reader's rate where the source can't: the reader keeps to its share by itself.

A source that sends limits what it sends. Where readers fetch from its memory (shm, ucx, cuda) the
source reports its share to each reader, which issues its reads no faster than that, slice by slice.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from mx.core.limits import LEAST_BYTES_PER_S, TokenBucket, slice_nbytes
from mx.errors import ClosedError, MxError, PeerProtocolError
from mx.transport import Read, ReportedErrors, Session, Sink, Span, View, slices


class RateLimiter:
    """A token bucket that several threads take from."""

    def __init__(self, bytes_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin full. `bytes_per_s` is positive; `clock` is monotonic, in seconds."""
        self._lock = threading.Lock()
        self._clock = clock
        self._bucket = TokenBucket(bytes_per_s, clock())

    @property
    def bytes_per_s(self) -> float:
        return self._bucket.bytes_per_s

    def set_rate(self, bytes_per_s: float) -> None:
        """Change the rate, which stays positive."""
        with self._lock:
            self._bucket.set_rate(bytes_per_s, self._clock())

    def delay_s(self, nbytes: int) -> float:
        """Take `nbytes` from the bucket. Returns how many seconds to wait before moving them."""
        with self._lock:
            return self._bucket.take(nbytes, self._clock())


class Pacer(RateLimiter):
    """One lease's share of a source's bandwidth, for all its sessions. Thread-safe."""

    def __init__(
        self, bytes_per_s: float, peer: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            bytes_per_s: The share.
            peer: Names the source in errors.
            clock: A monotonic clock.

        Raises:
            PeerProtocolError: `bytes_per_s` is not positive and finite.
        """
        self._peer = peer
        super().__init__(self._believed(bytes_per_s), clock)

    def set_rate(self, bytes_per_s: float) -> None:
        """Change the share. Raises PeerProtocolError unless it is positive and finite."""
        super().set_rate(self._believed(bytes_per_s))

    @property
    def slice_nbytes(self) -> int:
        """The most bytes to read at once, by the present rate."""
        return slice_nbytes(self.bytes_per_s)

    def _believed(self, bytes_per_s: float) -> float:
        if not 0 < bytes_per_s < math.inf:  # NaN is not either
            raise PeerProtocolError(
                f"{self._peer} gave a share of {bytes_per_s} bytes per second", peer=self._peer
            )
        # A tiny share must not make the reader wait for ever.
        return max(bytes_per_s, LEAST_BYTES_PER_S)


class _SliceSink:
    """The sink of one slice: reports progress as that of the whole read."""

    def __init__(self, sink: Sink, before_nbytes: int) -> None:
        self._sink = sink
        self._before_nbytes = before_nbytes
        self._ended = threading.Event()
        self._error: MxError | None = None

    def landed(self, nbytes: int) -> None:
        self._sink.landed(self._before_nbytes + nbytes)

    def done(self) -> None:
        self._ended.set()

    def failed(self, error: MxError) -> None:
        self._error = error
        self._ended.set()

    def wait(self) -> MxError | None:
        """Block until the slice's read has ended, as every read does. Returns its error, if any."""
        self._ended.wait()
        return self._error


class PacedSession:
    """A session that reads through another one at a pacer's rate. See `mx.transport.Session`. One
    thread issues the reads; it starts with the first read."""

    def __init__(self, inner: Session, pacer: Pacer, peer: str) -> None:
        """
        Args:
            inner: The session to read through, which this one owns.
            pacer: The rate.
            peer: Names the source in errors.
        """
        self.depth = inner.depth
        self._inner = inner
        self._pacer = pacer
        self._peer = peer
        self._queue: deque[Read] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def adopt(self, arena: Span) -> None:
        self._inner.adopt(arena)

    def attach(self, region: int) -> View:
        """Attach through the inner session. It moves no bytes, so it is not paced."""
        return self._inner.attach(region)

    def read(self, reads: Sequence[Read]) -> None:
        with self._wake:
            if self._closed:
                raise ClosedError(f"the session with {self._peer} is closed")
            self._queue.extend(reads)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mx-paced", daemon=True)
                self._thread.start()
            self._wake.notify_all()

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self._inner.close()

    def join(self, timeout_s: float | None = None) -> bool:
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
        return self._inner.join(None if until_s is None else max(0.0, until_s - time.monotonic()))

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while (read := self._next()) is not None:
            error = self._carry(read)
            with ReportedErrors():
                if error is None:
                    read.sink.done()
                else:
                    read.sink.failed(error)

    def _next(self) -> Read | None:
        """Wait for the next read, and return it. Returns None once the session is closed and all
        reads that it had by then were returned."""
        with self._wake:
            while not self._queue and not self._closed:
                self._wake.wait()
            return self._queue.popleft() if self._queue else None

    def _carry(self, read: Read) -> MxError | None:
        """Read all slices, one after the other. Returns the error, if any."""
        landed = 0
        for pieces, nbytes in slices(read, self._pacer.slice_nbytes):
            if not self._pause(self._pacer.delay_s(nbytes)):
                return ClosedError(f"{read.tag}: the session with {self._peer} was closed")
            sink = _SliceSink(read.sink, landed)
            try:
                self._inner.read([Read(read.tag, pieces, sink)])
            except MxError as error:
                return error
            failure = sink.wait()
            if failure is not None:
                return failure
            landed += nbytes
        return None

    def _pause(self, seconds: float) -> bool:
        """Wait. Returns False if the session was closed."""
        with self._wake:
            self._wake.wait_for(lambda: self._closed, seconds)
            return not self._closed
