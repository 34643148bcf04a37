"""Hooks: each step of the work tells whoever listens that it started, completed or failed.

    with trace.span("puller.resolve", model="llama-8b") as span:
        ...
        span.set(sources=3)

Nobody listens by default, and then a span is one shared object that does nothing. Listeners are
called on the thread that does the work, so they must be quick and must not raise.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol

Clock = Callable[[], float]
Kind = Literal["started", "completed", "failed"]


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to one span.

    `span` tells spans of one process apart. `at_s` is the listener's clock; `duration_s` is
    None for "started". `attributes` are those set so far. `error` is set for "failed".
    """

    kind: Kind
    name: str
    span: int
    at_s: float
    duration_s: float | None
    attributes: Mapping[str, object]
    error: BaseException | None = None

    def to_json(self) -> str:
        """One line; values that JSON lacks are written as their text."""
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


Listener = Callable[[Event], None]


class Span(Protocol):
    """What `span()` gives: a context manager that takes more attributes while it is open."""

    def set(self, **attributes: object) -> None: ...

    def __enter__(self) -> Span: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class _Silent:
    """The span of a process in which nobody listens."""

    __slots__ = ()

    def set(self, **attributes: object) -> None:
        pass

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass


class _Heard:
    """A span told to those who listened when it was made."""

    __slots__ = ("_attributes", "_audience", "_id", "_name", "_started_s")

    def __init__(
        self, name: str, attributes: dict[str, object], audience: tuple[tuple[Listener, Clock], ...]
    ) -> None:
        self._name = name
        self._attributes = attributes
        self._audience = audience
        self._id = next(_ids)
        self._started_s: list[float] = []

    def set(self, **attributes: object) -> None:
        self._attributes.update(attributes)

    def __enter__(self) -> Span:
        for listener, clock in self._audience:
            now = clock()
            self._started_s.append(now)
            listener(Event("started", self._name, self._id, now, None, dict(self._attributes)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        outcome: Kind = "completed" if error is None else "failed"
        for (listener, clock), start in zip(self._audience, self._started_s, strict=True):
            now = clock()
            attributes = dict(self._attributes)
            listener(Event(outcome, self._name, self._id, now, now - start, attributes, error))


_SILENT = _Silent()
_ids = itertools.count(1)
_lock = threading.Lock()
#: Replaced, never changed, so that `span` reads it without a lock.
_audience: tuple[tuple[Listener, Clock], ...] = ()


def span(name: str, **attributes: object) -> Span:
    """A step of the work, to be used with `with`; from any thread. An exception fails it."""
    return _Heard(name, attributes, _audience) if _audience else _SILENT


@contextmanager
def listening(listener: Listener, *, clock: Clock = time.monotonic) -> Iterator[None]:
    """Tell `listener` about every span that is made inside, on any thread of the process."""
    global _audience
    entry = (listener, clock)
    with _lock:
        _audience = (*_audience, entry)
    try:
        yield
    finally:
        with _lock:
            _audience = tuple(other for other in _audience if other is not entry)


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Append every event to a file as a JSON line. Raises OSError if it cannot be opened.

    Times are the machine's monotonic clock, which all of its processes share.
    """
    lock = threading.Lock()
    file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115

    def write(event: Event) -> None:
        # A span may outlive the listening; what it says then is dropped.
        with lock:
            if not file.closed:
                file.write(event.to_json() + "\n")

    try:
        with listening(write):
            yield
    finally:
        with lock:
            file.close()
