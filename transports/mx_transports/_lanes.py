"""The target side's machinery: one queue of reads, several lanes that carry them.

A lane is a thread with whatever it moves bytes with (a connection, a system call). It owns the
reads that it took: it alone writes to their destinations and it alone completes them, so that
nothing is touched after `done` or `failed`. A lane whose way is lost fails its own reads and
stays, idle; once all are lost, or the session is closed, the lanes fail whatever is queued.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mx.errors import (
    ClosedError,
    MxError,
    NotAllowedError,
    PeerLostError,
    PeerRefusedError,
    SourceError,
    release_frames,
)
from mx.transport import Grant, Read, Span, host_view


class Part(NamedTuple):
    """`len(view)` bytes from `offset` of a region into `view`."""

    region: int
    offset: int
    view: memoryview


def steps(read: Read, step_nbytes: int) -> Iterator[tuple[list[Part], int]]:
    """Cut a read into steps of at most `step_nbytes`: (parts, payload bytes when it is done).

    After each the sink is told: small enough for its hash to find the bytes in the cache, large
    enough that what a step costs in Python does not show.
    """
    parts: list[Part] = []
    room, landed = step_nbytes, 0
    for piece in read.pieces:
        view, done = host_view(piece.view), 0
        while done < len(view):
            take = min(room, len(view) - done)
            parts.append(Part(piece.region, piece.region_offset + done, view[done : done + take]))
            done += take
            room -= take
            if not room:
                landed += step_nbytes
                yield parts, landed
                parts, room = [], step_nbytes
    if parts:
        yield parts, landed + step_nbytes - room


class LaneSession(ABC):
    """A session of `lanes` lanes. Subclasses carry reads; this one queues and ends them."""

    depth: int

    def __init__(self, name: str, grant: Grant, lanes: int) -> None:
        self._grant = grant
        self._peer = grant.peer
        self._queue: deque[Read] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._live = lanes
        self._running = lanes
        self._lost = "the connection was lost"
        self._threads = [
            threading.Thread(target=self._main, args=(lane,), name=f"{name}-{lane}", daemon=True)
            for lane in range(lanes)
        ]

    def _start(self) -> None:
        """Called last by the subclass's constructor."""
        for thread in self._threads:
            thread.start()

    # --- what subclasses fill in

    @abstractmethod
    def _carry(self, lane: int) -> None:
        """Take reads and complete them until there are no more; return or raise when lost.

        What was taken must have been completed on the way out, SourceError or not.
        """

    @abstractmethod
    def _abort(self) -> None:
        """Make lanes that block return soon. Called once, from `close`."""

    @abstractmethod
    def _release(self) -> None:
        """Free descriptors and mappings. Called once, by the last lane."""

    # --- mx.transport.Session

    def read(self, reads: Sequence[Read]) -> None:
        with self._wake:
            if self._closed:
                raise ClosedError(f"the session with {self._peer} is closed")
            self._queue.extend(reads)
            self._wake.notify_all()

    def close(self) -> None:
        with self._wake:
            if self._closed:
                return
            self._closed = True
            self._wake.notify_all()
        self._abort()

    def join(self, timeout_s: float | None = None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                return False
        return True

    def adopt(self, arena: Span) -> None:
        """Lanes write wherever a read says: there is nothing to register."""
        del arena

    def attach(self, region: int) -> Span:
        raise NotAllowedError(f"{self._peer}: region {region} can't be attached this way")

    # --- for lanes

    def _take(self, wait: bool) -> Read | None:
        """The next read in order; None once closed, or if `wait` is false and there is none."""
        with self._wake:
            while wait and not self._queue and not self._closed:
                self._wake.wait()
            return self._queue.popleft() if self._queue and not self._closed else None

    def _requeue(self, read: Read) -> None:
        """Give back, untouched, what was taken last."""
        with self._wake:
            self._queue.appendleft(read)

    def _check_bounds(self, read: Read, region_nbytes: Sequence[int]) -> None:
        """Raises PeerRefusedError for a piece outside of the source's regions."""
        for piece in read.pieces:
            region, offset = piece.region, piece.region_offset
            if 0 <= region < len(region_nbytes) and offset >= 0:
                if offset + len(piece.view) <= region_nbytes[region]:
                    continue
                size = f", which has {region_nbytes[region]} bytes"
            else:
                size = ""
            raise PeerRefusedError(
                f"{self._peer}: {len(piece.view)} bytes at {offset} are outside of its region "
                f"{region}{size}",
                peer=self._peer,
            )

    def _fail(self, read: Read, error: MxError) -> None:
        """Complete a read that its lane will not touch again."""
        read.sink.failed(self._why(read, error))

    def _why(self, read: Read, error: MxError) -> MxError:
        if self._closed and isinstance(error, PeerLostError):
            return ClosedError(f"{read.tag}: the session with {self._peer} was closed")
        message = f"{read.tag}: {error.message}"
        if isinstance(error, SourceError):
            return type(error)(message, peer=self._peer, hint=error.hint)
        return type(error)(message, hint=error.hint)

    # --- the lanes' threads

    def _main(self, lane: int) -> None:
        try:
            self._carry(lane)
        except SourceError as error:
            self._lost = error.message
            # Its traceback and the frames that it ends in keep each other, and destinations.
            release_frames(error)
        finally:
            # Also where a sink raised: its lane is lost, but nobody waits for ever.
            with self._wake:
                self._live -= 1
                self._wake.notify_all()
            self._bury()
            with self._wake:
                self._running -= 1
                last = not self._running
            if last:
                self._release()

    def _bury(self) -> None:
        """Fail what is queued whenever no lane is left to carry it, until the session closes."""
        while True:
            with self._wake:
                while not self._closed and (self._live or not self._queue):
                    self._wake.wait()
                if not self._queue:
                    return
                read = self._queue.popleft()
            self._fail(read, PeerLostError(f"{self._peer}: {self._lost}", peer=self._peer))
