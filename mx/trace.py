"""Tracing hooks: each step of the work reports to listeners that it started, completed or failed.

    with trace.span("pull.locate", model="llama-8b") as span:
        ...
        span.set(sources=3)

Without listeners, the default, every span is one shared object that does nothing. Listeners are
called on the thread that does the work, so they must be quick and must not raise.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, NamedTuple

Clock = Callable[[], float]
Kind = Literal["started", "completed", "failed"]


class SpanEvent(NamedTuple):
    """One event of one span.

    `span` is a number that is unique in the process. `at_s` is the time on the listener's clock;
    `duration_s` is None for "started". `attributes` are those set so far. `error` is set for
    "failed".
    """

    kind: Kind
    name: str
    span: int
    at_s: float
    duration_s: float | None
    attributes: Mapping[str, object]
    error: BaseException | None = None

    def to_json(self) -> str:
        """Return the event as one line; values that JSON does not have are written as text."""
        record: dict[str, object] = {
            "event": self.kind,
            "name": self.name,
            "span": self.span,
            "at_s": round(self.at_s, 6),
        }
        if self.duration_s is not None:
            record["duration_s"] = round(self.duration_s, 6)
        if self.error is not None:
            record["error"] = f"{type(self.error).__name__}: {self.error}"
        return json.dumps(record | {"attributes": dict(self.attributes)}, default=str)


Listener = Callable[[SpanEvent], None]


class Span:
    """What `span()` returns: a context manager that takes more attributes while it is open.

    This one is that of a process without listeners.
    """

    __slots__ = ()

    def set(self, **attributes: object) -> None:
        """Add attributes to the span's later events."""

    def __enter__(self) -> Span:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        pass


class _ReportedSpan(Span):
    """A span that reports to the listeners of the moment at which it was made."""

    __slots__ = ("_attributes", "_id", "_listeners", "_name", "_started_s")

    def __init__(
        self,
        name: str,
        attributes: dict[str, object],
        listeners: tuple[tuple[Listener, Clock], ...],
    ) -> None:
        self._name = name
        self._attributes = attributes
        self._listeners = listeners
        self._id = next(_ids)
        self._started_s: list[float] = []

    def set(self, **attributes: object) -> None:
        self._attributes.update(attributes)

    def __enter__(self) -> Span:
        for listener, clock in self._listeners:
            now = clock()
            self._started_s.append(now)
            listener(SpanEvent("started", self._name, self._id, now, None, dict(self._attributes)))
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        outcome: Kind = "completed" if error is None else "failed"
        for (listener, clock), start in zip(self._listeners, self._started_s, strict=True):
            now = clock()
            attributes = dict(self._attributes)
            listener(SpanEvent(outcome, self._name, self._id, now, now - start, attributes, error))


_NULL_SPAN = Span()
_ids = itertools.count(1)
_lock = threading.Lock()
#: Replaced, never changed in place, so that `span` reads it without a lock.
_listeners: tuple[tuple[Listener, Clock], ...] = ()


def span(name: str, **attributes: object) -> Span:
    """Return a span for a `with` statement, on any thread. An exception in the block fails it."""
    return _ReportedSpan(name, attributes, _listeners) if _listeners else _NULL_SPAN


@contextmanager
def listening(listener: Listener, *, clock: Clock = time.monotonic) -> Iterator[None]:
    """Call `listener` for every span that is made during the block, on any thread of the process.

    Args:
        listener: Called with each event, on the span's thread. It must be quick and not raise.
        clock: Returns the times of the events, in seconds.
    """
    global _listeners
    entry = (listener, clock)
    with _lock:
        _listeners = (*_listeners, entry)
    try:
        yield
    finally:
        with _lock:
            _listeners = tuple(other for other in _listeners if other is not entry)


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Append every event to a file as a JSON line during the block.

    Times are the machine's monotonic clock, which all of its processes share.

    Args:
        path: The file.

    Raises:
        OSError: The file cannot be opened.
    """
    lock = threading.Lock()
    file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115

    def write(event: SpanEvent) -> None:
        # A span may outlive the block; its later events are dropped.
        with lock:
            if not file.closed:
                file.write(event.to_json() + "\n")

    try:
        with listening(write):
            yield
    finally:
        with lock:
            file.close()
