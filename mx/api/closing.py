"""Closes objects that use the loop: once, to the end, and at the latest when the process ends.

One that is dropped without `close` is closed in the background, and warns if it still had work to
do. Nothing of mx refers to such an object for longer than a call of it lasts: tasks, callbacks and
threads refer to its parts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import warnings
from collections.abc import Callable, Coroutine
from typing import Any, Self

from mx import runtime
from mx.contexts import OwnContext
from mx.tasks import Latch, require_other_thread

log = logging.getLogger(__name__)

Step = Callable[[], None]

#: Closes of dropped objects that run: asyncio keeps only weak references to tasks.
_closes: set[asyncio.Task[None]] = set()


class Closable(OwnContext):
    """An object that uses the loop until it is closed; a context manager, blocking and async."""

    def __init__(self, loop: runtime.LoopThread) -> None:
        """Register the object for closing at exit.

        The subclass's constructor calls this last, so that an object that failed to start is never
        closed.

        Args:
            loop: The loop, acquired for this object, which releases it when it is closed.
        """
        self._loop = loop
        self._steps: list[Step] | None = None  # the remaining steps; None before `close`
        self._step_lock = threading.RLock()
        self._uses_loop = True
        runtime.opened(self)

    def _closing_steps(self) -> list[Step]:
        """Return the steps that close the object, in order. An interrupted step runs again."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the object. Idempotent; an interrupted close goes on when it is called again.

        Every step runs, even if another one fails.

        Raises:
            ConfigError: Called from a callback on mx's own thread.
            Exception: The first error of a step, after all steps have run.
        """
        if not self._loop.inherited:
            require_other_thread()
        failures: list[Exception] = []
        with self._step_lock:
            if self._steps is None:
                self._steps = [*self._closing_steps(), self._awaiting(self._release_loop)]
            while self._steps:
                step = self._steps[0]
                try:
                    step()
                except Exception as error:  # noqa: BLE001 - raised after the other steps
                    failures.append(error)
                if self._steps and self._steps[0] is step:  # else another call has done it
                    del self._steps[0]
        if failures:
            raise failures[0]

    def _label(self) -> str:
        """Return what to call the object as it is dropped. Takes no lock, see `__del__`."""
        return f"<{type(self).__name__}>"

    def _idle(self) -> bool:
        """Return True if the object has nothing more to do, and may be dropped without a word.
        Takes no lock, see `__del__`."""
        return False

    def __del__(self) -> None:
        """Close the object in the background.

        The collector may call this on any thread, between any two steps of it. So nothing here
        waits or takes a lock, which the interrupted thread may hold: it reads plain attributes, and
        hands the object over to the loop. An exception from a signal's handler may come here, too,
        where no caller gets it: the object is handed over again.
        """
        try:
            self._dropped()
        except BaseException:
            self._dropped()
            raise

    def _dropped(self) -> None:
        """Hand the object over, see `__del__`."""
        steps = getattr(self, "_steps", [])  # without any it was never opened
        if steps != [] and not self._loop.inherited:
            with contextlib.suppress(RuntimeError):  # the loop has ended, as the interpreter does
                self._hand_over()

    def _hand_over(self) -> None:
        self._loop.loop.call_soon_threadsafe(_close_dropped, self)
        runtime.opened(self)  # again: the collector has cleared weak references to it
        if not self._idle():
            what = f"{self._label()} was dropped, and is closed"
            warning = f"{what}: close it, or use it in a `with` block"
            warnings.warn(warning, ResourceWarning, stacklevel=3, source=self)

    def _close_off_loop(self) -> None:
        """Close the dropped object, unless this is the loop's thread: no other thread can start
        once the interpreter ends, and then the exit closes what is open (see `runtime.opened`)."""
        if not self._loop.is_current:
            self.close()

    def forked(self) -> None:
        """Mark the object as closed in a forked child."""
        self._step_lock = threading.RLock()
        self._steps = []

    def _require_own(self) -> None:
        """Raise ForkError in a forked child."""
        if self._loop.inherited:
            raise runtime.fork_error()

    def _awaiting(self, work: Callable[[], Coroutine[Any, Any, object]]) -> Step:
        """Return a step that runs `work` on the loop and waits for it.

        If the wait is interrupted the work goes on, and the step waits for it again.
        """
        ended = Latch()  # a future would keep its lock if an exception comes as it is entered
        tasks: list[asyncio.Task[object]] = []

        def begin() -> None:
            if not tasks:
                tasks.append(asyncio.get_running_loop().create_task(work()))
                tasks[0].add_done_callback(lambda _: ended.set())

        def step() -> None:
            if not ended.is_set:
                self._loop.call_soon(begin)
                ended.wait()
            tasks[0].result()

        return step

    async def _release_loop(self) -> None:
        # On the loop, where no exception from a signal comes between.
        if self._uses_loop:
            self._uses_loop = False
            runtime.release(self._loop)
            runtime.closed(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)


def _close_dropped(dropped: Closable) -> None:
    """Close an object on a thread, from the loop, which lasts until then: the object uses it."""
    task = asyncio.get_running_loop().create_task(_closed(dropped), name="mx-close")
    _closes.add(task)
    task.add_done_callback(_closes.discard)


async def _closed(dropped: Closable) -> None:
    try:
        await runtime.in_thread(dropped._close_off_loop)
    except Exception as error:  # noqa: BLE001 - there is no caller
        log.warning("closing a dropped object failed: %s", str(error))
