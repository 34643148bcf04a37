"""The thread of a session that calls sinks, so that UCX is polled while they hash."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from mx.errors import MxError
from mx.transport import Read, ReportedErrors


class ReportedRead:
    """A read whose sink is called by `SinkReports`; `raised`: it has raised from `landed`."""

    def __init__(self, read: Read) -> None:
        self.read = read
        self.raised = False


class SinkReports:
    """Calls sinks, in order, on one thread. That ends once `end` was called and all calls are made.

    A sink that raises from `landed` gets no more but its read's end, which is a failure.

    Args:
        name: The thread's name.
        fail: Calls a sink's `failed`.
        abandoned: The error of a read whose sink has raised.
    """

    def __init__(
        self, name: str, fail: Callable[[Read, MxError], None], abandoned: MxError
    ) -> None:
        self._fail = fail
        self._abandoned = abandoned
        self._due: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        #: `landed` calls that are due, or being made.
        self.landings = 0
        self._ended = False
        self.thread = threading.Thread(target=self._main, name=name, daemon=True)

    def wait(self, most: int, timeout_s: float | None = None) -> None:
        """Wait until `most` or fewer `landings` are left, for `timeout_s` at most if given."""
        with self._changed:
            self._changed.wait_for(lambda: self.landings <= most, timeout_s)

    def landed(self, reported: ReportedRead, nbytes: int) -> None:
        """Have the sink told that the first `nbytes` bytes are in place."""
        with self._changed:
            self.landings += 1
            self._put(partial(self._landed, reported, nbytes))

    def done(self, reported: ReportedRead) -> None:
        """Have the sink told that all are."""
        with self._changed:
            self._put(partial(self._done, reported))

    def failed(self, read: Read, error: MxError) -> None:
        """Have the sink told that they will not come; nothing writes there any more."""
        with self._changed:
            self._put(partial(self._fail, read, error))

    def end(self) -> None:
        """End the thread after all calls."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _put(self, call: Callable[[], None]) -> None:
        self._due.append(call)
        self._changed.notify_all()

    # --- the thread

    def _main(self) -> None:
        while (call := self._next()) is not None:
            with ReportedErrors():
                call()
            del call  # it refers to destinations

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._due and not self._ended:
                self._changed.wait()
            return self._due.popleft() if self._due else None

    def _landed(self, reported: ReportedRead, nbytes: int) -> None:
        try:
            if not reported.raised:
                reported.raised = True
                reported.read.sink.landed(nbytes)
                reported.raised = False
        finally:
            with self._changed:
                self.landings -= 1
                self._changed.notify_all()

    def _done(self, reported: ReportedRead) -> None:
        if reported.raised:
            self._fail(reported.read, self._abandoned)
        else:
            reported.read.sink.done()
