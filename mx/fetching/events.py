"""A pull's event log, which callers wait on and subscribe to, and what each edition records in it.

The log has one present `EditionReadiness`. An edition's threads record in their own
(`mx.fetching.edition`): once another one is the present, what they record reaches neither a waiter
nor a subscriber.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from mx.core.types import Manifest
from mx.errors import (
    ConfigError,
    IntegrityError,
    LocalError,
    MxError,
    RevisionChangedError,
    another,
)
from mx.fetching.report import LayerEvent, PullReport
from mx.tasks import Latch, calling_back, require_other_thread

T = TypeVar("T")
Callback = Callable[[LayerEvent], None]
Raised = Callable[[BaseException], None]


def changed() -> RevisionChangedError:
    """Return the error of who looks at an edition that is over."""
    return RevisionChangedError(
        "the model has changed, and layers that were ready are not any more",
        hint="wait for the pull's end, or iterate again for the new revision",
    )


def _ignored(error: BaseException) -> None:
    """Of an event that was reported before: its callback's error is raised where it is added."""


@dataclass(eq=False, slots=True)
class EditionReadiness:
    """What is known and ready of one edition; the log's lock guards it."""

    events: dict[int, LayerEvent] = field(default_factory=dict)  # that were reported
    pending: dict[int, _EventReport] = field(default_factory=dict)  # to be reported, in this order
    reporting: bool = False  # a thread reports them
    n_layers: int | None = None
    manifest: Manifest | None = None
    told: bytes | None = None  # the identity that the caller knows
    given: bool = False  # the caller has seen a layer
    kept: bool = False  # the memory was given to the caller before its layers were ready


@dataclass(slots=True)
class _EventReport:
    """An event, of which edition it is, and who learns that a callback has refused it."""

    event: LayerEvent
    ready: EditionReadiness
    raised: Raised


@dataclass(slots=True)
class _Subscriber:
    """A callback, and the events with which it is still to be called."""

    callback: Callback
    queue: deque[_EventReport] = field(default_factory=deque)
    busy: bool = False


