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
import ctypes
import gc
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import grpc.aio

from mx import forks
from mx.calls import LoopCall, Waiter
from mx.errors import ForkError, MxError
from mx.tasks import (
    THREADS_BYTES,
    beside,
    calling_back,
    dismiss,
    in_thread,
    no_thread_room,
    require_other_thread,
    set_by,
    uncut,
    unexpected,
    workers,
)

#: What others import from here, too.
__all__ = ["beside", "in_thread", "set_by", "uncut", "unexpected"]

T = TypeVar("T")

#: A loop that was not used for so long, and at most twice as long, stops.
LINGER_S = 0.3
#: How long an interrupted call waits for the end of what it has begun, before its exception is
#: raised. The rest goes on by itself.
_ABANDONED_WITHIN_S = 5.0
#: How long an exit waits for the loop's thread, which is quick unless the machine is full.
_STOP_TIMEOUT_S = 10.0
#: How long the first fork after everything of mx was closed waits for gRPC's threads to end.
_GRPC_ENDS_WITHIN_S = 3.0
#: Threads of gRPC's core, as the kernel names them.
_GRPC_THREADS = ("event_engine", "grpc_global_tim", "lifeguard", "timer_manager")


class LoopUser(Protocol):
    """A user of the loop: a pull or a source, until it is closed."""

    def close(self) -> None:
        """Close it. Blocks."""

    def forked(self) -> None:
        """Count as closed in a forked child, without using anything of the parent, and without
        waiting for a lock, which a thread of the parent may have held."""


E = TypeVar("E", bound=LoopUser)

_servers: weakref.WeakSet[grpc.aio.Server] = weakref.WeakSet()
_open: weakref.WeakSet[LoopUser] = weakref.WeakSet()
_libraries: set[str] = set()


_lock = threading.RLock()
_current: LoopThread | None = None
_stopping: LoopThread | None = None  # the last that stopped by itself, whose thread may still run
_used = False  # since the last fork
_forked = False  # from a process in which mx was running


