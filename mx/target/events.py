"""What happens in a pull: its event log, which callers wait on and subscribe to, and how a transfer
ends."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from mx.errors import MxError, another
from mx.target.report import (
    LayerEvent,
    PullReport,
    TensorsOf,
    no_tensors,
    unexpected,
)

T = TypeVar("T")
Callback = Callable[[LayerEvent], None]


class Outcome:
    """What becomes of a transfer: told on any thread, known on the loop, where it is made."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.changed = asyncio.Event()
        self.lost: dict[int, MxError] = {}  # connections that the transfer gave up
        self.ended = False
        self.failure: MxError | None = None
        self.causes: Sequence[MxError] | None = None  # of a transfer that has run out of sources

    def connection_lost(self, connection: int, error: MxError) -> None:
        self._on_loop(lambda: self.lost.update({connection: error}))

    def complete(self) -> None:
        """Every layer was announced."""
        self._on_loop(self._end)

    def failed(self, causes: Sequence[MxError]) -> None:
        """Nothing is left that could finish the transfer."""

        def end() -> None:
            self.causes = causes
            self._end()

        self._on_loop(end)

    def broken(self, error: MxError) -> None:
        """The pull can't go on."""
        self._on_loop(lambda: self._end(error))

    def raised(self, error: BaseException) -> None:
        """So it can't: something was raised on a thread that others own."""
        self.broken(unexpected(error))

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Report whatever the block raises as the pull's failure, and don't raise it: for work on
        threads that others own, where an error would be lost and the pull would wait for ever."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - reported
            self.raised(error)

    def _end(self, error: MxError | None = None) -> None:
        self.failure = self.failure or error
        self.ended = True

    def _on_loop(self, change: Callable[[], object]) -> None:
        def run() -> None:
            change()
            self.changed.set()

        with contextlib.suppress(RuntimeError):  # the loop was closed: the pull is over
            self._loop.call_soon_threadsafe(run)


@dataclass(slots=True)
class _Subscriber:
    """A callback and what it has not been told yet."""

    callback: Callback
    queue: deque[LayerEvent] = field(default_factory=deque)
    busy: bool = False


