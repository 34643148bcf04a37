"""Work on an event loop and beside it: what is awaited to its end, and what runs on a thread."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import math
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from mx.errors import ClosedError, LocalError, MxError

T = TypeVar("T")

#: What Python says where there are too many threads.
_STARTS_NONE = "can't start new thread"
#: A worker waits so long for more work: a pull has several pieces of it, one soon after the other.
#: To start a thread holds its loop up until that has run, for some ms where all cores are busy.
IDLE_S = 0.1

_Job = tuple[Future[Any], contextvars.Context, Callable[[], Any]]

#: The threads of `in_thread`, some of which may still run when they are no longer awaited.
workers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class Latch:
    """Something that happens once, for which a thread waits. Unlike `threading.Event` it is not
    broken by an exception from a signal while it waits."""

    def __init__(self) -> None:
        self.is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Let who waits go on. Idempotent; called on one thread."""
        if not self.is_set:
            self.is_set = True
            self._lock.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is set, for `timeout_s` at most; return whether it is. One thread waits."""
        timeout_s = -1 if timeout_s is None else max(0.0, timeout_s)
        if not self.is_set and self._lock.acquire(timeout=timeout_s):
            self._lock.release()
        return self.is_set


async def uncut(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` to its end, even if the caller is cancelled, and only then pass on the
    cancellation. For work on a thread, which cannot be cancelled, and for cleaning up."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait((task,))
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it
        raise


async def beside(work: Coroutine[Any, Any, None], *others: Coroutine[Any, Any, None]) -> None:
    """Run the others while `work` runs, and cancel them at its end."""
    failed: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            helpers = [tasks.create_task(each) for each in others]
            await work
            for helper in helpers:
                helper.cancel()
    except BaseExceptionGroup as group:
        failed = group.exceptions[0]
    if failed is not None:
        raise failed


async def set_by(event: asyncio.Event, at_s: float) -> bool:
    """Wait until the event is set, at most until this time of the monotonic clock. Returns True if
    it is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(None if at_s == math.inf else at_s):
            await event.wait()
    return event.is_set()


def _ends(error: BaseException) -> bool:
    """Return True if no thread can start, or none of an executor, since the interpreter ends."""
    return isinstance(error, RuntimeError) and "interpreter shutdown" in str(error)


def unexpected(error: BaseException) -> MxError:
    """Return any exception as an MxError, with the original as its cause."""
    if isinstance(error, MxError):
        return error
    found: MxError
    if isinstance(error, asyncio.CancelledError):
        found = ClosedError("the pull was closed before it was complete")
    elif _ends(error):
        found = ClosedError("this process ends, and can start no thread any more")
    elif isinstance(error, OSError | MemoryError) or _STARTS_NONE in str(error):
        found = LocalError(f"this process could not go on: {error or type(error).__name__}")
    else:
        found = LocalError(
            f"unexpected {type(error).__name__}: {error}",
            hint="if it comes from no code of yours, it is a defect: please report the traceback",
        )
    found.__cause__ = error
    return found


class _Worker(threading.Thread):
    """Does one piece of work after the other, and ends after `IDLE_S` without any."""

    def __init__(self, job: _Job) -> None:
        super().__init__(name="mx-work", daemon=True)
        self._job: _Job | None = job
        self._wake = threading.Event()

    def give(self, job: _Job) -> bool:
        """Give it work while it is idle. Returns False if it has some. Call this under the lock."""
        if self._job is not None:
            return False
        self._job = job  # if an interrupt comes now, it sees this when it has waited
        self._wake.set()
        return True

    def end(self) -> None:
        """End it while it is idle, unless it has work. Call this under the lock."""
        self._wake.set()

    def run(self) -> None:
        while self._job is not None:
            job, self._job = self._job, None
            _work(*job)
            del job
            with _idle.lock:
                self._wake.clear()
                _idle.workers.append(self)
            self._wake.wait(_idle.seconds)
            with _idle.lock:
                _idle.workers.remove(self)


class _Idle:
    """The workers that have nothing to do."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal's handler may fork within
        self.workers: list[_Worker] = []
        self.seconds = IDLE_S

    def reset(self) -> None:
        """Forget them, in a forked child, which has none."""
        self.lock = threading.RLock()
        self.workers.clear()


_idle = _Idle()
os.register_at_fork(after_in_child=_idle.reset)


def dismiss(*, for_good: bool = False) -> None:
    """End the workers that have nothing to do. `for_good`: let none wait for more work any more."""
    with _idle.lock:
        if for_good:
            _idle.seconds = 0.0
        ending = list(_idle.workers)
        for worker in ending:
            worker.end()
    for worker in ending:
        worker.join(IDLE_S)  # not for one that has been given work


async def in_thread(work: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Await `work(*arguments, **named)` on a thread of its own.

    Unlike `asyncio.to_thread` this works at the interpreter's end, when open things are closed: no
    thread can start then, and the work runs on the loop.
    """
    # No frame keeps the future: an exception in it would keep that frame in turn.
    return await asyncio.wrap_future(started(functools.partial(work, *arguments, **named)))


def started(work: Callable[[], T]) -> Future[T]:
    """Begin `work()` on a thread, as `in_thread` does. Returns the future of its result."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # a caller that stops waiting does not stop the work
    job = (future, contextvars.copy_context(), work)
    with _idle.lock:
        if any(worker.give(job) for worker in reversed(_idle.workers)):
            return future
    worker = _Worker(job)
    try:
        worker.start()
    except RuntimeError as error:
        if not _ends(error):
            raise  # there are too many threads
        _work(*job)
    else:
        workers.add(worker)
    return future


def _work(future: Future[T], context: contextvars.Context, work: Callable[[], T]) -> None:
    try:
        future.set_result(context.run(work))
    except BaseException as error:  # noqa: BLE001 - it is raised where the work is awaited
        future.set_exception(error)
    finally:
        del future, work