class LoopThread:
    """A running loop, once it is started. `acquire` returns it, and `release` returns it to the
    process."""

    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        self.users = 0
        self.inherited = False  # True in a forked child, which does not have the thread
        self._calls: set[LoopCall[Any]] = set()
        self._was_used = True  # since the loop was last looked at
        self._thread: threading.Thread | None = None
        self._entered = threading.Lock()
        self._error: BaseException | None = None
        self._ready = threading.Lock()  # until the loop runs
        self._ready.acquire()

    def start(self) -> None:
        """Start the thread, and wait until the loop runs. Idempotent; an interrupted start goes on
        when it is called again."""
        if self._thread is None:
            threading.Thread(target=self._run, name="mx-loop", daemon=True).start()
        with self._ready:
            if self._error is not None:
                raise self._error

    def _run(self) -> None:
        if not self._entered.acquire(blocking=False):
            return  # an interrupted start was repeated
        self._thread = threading.current_thread()
        try:
            with contextlib.ExitStack() as undo:
                self.loop = asyncio.new_event_loop()
                undo.callback(self.loop.close)
                try:  # as `require_thread_room`
                    mmap.mmap(-1, THREADS_BYTES, mmap.MAP_PRIVATE, mmap.PROT_READ).close()
                except OSError as error:
                    raise no_thread_room(error) from error
                asyncio.set_event_loop(self.loop)
                # gRPC's poller is a thread, and none can start once the interpreter ends: a channel
                # that is made then would crash the process (3.12). So it runs as long as the loop.
                grpc.aio.init_grpc_aio()  # type: ignore[attr-defined]  # not in its stubs
                undo.pop_all()
        except BaseException as error:  # noqa: BLE001 - raised where the loop is started
            self._error = error
            return
        finally:
            self._ready.release()
        self.loop.call_later(LINGER_S, self._look)
        try:
            with calling_back(loop=True):
                self.loop.run_forever()
        finally:
            pending = asyncio.all_tasks(self.loop)
            for task in pending:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            # There is no executor to shut down: see `in_thread`.
            grpc.aio.shutdown_grpc_aio()  # type: ignore[attr-defined]
            self.loop.close()

    def _look(self) -> None:
        """Abandon the calls of threads that are gone; stop the loop if it has not been used since
        the last look."""
        global _current, _stopping
        for call in list(self._calls):
            call.look(self._calls)
        with _lock:
            was_used, self._was_used = self._was_used, self.busy
            if not was_used and not self._was_used and _current is self:
                _current, _stopping = None, self
                self.loop.stop()
                return
        self.loop.call_later(LINGER_S, self._look)

    @property
    def busy(self) -> bool:
        """True if the loop has a user, or a thread waits for it."""
        return bool(self.users or self._calls)

    @property
    def is_current(self) -> bool:
        """True on the loop's own thread."""
        return threading.current_thread() is self._thread

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop, from any other thread.

        Raises:
            ForkError: This process is a forked child.
        """
        if self.inherited:
            coroutine.close()
            raise fork_error()
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call this on the loop, soon. It takes no lock.

        Raises:
            ForkError: This process is a forked child.
        """
        if self.inherited:
            raise fork_error()
        self.loop.call_soon_threadsafe(callback)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine to its end and return its result. An exception from a signal's handler
        cancels it.

        Args:
            coroutine: The coroutine.
            timeout_s: How long to wait before it is cancelled, with TimeoutError; None: forever.

        Raises:
            ConfigError: This is the loop's own thread, which would wait for itself.
            ForkError: This process is a forked child.
        """
        try:
            require_other_thread(off_loop=True)
            if self.inherited:
                raise fork_error()
        except MxError:
            coroutine.close()
            raise
        return _wait_for(lambda: coroutine, self, timeout_s, closes=False)

    def call(self, call: LoopCall[Any]) -> None:
        """Begin a call. The loop does not stop until it has ended."""
        self._calls.add(call)
        self.loop.call_soon_threadsafe(call.begin, self._calls)

    def ended(self, call: LoopCall[Any]) -> None:
        """Forget a call whose result is being taken."""
        self._calls.discard(call)

    def touch(self) -> None:
        """Go on for `LINGER_S` at least. Call this under the lock."""
        self._was_used = True

    def abandon(self, call: LoopCall[Any]) -> None:
        """Abandon a call, whether it has begun or not."""
        self.loop.call_soon_threadsafe(call.abandon, self._calls)

    def stop(self, timeout_s: float | None = None) -> None:
        """Stop the loop and wait for its end. Do not call this on its own thread."""
        if self._entered.acquire(blocking=False):
            return  # it was not started, and can't be any more
        # A start that an interruption has left goes on.
        if not self._ready.acquire(timeout=-1 if timeout_s is None else timeout_s):
            return
        self._ready.release()
        if self._error is not None:
            return
        with contextlib.suppress(RuntimeError):  # it has just stopped by itself
            self.loop.call_soon_threadsafe(self.loop.stop)
        self.join(timeout_s)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the end of a loop that is stopping. Do not call this on its own thread."""
        if self._thread is not None:
            self._thread.join(timeout_s)


def _the_loop() -> LoopThread:
    """Return the process's loop, and start it if necessary. Call this under the lock."""
    global _current, _used
    if _forked:
        raise fork_error()
    _used = True
    if _current is None:
        _current = LoopThread()
    try:
        _current.start()
    except Exception as error:  # an interrupt leaves it to the next call
        _current = None
        raise unexpected(error) from error
    return _current


