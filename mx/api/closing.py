"""Closing what uses the loop: once, to its end, and at the latest when the process ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from mx import runtime

Step = Callable[[], None]


class Closable:
    """Uses the loop, which it was given, until it is closed. Also a context manager, blocking and
    async."""

    def __init__(self, loop: runtime.LoopThread) -> None:
        """Called last by the subclass's constructor: nothing is closed that has not begun."""
        self._loop = loop
        self._steps: list[Step] | None = None  # that are left, once it is being closed
        self._step_lock = threading.RLock()
        self._uses_loop = True
        runtime.opened(self)

    def _closing_steps(self) -> list[Step]:
        """What is to be done, in this order; a step that is interrupted is done again."""
        raise NotImplementedError

    def close(self) -> None:
        """Close it. Idempotent; a close that was interrupted goes on when it is called again.

        Each step is tried, whatever becomes of the others. Raises the first error of theirs, and
        ConfigError in a callback of mx's.
        """
        if not self._loop.inherited:
            self._loop.require_other_thread()
        failures: list[Exception] = []
        with self._step_lock:
            if self._steps is None:
                self._steps = [*self._closing_steps(), self._release_loop]
            while self._steps:
                step = self._steps[0]
                try:
                    step()
                except Exception as error:  # noqa: BLE001 - raised when the others are done
                    failures.append(error)
                if self._steps and self._steps[0] is step:  # else another call has done it
                    del self._steps[0]
        if failures:
            raise failures[0]

    def forked(self) -> None:
        """In a forked child: be closed."""
        self._step_lock = threading.RLock()
        self._steps = []

    def _require_own(self) -> None:
        """Raise ForkError in a forked child."""
        if self._loop.inherited:
            raise runtime.fork_error()

    def _awaiting(self, work: Callable[[], Coroutine[Any, Any, object]]) -> Step:
        """A step that waits until `work` has run on the loop. The work goes on if the wait is
        interrupted, and the step waits for it again."""
        started: list[Future[object]] = []

        def step() -> None:
            if not started:
                started.append(self._loop.submit(work()))
            started[0].result()

        return step

    def _release_loop(self) -> None:
        uses_loop, self._uses_loop = self._uses_loop, False
        if uses_loop:
            runtime.release(self._loop)
        runtime.closed(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close)
