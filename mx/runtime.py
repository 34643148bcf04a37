"""The one event loop of a process's control side, on a thread of its own.

gRPC's asyncio server and clients live on it; blocking callers hand it coroutines. It starts with
its first user and stops soon after the last, so that a process that embeds mx is left as it was
found. Soon, not at once: gRPC reports the ends of closed calls a little later, and complains on
standard error if their loop is gone by then; and who pulls twice in a row keeps its loop.

What ends a process is here too: at its exit whatever is still open is closed, and in a forked
child, which has neither the loop's thread nor gRPC's, whatever was inherited is closed to it.
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
from mx.errors import ConfigError, ForkError

T = TypeVar("T")

LINGER_S = 0.5
_STOP_TIMEOUT_S = 2.0
#: How long a fork waits for gRPC's threads to end, once, after everything of mx's was closed.
_GRPC_ENDS_WITHIN_S = 3.0
#: Threads of gRPC's core, as the kernel names them.
_GRPC_THREADS = ("event_engine", "grpc_global_tim", "lifeguard", "timer_manager")


class Stoppable(Protocol):
    """A server of gRPC's."""

    def stop(self, grace: float | None) -> Coroutine[Any, Any, None]: ...


class Embedded(Protocol):
    """What uses the loop until it is closed."""

    def close(self) -> None: ...

    def forked(self) -> None:
        """In a forked child: be closed, without touching what is the parent's, and without
        waiting for a lock, which a thread of the parent's may have held."""


_servers: weakref.WeakSet[Stoppable] = weakref.WeakSet()
_open: weakref.WeakSet[Embedded] = weakref.WeakSet()


async def uncut(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` to its end, even if the caller is cancelled meanwhile; only then does the
    cancellation go on. For a thread's work, which cannot be cut, and for giving things back."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait((task,))
        if not task.cancelled():
            task.exception()  # asked for, so that nobody complains that it was not
        raise


async def in_thread(work: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Await `work(*arguments, **named)` on a thread of its own.

    `asyncio.to_thread` does that too, but not at the interpreter's end, when things are closed
    that were left open: no thread can start then, and the work is done on the loop.
    """
    # The future is kept by no frame: an exception that it holds would keep that frame in turn.
    return await asyncio.wrap_future(_started(functools.partial(work, *arguments, **named)))


def _started(work: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # whoever stops waiting does not stop the work
    arguments = (future, contextvars.copy_context(), work)
    try:
        threading.Thread(target=_work, args=arguments, name="mx-work", daemon=True).start()
    except RuntimeError:
        if threading.main_thread().is_alive():
            raise  # there are too many threads
        _work(*arguments)
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
_used = False  # since the last fork
_forked = False  # from a process in which mx was running


class LoopThread:
    """A running loop. Get it with `acquire`, give it back with `release`."""

    def __init__(self) -> None:
        self.users = 0
        self.inherited = False  # by a forked child, which has no such thread
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
            # It has no executor whose end is to be awaited: see `in_thread`.
            self.loop.close()

    def require_other_thread(self) -> None:
        """Raise ConfigError on the loop's own thread, which would wait for itself."""
        if threading.current_thread() is self._thread:
            raise ConfigError(
                "a blocking call of mx was made in a callback of mx",
                hint="make it on a thread of your own",
            )

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop; from any thread but the loop's own. Raises ForkError."""
        if self.inherited:
            coroutine.close()
            raise fork_error()
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine to its end and return its result. On a KeyboardInterrupt it is
        cancelled. Raises ConfigError on the loop's own thread, which would wait for itself, and
        ForkError in a forked child."""
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
        """Stop the loop and wait; not from its own thread."""
        with contextlib.suppress(RuntimeError):  # it has just stopped by itself
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout_s)

    def stop_if_idle(self) -> None:
        """On the loop: end, unless somebody came back in the meantime."""
        global _current
        with _lock:
            if self.users or _current is not self:
                return
            _current = None
        self.loop.stop()


def acquire() -> LoopThread:
    """The process's loop, started if need be. Each `acquire` wants one `release`.

    Raises ForkError in a child of a process in which mx was running.
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
    """Give the loop back; it ends `LINGER_S` after the last one did, or with the process."""
    with _lock:
        loop_thread.users -= 1
        if loop_thread.users or loop_thread.inherited:
            return
    with contextlib.suppress(RuntimeError):  # it was stopped, since the process ends
        loop_thread.loop.call_soon_threadsafe(
            loop_thread.loop.call_later, LINGER_S, loop_thread.stop_if_idle
        )


# -- at the interpreter's end ------------------------------------------------------------------


def opened(user: Embedded) -> None:
    """Until it is `closed` this is closed at the interpreter's end, and in a forked child."""
    _open.add(user)


def closed(user: Embedded) -> None:
    _open.discard(user)


def stop_at_exit(server: Stoppable) -> None:
    """On the loop: stop this server at the interpreter's end, if nobody has until then; it would
    complain that its loop is gone. It is not kept alive for that."""
    if _current is not None and asyncio.get_running_loop() is _current.loop:
        _servers.add(server)


@atexit.register
def _stop_at_exit() -> None:
    """A daemon thread must not be in gRPC's code while the interpreter is taken apart."""
    global _current
    for user in list(_open):
        # Whatever comes of it, the others are closed too.
        with contextlib.suppress(Exception, KeyboardInterrupt):
            user.close()
    with _lock:
        loop_thread, _current = _current, None
    if loop_thread is None:
        return
    for server in list(_servers):
        with contextlib.suppress(TimeoutError, RuntimeError, asyncio.CancelledError):
            loop_thread.submit(server.stop(0)).result(_STOP_TIMEOUT_S)
    loop_thread.stop(_STOP_TIMEOUT_S)


# -- in a forked child -------------------------------------------------------------------------


def fork_error() -> ForkError:
    """What everything of mx's raises in a child of a process in which mx was running."""
    return ForkError(
        "this process was forked from one in which mx was running, and can't use mx",
        hint="start it by multiprocessing's 'spawn' or 'forkserver', or fork it before the first "
        "call of mx, or after everything of mx was closed",
    )


_running = False  # is mx, or what it stands on, at work while a fork is under way?


def _before_fork() -> None:
    """Let a loop end that has no users any more: the child of a process that has closed
    everything may use mx. Then hold the lock, which the child will find free."""
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
    global _lock, _current, _forked
    _lock = threading.RLock()
    if not _running:
        return
    _forked = True
    inherited, _current = _current, None
    users = list(_open)
    _open.clear()
    for user in users:
        _keep_for_ever(user)
        user.forked()
    if inherited is not None:
        inherited.inherited = True
        _keep_for_ever(inherited)
        # They must not be taken apart: their cleaning up would be done to the parent's things.
        for task in asyncio.all_tasks(inherited.loop):
            _keep_for_ever(task)
    for server in list(_servers):
        _keep_for_ever(server)
    forks.give_up()


def _keep_for_ever(what: object) -> None:
    """Not even the interpreter's end takes it apart, nor what it refers to."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))


def _polling() -> bool:
    """Is gRPC's asyncio at work, for mx or for others? It does not survive a fork."""
    return any("_poll_wrapper" in thread.name for thread in threading.enumerate())


def _let_grpc_end() -> None:
    """gRPC ends its threads when its last object is gone: some are in reference cycles."""
    gc.collect()
    deadline_s = time.monotonic() + _GRPC_ENDS_WITHIN_S
    while (_polling() or _grpc_threads()) and time.monotonic() < deadline_s:
        time.sleep(0.01)


def _grpc_threads() -> bool:
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
