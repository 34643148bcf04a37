"""Calls of the loop: work on it that another thread waits for, and that belongs to the loop."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from mx.errors import ClosedError
from mx.tasks import in_thread, uncut

log = logging.getLogger(__name__)

T = TypeVar("T")


class Waiter:
    """What only the frames of a waiting thread refer to: once it is gone, its call is abandoned."""

    __slots__ = ("__weakref__",)


class LoopCall(Generic[T]):
    """Work on the loop that another thread waits for.

    An exception from a signal's handler may come out of any step of the waiting thread, but out of
    none of the loop's. So this belongs to the loop, which begins the work, and ends it if the other
    thread abandons it, or is gone. That thread has the result once it has taken it.
    """

    def __init__(
        self, work: Callable[[], Coroutine[Any, Any, T]], waiter: Waiter, *, closes: bool
    ) -> None:
        """
        Args:
            work: Returns the coroutine to run.
            waiter: The waiting thread's.
            closes: Whether to close a result that was not taken.
        """
        self._work = work
        self._closes = closes
        self._waiter = weakref.ref(waiter)
        self._task: asyncio.Task[None] | None = None  # while it runs
        self._begun = self._abandoned = self._taken = False
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._over = threading.Lock()  # held until the work has ended
        self._over.acquire()

    # -- on the waiting thread --------------------------------------------------------------------

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the end of the work; return False if `timeout_s` seconds pass first."""
        if timeout_s is None:
            with self._over:
                return True
        if self._over.acquire(timeout=min(max(0.0, timeout_s), threading.TIMEOUT_MAX)):
            self._over.release()
            return True
        return False

    def take(self) -> tuple[list[T], BaseException | None]:
        """Return the result, in a list, or what the work has raised. It is the caller's from now
        on."""
        result, error = self._result, self._error
        self._taken = True
        self._result, self._error = [], None
        return result, error

    # -- on the loop ------------------------------------------------------------------------------

    def begin(self, calls: set[LoopCall[Any]]) -> None:
        """Begin the work, unless it was abandoned. Its end takes the call from `calls`, unless the
        result is still to be taken."""
        if not self._begun:
            self._begun = True
            coroutine = self._work()
            self._task = asyncio.get_running_loop().create_task(self._run(coroutine))
            self._task.add_done_callback(functools.partial(self._end, calls, coroutine))

    async def _run(self, coroutine: Coroutine[Any, Any, T]) -> None:
        result = await coroutine
        if self._abandoned and self._closes:
            await _close(result)
        elif not self._abandoned:
            self._result = [result]

    def _end(
        self,
        calls: set[LoopCall[Any]],
        coroutine: Coroutine[Any, Any, T],
        task: asyncio.Task[None],
    ) -> None:
        coroutine.close()  # if it was cancelled before its first step
        # Else only the end of the loop cancels it.
        error = ClosedError("this process ends") if task.cancelled() else task.exception()
        self._task = None
        if self._abandoned:  # maybe after the work's last step
            self._discard(calls)
        else:
            self._error = error
        self._over.release()

    def abandon(self, calls: set[LoopCall[Any]]) -> None:
        """Cancel the work, or close its result, unless that was taken. Idempotent."""
        if self._abandoned or self._taken:
            calls.discard(self)
            return
        self._abandoned = True
        if self._task is not None:
            self._task.cancel()
        elif not self._begun:
            self._begun = True
            self._work().close()  # else Python warns that it was never awaited
            calls.discard(self)
            self._over.release()
        else:
            self._discard(calls)

    def _discard(self, calls: set[LoopCall[Any]]) -> None:
        """Close the result, if there is one, and keep nothing: who was interrupted may keep this
        in a traceback."""
        result, self._result, self._error = self._result, [], None
        calls.discard(self)
        if result and self._closes:
            closing = asyncio.get_running_loop().create_task(_close(result[0]))
            _closes.add(closing)
            closing.add_done_callback(_closes.discard)

    def look(self, calls: set[LoopCall[Any]]) -> None:
        """Abandon the work if the thread that waits for it is gone."""
        if self._taken or (self._waiter() is None and not self._abandoned):
            self.abandon(calls)


#: Closes of results that were not taken: asyncio keeps only weak references to tasks.
_closes: set[asyncio.Task[None]] = set()


async def _close(result: Any) -> None:
    try:
        await uncut(in_thread(result.close))
    except Exception as error:  # noqa: BLE001 - there is no caller
        log.warning("closing what an interrupted call has made failed: %s", str(error))