def _wait_for(
    work: Callable[[], Coroutine[Any, Any, T]],
    loop_thread: LoopThread | None,
    timeout_s: float | None,
    *,
    closes: bool,
) -> T:
    """Run work on the loop, that of the process if none is given, and return its result."""
    waiter = Waiter()
    call = LoopCall(work, waiter, closes=closes)
    try:
        with _lock:
            if loop_thread is None:
                loop_thread = _the_loop()
            loop_thread.call(call)
        if not call.wait(timeout_s):
            raise TimeoutError
        loop_thread.ended(call)
        result, error = call.take()  # last: until then the loop closes the result
    except BaseException:
        if loop_thread is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop_thread.abandon(call)
                call.wait(_ABANDONED_WITHIN_S)
        raise
    if error is not None:
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame
    return result[0]


def run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on the process's loop, which is started if necessary, and return its result.

    Args:
        work: Returns the coroutine.

    Raises:
        ConfigError: This is the loop's own thread, which would wait for itself.
        ForkError: This process was forked from one in which mx was running.
    """
    require_other_thread(off_loop=True)
    return _wait_for(work, None, None, closes=False)


def made(make: Callable[[LoopThread], Coroutine[Any, Any, E]]) -> E:
    """Make an object on the process's loop, which is started if necessary, and return it.

    The loop owns it until this thread has it: if an exception from a signal's handler ends the
    wait, the work is cancelled, and what it makes all the same is closed.

    Args:
        make: Makes the object, given the loop, which is acquired for it.

    Raises:
        ConfigError: This is the loop's own thread, which would wait for itself.
        ForkError: This process was forked from one in which mx was running.
    """

    async def work() -> E:
        loop_thread = acquire()
        try:
            return await make(loop_thread)
        except BaseException:
            release(loop_thread)
            raise

    require_other_thread(off_loop=True)
    return _wait_for(work, None, None, closes=True)


def submit(work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
    """Begin what `run` runs, and return its future, which cancels it.

    Args:
        work: Returns the coroutine.

    Raises:
        ForkError: This process was forked from one in which mx was running.
    """

    async def using() -> T:
        loop_thread = acquire()
        try:
            return await work()
        finally:
            release(loop_thread)

    with _lock:
        loop_thread = _the_loop()
        loop_thread.touch()  # it does not stop before the work has begun
        return loop_thread.submit(using())


def acquire() -> LoopThread:
    """Return the process's loop, and start it if necessary. Each `acquire` needs one `release`;
    where an exception from a signal may come between, use `run` or `made`.

    Raises:
        ForkError: This process was forked from one in which mx was running.
    """
    with _lock:
        loop_thread = _the_loop()
        loop_thread.users += 1
        return loop_thread


def release(loop_thread: LoopThread) -> None:
    """End one use of the loop. It stops soon after the last use, or with the process."""
    with _lock:
        loop_thread.users -= 1


# -- at the interpreter's end ------------------------------------------------------------------


def opened(user: LoopUser) -> None:
    """Close this user at the interpreter's end and in a forked child, unless it is `closed`."""
    _open.add(user)


def closed(user: LoopUser) -> None:
    """Undo `opened`."""
    _open.discard(user)


def users() -> list[LoopUser]:
    """Return the open users of the loop."""
    while True:
        with contextlib.suppress(RuntimeError):  # another thread has just closed one
            return list(_open)


def stop_at_exit(server: grpc.aio.Server) -> None:
    """Stop this server at the interpreter's end, if it is still alive: otherwise it would log that
    its loop is gone. Call this on the loop. It keeps only a weak reference."""
    if _current is not None and asyncio.get_running_loop() is _current.loop:
        _servers.add(server)


@atexit.register
def _stop_at_exit() -> None:
    with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C: there is no one to tell
        _stop_all()


def _stop_all() -> None:
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
    dismiss(for_good=True)
    for worker in list(workers):
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
        idle = _current if _current is not None and not _current.busy else None
        if idle is not None:
            _current = None
        wait, _used = _used and _current is None, _used and _current is not None
    if idle is not None:
        idle.stop()
    dismiss()
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
