"""The one event loop of a process's control side, on a thread of its own.

gRPC's asyncio server and clients live on it; blocking callers hand it coroutines. It starts with
its first user and stops soon after the last, so that a process that embeds mx is left as it was
found. Soon, not at once: gRPC reports the ends of closed calls a little later, and complains on
standard error if their loop is gone by then; and who pulls twice in a row keeps its loop.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from mx.errors import ConfigError

T = TypeVar("T")

LINGER_S = 0.5
_STOP_TIMEOUT_S = 2.0


class Stoppable(Protocol):
    """A server of gRPC's."""

    def stop(self, grace: float | None) -> Coroutine[Any, Any, None]: ...


_servers: weakref.WeakSet[Stoppable] = weakref.WeakSet()


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


_lock = threading.Lock()
_current: LoopThread | None = None


class LoopThread:
    """A running loop. Get it with `acquire`, give it back with `release`."""

    def __init__(self) -> None:
        self.users = 0
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
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop; from any thread but the loop's own."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine to its end and return its result. On a KeyboardInterrupt it is
        cancelled. Raises ConfigError on the loop's own thread, which would wait for itself."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise ConfigError(
                "a blocking call of mx was made in a callback of mx",
                hint="make it on a thread of your own",
            )
        future = self.submit(coroutine)
        try:
            return future.result(timeout_s)
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Stop the loop and wait; not from its own thread."""
        with contextlib.suppress(RuntimeError):  # it has just stopped by itself
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    def stop_if_idle(self) -> None:
        """On the loop: end, unless somebody came back in the meantime."""
        global _current
        with _lock:
            if self.users or _current is not self:
                return
            _current = None
        self.loop.stop()


def acquire() -> LoopThread:
    """The process's loop, started if need be. Each `acquire` wants one `release`."""
    global _current
    with _lock:
        if _current is None:
            _current = LoopThread()
        _current.users += 1
        return _current


def release(loop_thread: LoopThread) -> None:
    """Give the loop back; it ends `LINGER_S` after the last one did, or with the process."""
    with _lock:
        loop_thread.users -= 1
        if loop_thread.users:
            return
    loop_thread.loop.call_soon_threadsafe(
        loop_thread.loop.call_later, LINGER_S, loop_thread.stop_if_idle
    )


def stop_at_exit(server: Stoppable) -> None:
    """On the loop: stop this server at the interpreter's end, if nobody has until then; it would
    complain that its loop is gone. It is not kept alive for that."""
    if _current is not None and asyncio.get_running_loop() is _current.loop:
        _servers.add(server)


@atexit.register
def _stop_at_exit() -> None:
    """A daemon thread must not be in gRPC's code while the interpreter is taken apart."""
    global _current
    with _lock:
        loop_thread, _current = _current, None
    if loop_thread is None:
        return
    for server in list(_servers):
        with contextlib.suppress(TimeoutError, RuntimeError, asyncio.CancelledError):
            loop_thread.submit(server.stop(0)).result(_STOP_TIMEOUT_S)
    loop_thread.stop()
