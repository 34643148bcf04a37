"""The one event loop of a process's control side, on its own thread.

gRPC's asyncio server and clients run on it; blocking callers submit coroutines to it. It starts
with its first user and stops soon after the last, so that mx leaves an embedding process as it
found it. It does not stop at once: gRPC reports the ends of closed calls a little later, and logs
errors if their loop is gone by then; and two pulls in a row use the same loop.

This module also handles exits and forks: at a process's exit it closes whatever is still open; a
forked child has neither the loop's thread nor gRPC's, so everything inherited is closed in it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import ctypes
import functools
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from mx import forks
from mx.errors import ClosedError, ConfigError, ForkError, LocalError, MxError

T = TypeVar("T")

LINGER_S = 0.5
#: How long an exit waits for the loop's thread, which is quick unless the machine is full.
_STOP_TIMEOUT_S = 10.0
#: How long the first fork after everything of mx was closed waits for gRPC's threads to end.
_GRPC_ENDS_WITHIN_S = 3.0
#: Threads of gRPC's core, as the kernel names them.
_GRPC_THREADS = ("event_engine", "grpc_global_tim", "lifeguard", "timer_manager")


class Stoppable(Protocol):
    """A server of gRPC."""

    def stop(self, grace: float | None) -> Coroutine[Any, Any, None]: ...


class Embedded(Protocol):
    """A user of the loop: a pull or a source, until it is closed."""

    def close(self) -> None:
        """Close it. Blocks."""

    def forked(self) -> None:
        """Count as closed in a forked child, without using anything of the parent, and without
        waiting for a lock, which a thread of the parent may have held."""


_servers: weakref.WeakSet[Stoppable] = weakref.WeakSet()
_open: weakref.WeakSet[Embedded] = weakref.WeakSet()
_workers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_libraries: set[str] = set()


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


def unexpected(error: BaseException) -> MxError:
    """Return any exception as an MxError, with the original as its cause."""
    if isinstance(error, MxError):
        return error
    found: MxError
    if isinstance(error, asyncio.CancelledError):
        found = ClosedError("the pull was closed before it was complete")
    elif isinstance(error, OSError | MemoryError):
        found = LocalError(f"this process could not go on: {error or type(error).__name__}")
    else:
        found = LocalError(
            f"unexpected {type(error).__name__}: {error}",
            hint="if it comes from no code of yours, it is a defect: please report the traceback",
        )
    found.__cause__ = error
    return found


async def in_thread(work: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Await `work(*arguments, **named)` on a new thread.

    Unlike `asyncio.to_thread` this works at the interpreter's end, when open things are closed: no
    thread can start then, and the work runs on the loop.
    """
    # No frame keeps the future: an exception in it would keep that frame in turn.
    return await asyncio.wrap_future(_started(functools.partial(work, *arguments, **named)))


