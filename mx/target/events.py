"""A pull's event log, which callers wait on and subscribe to, and the outcome of its transfer."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from mx.core.types import Layer, Manifest
from mx.errors import ConfigError, IntegrityError, MxError, RevisionChangedError, another
from mx.runtime import unexpected
from mx.target.report import (
    LayerEvent,
    PullReport,
    TensorsOf,
    VerifiedBy,
    no_tensors,
)

T = TypeVar("T")
Callback = Callable[[LayerEvent], None]


class Outcome:
    """How a transfer ends: reported on any thread, changed on the loop on which it was made."""

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
        """End: every layer is ready."""
        self._on_loop(self._end)

    def failed(self, causes: Sequence[MxError]) -> None:
        """End: no connection is left that could finish the transfer."""

        def end() -> None:
            self.causes = causes
            self._end()

        self._on_loop(end)

    def broken(self, error: MxError) -> None:
        """End with this error: the pull can't go on."""
        self._on_loop(lambda: self._end(error))

    def raised(self, error: BaseException) -> None:
        """End with any exception, as an MxError."""
        self.broken(unexpected(error))

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Make an exception in the block the pull's failure, and suppress it: on other threads it
        would be lost, and the pull would wait for ever."""
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
    """A callback, and the events with which it is still to be called."""

    callback: Callback
    queue: deque[LayerEvent] = field(default_factory=deque)
    busy: bool = False


class EventLog:
    """One pull's events, in the order in which layers become ready. Thread-safe."""

    def __init__(self, started_s: float, tensors_of: TensorsOf = no_tensors) -> None:
        """`started_s` is when the pull was called for (monotonic); `tensors_of` returns a ready
        layer's tensors, and is passed on by events."""
        self.started_s = started_s
        self.tensors_of = tensors_of
        self.first_read_s = 0.0
        self.phase = "resolving"  # for people
        self._condition = threading.Condition()
        self._events: dict[int, LayerEvent] = {}
        self._n_layers: int | None = None
        self._manifest: Manifest | None = None
        self._told: bytes | None = None  # the identity that the caller knows
        self._kept = False
        #: How often layers that were ready became unready, since the model changed.
        self.edition = 0
        self._failing: MxError | None = None
        self._subscribers: list[_Subscriber] = []
        self._failure_watchers: list[Callable[[MxError], None]] = []
        self._wakers: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._error: MxError | None = None
        self._report: PullReport | None = None

    # -- changes ------------------------------------------------------------------------------

    def planned(self, n_layers: int, manifest: Manifest | None = None) -> None:
        """Record how many layers there are, and what describes them.

        Raises:
            IntegrityError: The caller was told of other weights.
        """
        with self._condition:
            if manifest is not None and self._told not in (None, manifest.ref.identity):
                raise IntegrityError(
                    f"the pull began with the weights {self._told.hex()}, and could only go on "
                    f"with {manifest.ref.identity.hex()}",
                    hint="pull again; NAME@PIN insists on weights",
                )
            self._n_layers, self._manifest = n_layers, manifest
            self._wake()

    def tell(self, manifest: Manifest) -> None:
        """Record that the caller knows this manifest, or its files: from now on the pull is of
        these weights."""
        with self._condition:
            self._told = manifest.ref.identity

    def reading_began(self, now_s: float) -> None:
        """Record that a connection is open, and read through."""
        self.first_read_s = self.first_read_s or now_s
        self.phase = "reading"

    def waiting(self) -> None:
        """Record that there is no source to read from, for now."""
        self.phase = "waiting for a source"

    def event(self, layer: Layer, by: VerifiedBy, revision: str = "") -> LayerEvent:
        """Return the event of a layer that is ready now."""
        at_s = time.monotonic() - self.started_s
        return LayerEvent(
            layer.index, layer.name, layer.nbytes, by.value, at_s, revision, self.tensors_of
        )

    def layer_ready(self, event: LayerEvent) -> bool:
        """Record the event, and call the subscribers. Returns True if it is the last layer's.
        Raises what a callback raises."""
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
            self._call(subscriber)
        return last

    def begin_again(self) -> bool:
        """Return True if the pull may begin again with other memory, which has no layers and no
        manifest until `planned`; False if its layers or its memory were given to the caller."""
        with self._condition:
            if self._events or self._kept:
                return False
            self._n_layers = self._manifest = None
            return True

    def begin_anew(self) -> None:
        """Record that the model has changed: no layer is ready any more, and each is reported
        again."""
        with self._condition:
            self.edition += 1 if self._events else 0
            self._events.clear()
            self._n_layers = self._manifest = self._told = None
            for subscriber in self._subscribers:
                subscriber.queue.clear()
            self._wake()

    def finished(self, report: PullReport) -> None:
        """Record that the pull is complete."""
        with self._condition:
            if self._error is None:
                self._report = report
            self._wake()

    def failing(self, error: MxError) -> None:
        """Call the failure watchers, before the pull's memory is freed and `failed` is called: no
        GPU work may wait for this pull any more, since freeing waits for the GPU."""
        with self._condition:
            self._failing = self._failing or error
            watchers, self._failure_watchers = self._failure_watchers, []
        for watcher in watchers:
            watcher(error)

    def failed(self, error: MxError) -> None:
        """Record that the pull has failed. Does nothing if it has ended before."""
        if self._report is None:
            self.failing(error)
        with self._condition:
            if self._error is None and self._report is None:
                self._error = error
            self._wake()

    # -- queries ------------------------------------------------------------------------------

    @property
    def told(self) -> bool:
        """Return True if the caller knows which weights these are."""
        return self._told is not None

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
        """Return when layer 0 was ready, since the start; 0.0 if it is not."""
        event = self._events.get(0)
        return 0.0 if event is None else event.at_s

    def last_layer_s(self) -> float:
        return max((event.at_s for event in self._events.values()), default=0.0)

    def on_layer(self, callback: Callback) -> None:
        """Call `callback` for each layer, in the order of readiness: at once on this thread for
        layers that are ready, then on the threads that verify, one call at a time. It should be
        short; an exception that it raises on those threads fails the pull."""
        subscriber = _Subscriber(callback)
        with self._condition:
            subscriber.queue.extend(self._events.values())
            self._subscribers.append(subscriber)
        self._call(subscriber)

    def on_failure(self, callback: Callable[[MxError], None]) -> None:
        """Call `callback` with the pull's error when the pull fails, before its memory is freed; at
        once if it has failed. The callback must not raise."""
        with self._condition:
            if self._failing is None:
                self._failure_watchers.append(callback)
                return
        callback(self._failing)

    def _call(self, subscriber: _Subscriber) -> None:
        while True:
            with self._condition:
                # A thread that calls it already goes on with the events that came meanwhile.
                if subscriber.busy or not subscriber.queue:
                    return
                subscriber.busy = True
                event = subscriber.queue.popleft()
            try:
                subscriber.callback(event)
            finally:
                with self._condition:
                    subscriber.busy = False

    def _layer(self, index: int, edition: int | None) -> LayerEvent | None:
        """Return the event, or None past the last layer. Raises LookupError while that is open, and
        RevisionChangedError if the model has changed since `edition`."""
        if edition is not None and edition != self.edition:
            raise RevisionChangedError(
                "the model has changed, and layers that were ready are not any more",
                hint="wait for the pull's end, or iterate again for the new revision",
            )
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

    def wait_layer(self, index: int, edition: int | None = None) -> LayerEvent | None:
        """Block until layer `index` is ready; returns None if there is no such layer. Raises the
        pull's error if it failed, and RevisionChangedError if `edition` is given and over."""
        return self._block(lambda: self._layer(index, edition))

    def keep_memory(self) -> int:
        """Block until it is known how many layers there are; from then on the pull does not begin
        again with other memory. Returns their number. Raises as `wait_layer`."""
        return self._block(self._keep)

    def _keep(self) -> int:
        if self._error is not None:
            raise another(self._error)
        if self._n_layers is None:
            raise LookupError
        self._kept = True
        return self._n_layers

    def wait_manifest(self, timeout_s: float | None = None) -> Manifest:
        """Block until the manifest is known, and `tell` of it. Raises as `wait_layer`, and
        TimeoutError, and ConfigError if there is none."""
        return self._block(self._tell_manifest, timeout_s)

    async def wait_manifest_async(self) -> Manifest:
        return await self._await(self._tell_manifest)

    def _tell_manifest(self) -> Manifest:
        if self._manifest is not None:
            self._told = self._manifest.ref.identity
            return self._manifest
        if self._error is not None:
            raise another(self._error)
        if self._report is not None:
            raise ConfigError(
                "a pull of files only from a disk reads no weights, and so has no manifest",
                hint="leave out `files_only`",
            )
        raise LookupError

    def wait_end(self, timeout_s: float | None = None) -> PullReport:
        """Block until the pull is complete. Raises as `wait_layer`, TimeoutError."""
        return self._block(self._end, timeout_s)

    def _block(self, look: Callable[[], T], timeout_s: float | None = None) -> T:
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

    async def wait_layer_async(self, index: int, edition: int | None = None) -> LayerEvent | None:
        return await self._await(lambda: self._layer(index, edition))

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
