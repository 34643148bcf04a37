"""Work on an event loop and beside it: what is awaited to its end, and what runs on a thread."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from mx.errors import CapacityError, ClosedError, ConfigError, LocalError, MxError
from mx.units import MIB

T = TypeVar("T")

#: What Python says where there are too many threads.
_STARTS_NONE = "can't start new thread"
#: What the first threads of gRPC's core and of mx map: glibc reserves a stack of 8 MiB for each,
#: and 64 MiB of heap.
THREADS_BYTES = 320 * MIB
#: A worker waits so long for more work: a pull has several pieces of it, one soon after the other.
#: To start a thread holds its loop up until that has run, for some ms where all cores are busy.
IDLE_S = 0.1

_Job = tuple[Future[Any], contextvars.Context, Callable[[], Any]]

_lock = threading.RLock()  # a signal's handler may fork within
#: The workers that have nothing to do, each with where its next work, or None for its end, is put.
_idle: list[tuple[threading.Thread, SimpleQueue[_Job | None]]] = []
_idle_s = IDLE_S
#: The threads of `in_thread`, some of which may still run when they are no longer awaited.
workers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


#: Of a thread of mx's that may run code of the user's: `calls`, and `loop` for the loop's own.
_of_thread = threading.local()


@contextlib.contextmanager
def calling_back(*, loop: bool = False) -> Iterator[None]:
    """Mark this thread as one of mx's that calls users' code. `loop`: it is the loop's."""
    before = {**vars(_of_thread)}
    _of_thread.calls, _of_thread.loop = True, loop or before.get("loop", False)
    try:
        yield
    finally:
        vars(_of_thread).clear()
        vars(_of_thread).update(before)


def require_other_thread(*, off_loop: bool = False) -> None:
    """Refuse a call in a callback on a thread of mx's which would wait for that thread.

    Args:
        off_loop: It waits for nothing but the loop: other threads of mx's may make it.

    Raises:
        ConfigError: This is such a thread.
    """
    if getattr(_of_thread, "loop" if off_loop else "calls", False):
        raise ConfigError(
            "a blocking call of mx was made in a callback of mx",
            hint="make it on a thread of your own",
        )


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
        timeout_s = -1 if timeout_s is None else min(max(0.0, timeout_s), threading.TIMEOUT_MAX)
        if not self.is_set and self._lock.acquire(timeout=timeout_s):
            self._lock.release()
        return self.is_set


def require_thread_room() -> None:
    """Check that threads can have their memory: where gRPC's core can start none, it says nothing,
    and its calls wait for ever.

    Raises:
        CapacityError: The process may not map so much more.
    """
    try:
        mmap.mmap(-1, THREADS_BYTES, mmap.MAP_PRIVATE, mmap.PROT_READ).close()
    except OSError as error:
        raise no_thread_room(error) from error


def no_thread_room(error: OSError) -> CapacityError:
    """Return the error for threads whose memory can't be mapped."""
    return CapacityError(
        f"this process may not map {THREADS_BYTES // MIB} MiB for its threads: {error.strerror}",
        hint="raise the limit of its address space (ulimit -v)",
    )


async def uncut(work: Coroutine[Any, Any, T], stop: Callable[[], object] | None = None) -> T:
    """Await `work` to its end, even if the caller is cancelled, and only then pass on the
    cancellation. For work on a thread, which cannot be cancelled, and for cleaning up. `stop`, if
    given, is called at the cancellation, and makes the end come soon."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if stop is not None:
            stop()
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


async def end_tasks(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel tasks, those that there are, and wait until all have ended; what they raise is
    dropped."""
    given = list(filter(None, tasks))
    for each in given:
        each.cancel()
    await asyncio.gather(*given, return_exceptions=True)


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
        found = LocalError(f"this process could not go on: {str(error) or type(error).__name__}")
    else:
        found = LocalError(
            f"unexpected {type(error).__name__}: {error}",
            hint="if it comes from no code of yours, it is a defect: please report the traceback",
        )
    found.__cause__ = error
    return found


def _forget_workers() -> None:
    """Forget the parent's workers in a forked child, which has none."""
    global _lock
    _lock = threading.RLock()
    _idle.clear()


os.register_at_fork(after_in_child=_forget_workers)


def dismiss(*, for_good: bool = False) -> None:
    """End the workers that have nothing to do. `for_good`: let none wait for more work any more."""
    global _idle_s
    with _lock:
        if for_good:
            _idle_s = 0.0
        ending = [*_idle]
        _idle.clear()
        for _, jobs in ending:
            jobs.put(None)
    for worker, _ in ending:
        worker.join(IDLE_S)


def _work_on(jobs: SimpleQueue[_Job | None]) -> None:
    """Do the work that is there, and more that is given within `_idle_s` after each."""
    me, job = (threading.current_thread(), jobs), jobs.get()
    while job is not None:
        _work(*job)
        job = None  # nothing keeps its result while this waits
        with _lock:
            _idle.append(me)
        try:
            job = jobs.get(timeout=_idle_s)
        except Empty:
            with _lock:
                if me in _idle:
                    _idle.remove(me)
                    return
            with contextlib.suppress(Empty):  # who gives work may be interrupted
                job = jobs.get(timeout=IDLE_S)


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
    with _lock:
        if _idle:
            _idle.pop()[1].put(job)
            return future
    jobs = SimpleQueue[_Job | None]()
    jobs.put(job)
    worker = threading.Thread(target=_work_on, args=(jobs,), name="mx-work", daemon=True)
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