def _started(work: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # a caller that stops waiting does not stop the work
    arguments = (future, contextvars.copy_context(), work)
    worker = threading.Thread(target=_work, args=arguments, name="mx-work", daemon=True)
    try:
        worker.start()
    except RuntimeError:
        if threading.main_thread().is_alive():
            raise  # there are too many threads
        _work(*arguments)
    else:
        _workers.add(worker)
    return future


def _work(future: Future[T], context: contextvars.Context, work: Callable[[], T]) -> None:
    try:
        future.set_result(context.run(work))
    except BaseException as error:  # noqa: BLE001 - it is raised where the work is awaited
        future.set_exception(error)
    finally:
        del future, work


_lock = threading.RLock()
_current: LoopThread | None = None
_stopping: LoopThread | None = None  # the last that stopped by itself, whose thread may still run
_used = False  # since the last fork
_forked = False  # from a process in which mx was running


class LoopThread:
    """A running loop. `acquire` returns it, and `release` returns it to the process."""

    def __init__(self) -> None:
        self.users = 0
        self.inherited = False  # True in a forked child, which does not have the thread
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="mx-loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            pending = asyncio.all_tasks(self.loop)
            for task in pending:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            # There is no executor to shut down: see `in_thread`.
            self.loop.close()

    def require_other_thread(self) -> None:
        """Refuse a blocking call on the loop's own thread, which would wait for itself.

        Raises:
            ConfigError: This is the loop's thread.
        """
        if threading.current_thread() is self._thread:
            raise ConfigError(
                "a blocking call of mx was made in a callback of mx",
                hint="make it on a thread of your own",
            )

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop, from any other thread.

        Raises:
            ForkError: This process is a forked child.
        """
        if self.inherited:
            coroutine.close()
            raise fork_error()
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine to its end and return its result. A KeyboardInterrupt cancels it.

        Args:
            coroutine: The coroutine.
            timeout_s: How long to wait before it is cancelled, with TimeoutError; None: forever.

        Raises:
            ConfigError: This is the loop's own thread, which would wait for itself.
            ForkError: This process is a forked child.
        """
        try:
            self.require_other_thread()
        except ConfigError:
            coroutine.close()
            raise
        future = self.submit(coroutine)
        try:
            return future.result(timeout_s)
        except BaseException:
            future.cancel()
            raise

    def stop(self, timeout_s: float | None = None) -> None:
        """Stop the loop and wait for its end. Do not call this on its own thread."""
        with contextlib.suppress(RuntimeError):  # it has just stopped by itself
            self.loop.call_soon_threadsafe(self.loop.stop)
        self.join(timeout_s)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the end of a loop that is stopping. Do not call this on its own thread."""
        self._thread.join(timeout_s)

    def stop_if_idle(self) -> None:
        """Stop the loop if it has no user. Call this on the loop."""
        global _current, _stopping
        with _lock:
            if self.users or _current is not self:
                return
            _current, _stopping = None, self
        self.loop.stop()


def acquire() -> LoopThread:
    """Return the process's loop, and start it if necessary. Each `acquire` needs one `release`.

    Raises:
        ForkError: This process was forked from one in which mx was running.
    """
    global _current, _used
    with _lock:
        if _forked:
            raise fork_error()
        _used = True
        if _current is None:
            _current = LoopThread()
        _current.users += 1
        return _current


def release(loop_thread: LoopThread) -> None:
    """End one use of the loop. It stops `LINGER_S` after the last use, or with the process."""
    with _lock:
        loop_thread.users -= 1
        if loop_thread.users or loop_thread.inherited:
            return
    with contextlib.suppress(RuntimeError):  # it is stopped already: the process is exiting
        loop_thread.loop.call_soon_threadsafe(
            loop_thread.loop.call_later, LINGER_S, loop_thread.stop_if_idle
        )


# -- at the interpreter's end ------------------------------------------------------------------


def opened(user: Embedded) -> None:
    """Close this user at the interpreter's end and in a forked child, unless it is `closed`."""
    _open.add(user)


def closed(user: Embedded) -> None:
    """Undo `opened`."""
    _open.discard(user)


def stop_at_exit(server: Stoppable) -> None:
    """Stop this server at the interpreter's end, if it is still alive: otherwise it would log that
    its loop is gone. Call this on the loop. It keeps only a weak reference."""
    if _current is not None and asyncio.get_running_loop() is _current.loop:
        _servers.add(server)


@atexit.register
def _stop_at_exit() -> None:
    """Close everything: a daemon thread must not run gRPC's code while the interpreter ends."""
    global _current
    for user in list(_open):
        # An error must not keep the others from being closed.
        with contextlib.suppress(Exception, KeyboardInterrupt):
            user.close()
    with _lock:
        loop_thread, _current = _current, None
    if loop_thread is not None:
        for server in list(_servers):
            with contextlib.suppress(TimeoutError, RuntimeError, asyncio.CancelledError):
                loop_thread.submit(server.stop(0)).result(_STOP_TIMEOUT_S)
        loop_thread.stop(_STOP_TIMEOUT_S)
    elif _stopping is not None:
        _stopping.join(_STOP_TIMEOUT_S)
    # Some work is no longer awaited, but not over. Where the interpreter ends beneath a thread that
    # is in C++ code, such as torch's as it frees tensors, the process aborts.
    until_s = time.monotonic() + _STOP_TIMEOUT_S
    for worker in list(_workers):
        worker.join(max(0.0, until_s - time.monotonic()))
    calm = 0 if _libraries else 2
    while calm < 2 and time.monotonic() < until_s:
        time.sleep(0.01)  # without the interpreter's lock, for which such a thread may wait
        calm = 0 if _runs_any(tuple(_libraries)) else calm + 1


def settle_at_exit(thread_name: str) -> None:
    """Let a library's own threads come to rest before the interpreter ends, which would abort the
    process beneath one that wants its lock. `thread_name` is how the kernel's names of them
    begin."""
    _libraries.add(thread_name)


def _runs_any(names: tuple[str, ...]) -> bool:
    """Return True if a thread with such a name runs, or waits for a processor."""
    for number in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{number}/stat") as stat:
            name, _, rest = stat.read().partition("(")[2].rpartition(")")
            if name.startswith(names) and rest.split()[0] == "R":
                return True
    return False


# -- in a forked child -------------------------------------------------------------------------


def fork_error() -> ForkError:
    """Return the error that calls of mx raise in a child of a process in which mx was running."""
    return ForkError(
        "this process was forked from one in which mx was running, and can't use mx",
        hint="start it by multiprocessing's 'spawn' or 'forkserver', or fork it before the first "
        "call of mx, or after everything of mx was closed",
    )


_running = False  # True if mx or gRPC's asyncio is in use during the current fork


def _before_fork() -> None:
    """Stop a loop without users, so that the child of a process that has closed everything may use
    mx. Then hold the lock, so that no other thread holds it during the fork."""
    global _current, _used, _running
    with _lock:
        idle = _current if _current is not None and not _current.users else None
        if idle is not None:
            _current = None
        wait, _used = _used and _current is None, _used and _current is not None
    if idle is not None:
        idle.stop()
    if wait:
        _let_grpc_end()
    _lock.acquire()
    _running = _forked or _current is not None or _polling()


def _after_fork_in_parent() -> None:
    _lock.release()


def _after_fork_in_child() -> None:
    global _lock, _current, _stopping, _forked
    _lock = threading.RLock()
    if not _running:
        return
    _forked = True
    inherited, _current, _stopping = _current, None, None
    users = list(_open)
    _open.clear()
    for user in users:
        _keep_for_ever(user)
        user.forked()
    if inherited is not None:
        inherited.inherited = True
        _keep_for_ever(inherited)
        # They must not be destroyed: their clean-up would act on the parent's objects.
        for task in asyncio.all_tasks(inherited.loop):
            _keep_for_ever(task)
    for server in list(_servers):
        _keep_for_ever(server)
    forks.give_up()


def _keep_for_ever(what: object) -> None:
    """Leak an object, so that not even the interpreter's end destroys it or what it refers to."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))


def _polling() -> bool:
    """Return True if gRPC's asyncio is in use, by mx or others. It does not survive a fork."""
    return any("_poll_wrapper" in thread.name for thread in threading.enumerate())


def _let_grpc_end() -> None:
    """Wait for gRPC's threads, which end with its last object; some are in reference cycles."""
    gc.collect()
    deadline_s = time.monotonic() + _GRPC_ENDS_WITHIN_S
    while (_polling() or _grpc_threads()) and time.monotonic() < deadline_s:
        time.sleep(0.01)


def _grpc_threads() -> bool:
    """Return True if a thread of gRPC's core is running."""
    for number in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{number}/comm") as comm:
            if comm.read().strip() in _GRPC_THREADS:
                return True
    return False


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