class EventLog:
    """Thread-safe. Events come in the order in which layers become ready; `event(i)` is the
    i-th layer's. `started_s` (monotonic) is when the pull was called for."""

    def __init__(self, started_s: float, tensors_of: TensorsOf = no_tensors) -> None:
        """`tensors_of` gives the tensors of a layer that is ready; events hand it on."""
        self.started_s = started_s
        self.tensors_of = tensors_of
        self.first_read_s = 0.0
        self.phase = "resolving"  # for people
        self._condition = threading.Condition()
        self._events: dict[int, LayerEvent] = {}
        self._n_layers: int | None = None
        self._subscribers: list[_Subscriber] = []
        self._failure_watchers: list[Callable[[MxError], None]] = []
        self._wakers: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._error: MxError | None = None
        self._report: PullReport | None = None

    # -- told ---------------------------------------------------------------------------------

    def planned(self, n_layers: int) -> None:
        with self._condition:
            self._n_layers = n_layers
            self._wake()

    def reading_began(self, now_s: float) -> None:
        """A connection is open, and read through."""
        self.first_read_s = self.first_read_s or now_s
        self.phase = "reading"

    def waiting(self) -> None:
        """There is no source to read from, for now."""
        self.phase = "waiting for a source"

    def layer_ready(self, event: LayerEvent) -> bool:
        """Record and announce. True if it was the last one. Raises what a callback raises."""
        with self._condition:
            if event.index in self._events:
                return False
            self._events[event.index] = event
            for subscriber in self._subscribers:
                subscriber.queue.append(event)
            subscribers = list(self._subscribers)
            last = len(self._events) == self._n_layers
            self._wake()
        for subscriber in subscribers:
            self._tell(subscriber)
        return last

    def finished(self, report: PullReport) -> None:
        with self._condition:
            if self._error is None:
                self._report = report
            self._wake()

    def failing(self, error: MxError) -> None:
        """It will be `failed`, and its memory goes before: nothing may wait on the device for
        this pull any more, since freeing waits for the device."""
        with self._condition:
            watchers, self._failure_watchers = self._failure_watchers, []
        for watcher in watchers:
            watcher(error)

    def failed(self, error: MxError) -> None:
        if self._report is None:
            self.failing(error)
        with self._condition:
            if self._error is None and self._report is None:
                self._error = error
            self._wake()

    # -- asked --------------------------------------------------------------------------------

    @property
    def error(self) -> MxError | None:
        return self._error

    @property
    def report(self) -> PullReport | None:
        return self._report

    @property
    def ended(self) -> bool:
        return self._error is not None or self._report is not None

    @property
    def layers_ready(self) -> int:
        return len(self._events)

    def is_ready(self, layer: int) -> bool:
        return layer in self._events

    def first_layer_s(self) -> float:
        """When layer 0 was ready, since the start; 0.0 without layers."""
        event = self._events.get(0)
        return 0.0 if event is None else event.at_s

    def last_layer_s(self) -> float:
        return max((event.at_s for event in self._events.values()), default=0.0)

    def on_layer(self, callback: Callback) -> None:
        """Call `callback` for each layer in the order of readiness, those that are ready already
        at once, on this thread; then on the threads that verify, one call at a time: keep it
        short. What it raises there fails the pull."""
        subscriber = _Subscriber(callback)
        with self._condition:
            subscriber.queue.extend(self._events.values())
            self._subscribers.append(subscriber)
        self._tell(subscriber)

    def on_failure(self, callback: Callable[[MxError], None]) -> None:
        """Call `callback` with the pull's error when it fails, before its memory is freed; now, if
        it has failed. It must not raise."""
        with self._condition:
            if self._error is None:
                self._failure_watchers.append(callback)
                return
        callback(self._error)

    def _tell(self, subscriber: _Subscriber) -> None:
        while True:
            with self._condition:
                # A thread that is at it sees to what has come meanwhile.
                if subscriber.busy or not subscriber.queue:
                    return
                subscriber.busy = True
                event = subscriber.queue.popleft()
            try:
                subscriber.callback(event)
            finally:
                with self._condition:
                    subscriber.busy = False

    def _layer(self, index: int) -> LayerEvent | None:
        """The event, or None at the end; raises LookupError while neither is known."""
        if index in self._events:
            return self._events[index]
        if self._error is not None:
            raise another(self._error)
        if self._n_layers is not None and index >= self._n_layers:
            return None
        raise LookupError

    def _end(self) -> PullReport:
        if self._error is not None:
            raise another(self._error)
        if self._report is None:
            raise LookupError
        return self._report

    def wait_layer(self, index: int, timeout_s: float | None = None) -> LayerEvent | None:
        """Block until layer `index` is ready; None if there is no such layer.

        Raises the pull's error if it failed, TimeoutError.
        """
        return self._block(lambda: self._layer(index), timeout_s)

    def wait_planned(self, timeout_s: float | None = None) -> int:
        """How many layers there are, as soon as it is known. Raises the pull's error."""
        return self._block(self._planned, timeout_s)

    def _planned(self) -> int:
        if self._error is not None:
            raise another(self._error)
        if self._n_layers is None:
            raise LookupError
        return self._n_layers

    def wait_end(self, timeout_s: float | None = None) -> PullReport:
        return self._block(self._end, timeout_s)

    def _block(self, look: Callable[[], T], timeout_s: float | None) -> T:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._condition:
            while True:
                try:
                    return look()
                except LookupError:
                    pass
                left_s = None if deadline_s is None else deadline_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    raise TimeoutError("the pull is still running")
                self._condition.wait(left_s)

    async def wait_layer_async(self, index: int) -> LayerEvent | None:
        return await self._await(lambda: self._layer(index))

    async def wait_end_async(self) -> PullReport:
        return await self._await(self._end)

    async def _await(self, look: Callable[[], T]) -> T:
        waker = (asyncio.get_running_loop(), asyncio.Event())
        with self._condition:
            self._wakers.add(waker)
        try:
            while True:
                waker[1].clear()
                with self._condition:
                    try:
                        return look()
                    except LookupError:
                        pass
                await waker[1].wait()
        finally:
            with self._condition:
                self._wakers.discard(waker)

    def _wake(self) -> None:
        self._condition.notify_all()
        for loop, event in self._wakers:
            with contextlib.suppress(RuntimeError):  # its loop was closed while it waited
                loop.call_soon_threadsafe(event.set)