class EventLog:
    """One pull's events, in the order in which layers become ready. Thread-safe."""

    def __init__(self, started_s: float) -> None:
        """`started_s` is when the pull was called for (monotonic)."""
        self.started_s = started_s
        self.first_read_s = 0.0
        self.phase = "resolving"  # for people
        # No Condition, whose methods are Python code: it would stay locked where an exception from
        # a signal comes out of them.
        self._lock = threading.RLock()
        self._sleepers: set[Latch] = set()  # of the threads that wait
        self._present = EditionReadiness()
        self._failing: MxError | None = None
        self._subscribers: list[_Subscriber] = []
        self._failure_watchers: list[Callable[[MxError], None]] = []
        self._wakers: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._error: MxError | None = None
        self._report: PullReport | None = None

    # -- changes ------------------------------------------------------------------------------

    def begin_again(self, *, unseen: bool = False) -> EditionReadiness | None:
        """Begin another edition of the same weights, with other memory, and return it: it has no
        layers and no manifest until `planned`. Returns None if layers of the present one are ready
        (`unseen`: and the caller has seen one), or its memory was given to the caller."""
        with self._lock:
            present = self._present
            if present.kept or (present.given if unseen else present.events):
                return None
            self._present = EditionReadiness(told=present.told)
            return self._present

    def begin_newer(self) -> EditionReadiness | None:
        """As `begin_again`, with whatever weights the model has by now. Returns None also if the
        caller knows which weights these are."""
        with self._lock:
            if self._present.given or self._present.kept or self._present.told is not None:
                return None
            return self.begin_anew()

    def begin_anew(self) -> EditionReadiness:
        """Begin an edition of whatever weights the model has by now, and return it: no layer is
        ready any more, and each is reported again."""
        with self._lock:
            self._present = EditionReadiness()
            for subscriber in self._subscribers:
                subscriber.queue.clear()
            self._wake()
            return self._present

    def planned(self, ready: EditionReadiness, n_layers: int, manifest: Manifest | None) -> None:
        """See `mx.fetching.edition.EditionLog`."""
        with self._lock:
            if manifest is not None and ready.told not in (None, manifest.ref.identity):
                raise IntegrityError(
                    f"the pull began with the weights {ready.told.hex()}, and could only go on "
                    f"with {manifest.ref.identity.hex()}",
                    hint="pull again; NAME@PIN insists on weights",
                )
            ready.n_layers, ready.manifest = n_layers, manifest
            self._wake()

    def layer_ready(self, ready: EditionReadiness, event: LayerEvent, raised: Raised) -> bool:
        """See `mx.fetching.edition.EditionLog`."""
        with self._lock:
            if event.index in ready.events or event.index in ready.pending:
                return False
            ready.pending[event.index] = _EventReport(event, ready, raised)
            if ready.reporting:  # that thread goes on with it: this one does not wait for callbacks
                return False
            ready.reporting = True
        try:
            while (subscribers := self._report_next(ready)) is not None:
                with calling_back() if subscribers else contextlib.nullcontext():
                    for subscriber in subscribers:
                        self._call(subscriber, ready)
        except BaseException:
            ready.reporting = False
            raise
        return len(ready.events) == ready.n_layers

    def _report_next(self, ready: EditionReadiness) -> list[_Subscriber] | None:
        """Store the next layer, wake those who wait for it, and return the subscribers to call
        before the one after it is reported; None if there is none."""
        with self._lock:
            if not ready.pending:
                ready.reporting = False
                return None
            report = ready.pending.pop(next(iter(ready.pending)))
            ready.events[report.event.index] = report.event
            if ready is not self._present:
                return []
            for subscriber in self._subscribers:
                subscriber.queue.append(report)
                ready.given = True
            self._wake()
            return list(self._subscribers)

    def reading_began(self, now_s: float) -> None:
        """Record that a connection is open, and read through."""
        self.first_read_s = self.first_read_s or now_s
        self.phase = "reading"

    def waiting(self) -> None:
        """Record that there is no source to read from, for now."""
        self.phase = "waiting for a source"

    def finished(self, report: PullReport) -> None:
        """Record that the pull is complete."""
        with self._lock:
            if self._error is None:
                self._report = report
            self._subscribers.clear()  # they may refer to the pull
            self._wake()

    def failing(self, error: MxError) -> None:
        """Call the failure watchers, before the pull's memory is freed and `failed` is called: no
        GPU work may wait for this pull any more, since freeing waits for the GPU."""
        with self._lock:
            self._failing = self._failing or error
            watchers, self._failure_watchers = self._failure_watchers, []
        for watcher in watchers:
            watcher(error)

    def failed(self, error: MxError) -> None:
        """Record that the pull has failed. Does nothing if it has ended before."""
        if self._report is None:
            self.failing(error)
        with self._lock:
            if self._error is None and self._report is None:
                self._error = error
            self._subscribers.clear()
            self._wake()

    # -- queries ------------------------------------------------------------------------------

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
    def complete(self) -> bool:
        """True if every layer is ready; the pull may go on to write or compare them."""
        return len(self._present.events) == self._present.n_layers

    def on_layer(self, callback: Callback) -> None:
        """Call `callback` for each layer, in the order of readiness: at once on this thread for
        layers that are ready, then on the threads that verify, one call at a time. It should be
        short; an exception that it raises on those threads fails the pull. One that it raises here
        is passed on, and it is called no more."""
        subscriber = _Subscriber(callback)
        with self._lock:
            ready = self._present
            subscriber.queue += (
                _EventReport(each, ready, _ignored) for each in ready.events.values()
            )
            ready.given |= bool(ready.events)
            if not self.ended:
                self._subscribers.append(subscriber)
        try:
            self._call(subscriber, None)
        except BaseException:
            with self._lock, contextlib.suppress(ValueError):  # of a pull that has ended
                self._subscribers.remove(subscriber)
            raise

    def on_failure(self, callback: Callable[[MxError], None]) -> None:
        """Call `callback` with the pull's error when the pull fails, before its memory is freed; at
        once if it has failed. The callback must not raise."""
        with self._lock:
            if self._failing is None:
                self._failure_watchers.append(callback)
                return
        callback(self._failing)

    def _call(self, subscriber: _Subscriber, ready: EditionReadiness | None) -> None:
        """Call it with what is queued. Raises what it raises for events of this edition (None: of
        any); the others' errors are reported to those whose events they are."""
        while True:
            with self._lock:
                # A thread that calls it already goes on with the events that came meanwhile.
                if subscriber.busy or not subscriber.queue:
                    return
                subscriber.busy = True
                report = subscriber.queue.popleft()
            try:
                subscriber.callback(report.event)
            except BaseException as error:
                if ready is None:
                    raise
                if isinstance(error, asyncio.CancelledError):  # else it would look like `close`
                    refusal = LocalError("a callback of `on_layer` raised CancelledError")
                    refusal.__cause__ = error
                    error = refusal
                if report.ready is ready:
                    raise error
                report.raised(error)
            finally:
                with self._lock:
                    subscriber.busy = False

    def _layer(self, index: int) -> LayerEvent | None:
        """Return the event, or None past the last layer. Raises LookupError while that is open."""
        ready = self._present
        if index in ready.events:
            ready.given = True
            return ready.events[index]
        if self._error is not None:
            raise another(self._error)
        if ready.n_layers is not None and index >= ready.n_layers:
            return None
        raise LookupError

    def _end(self) -> PullReport:
        if self._error is not None:
            raise another(self._error)
        if self._report is None:
            raise LookupError
        return self._report

    def wait_layer(self, index: int) -> LayerEvent | None:
        """Block until layer `index` is ready; returns None if there is no such layer. Raises the
        pull's error if it failed."""
        return self.block(lambda: self._layer(index))

    def layers(self) -> LayerReader:
        """Return what reads the layers one after the other, all of one edition."""
        return LayerReader(self)

    def next_layer(self, reader: LayerReader) -> LayerEvent | None:
        """See `LayerReader`. Called under the lock; raises LookupError while it is open."""
        if reader.ready not in (None, self._present):
            raise changed()
        event = self._layer(reader.index)
        if event is not None:
            reader.ready = self._present
            reader.index += 1
        return event

    def keep_memory(self) -> int:
        """Block until it is known how many layers there are; from then on the pull does not begin
        again with other memory. Returns their number. Raises as `wait_layer`."""
        return self.block(self._keep)

    def _keep(self) -> int:
        if self._error is not None:
            raise another(self._error)
        if self._present.n_layers is None:
            raise LookupError
        self._present.kept = True
        return self._present.n_layers

    def wait_manifest(self, timeout_s: float | None = None) -> Manifest:
        """Block until the manifest is known, and `tell` of it. Raises as `wait_layer`, and
        TimeoutError, and ConfigError if there is none."""
        return self.block(self._tell_manifest, timeout_s)

    async def wait_manifest_async(self) -> Manifest:
        return await self.wait(self._tell_manifest)

    def _tell_manifest(self) -> Manifest:
        ready = self._present
        if ready.manifest is not None:
            ready.told = ready.manifest.ref.identity
            return ready.manifest
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
        return self.block(self._end, timeout_s)

    def block(self, look: Callable[[], T], timeout_s: float | None = None) -> T:
        """Block until `look`, called under the lock, does not raise LookupError; return what it
        does. Raises TimeoutError, and ConfigError in a callback, for which it would wait."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            woken = Latch()
            with self._lock:
                try:
                    return look()
                except LookupError:
                    require_other_thread()
                    self._sleepers.add(woken)
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            try:
                if not woken.wait(left_s):
                    raise TimeoutError("the pull is still running")
            finally:
                with self._lock:
                    self._sleepers.discard(woken)

    async def wait_end_async(self) -> PullReport:
        return await self.wait(self._end)

    async def wait(self, look: Callable[[], T]) -> T:
        """As `block`, in the caller's own event loop."""
        waker = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._wakers.add(waker)
        try:
            while True:
                waker[1].clear()
                with self._lock:
                    try:
                        return look()
                    except LookupError:
                        pass
                await waker[1].wait()
        finally:
            with self._lock:
                self._wakers.discard(waker)

    def _wake(self) -> None:
        sleepers, self._sleepers = self._sleepers, set()
        for sleeper in sleepers:
            sleeper.set()
        for loop, event in self._wakers:
            with contextlib.suppress(RuntimeError):  # its loop was closed while it waited
                loop.call_soon_threadsafe(event.set)


class LayerReader:
    """Where one iteration over a pull's layers is. Its first event decides of which edition it is.

    `next` blocks until the next layer is ready; it returns None past the last one, and raises the
    pull's error if it failed, RevisionChangedError if the edition is over.
    """

    def __init__(self, log: EventLog) -> None:
        self.index = 0
        self.ready: EditionReadiness | None = None
        self._log = log

    def next(self) -> LayerEvent | None:
        return self._log.block(lambda: self._log.next_layer(self))

    async def next_async(self) -> LayerEvent | None:
        return await self._log.wait(lambda: self._log.next_layer(self))
