"""An exception from a signal at any step of a call: what was made is closed, no lock is kept."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import threading
from collections.abc import Callable
from typing import Any, Self

import pytest

import mx
from mx import runtime
from mx.calls import LoopCall, Waiter
from mx.errors import ClosedError
from mx.fetching.events import EventLog

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(300)]


class Made:
    """What a call makes, which uses the loop until it is closed."""

    def __init__(self, loop: runtime.LoopThread) -> None:
        self._loop = loop
        self.closed = threading.Event()

    def close(self) -> None:
        runtime.release(self._loop)
        self.closed.set()

    def forked(self) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    "step", [runtime.LoopThread.call, LoopCall.wait, runtime.LoopThread.ended, LoopCall.take]
)
def test_what_was_made_is_closed_though_the_exception_is_kept(step: Callable[..., Any]) -> None:
    all_made: list[Made] = []

    async def make(loop: runtime.LoopThread) -> Made:
        all_made.append(Made(loop))
        return all_made[0]

    def interrupt(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is step.__code__:
            sys.settrace(None)
            raise KeyboardInterrupt

    before = sys.gettrace()
    try:
        sys.settrace(interrupt)
        with pytest.raises(KeyboardInterrupt) as kept:
            runtime.made(make)
    finally:
        sys.settrace(before)
    assert all(made.closed.wait(30) for made in all_made)
    assert kept.value


class Interrupted:
    """An exception comes out of some step: where the function number `at` begins or ends."""

    def __init__(self, at: int) -> None:
        self._left = at
        self._before = sys.gettrace()
        self.raised = False

    def __enter__(self) -> Self:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        frame.f_trace_lines = False
        if event in ("call", "return") and frame.f_code is not Interrupted.__exit__.__code__:
            self._left -= 1
            if self._left < 0:
                sys.settrace(None)
                self.raised = True
                raise KeyboardInterrupt
        return self._trace


def ends(call: Callable[[], object]) -> bool:
    """Return True if the call ends, on another thread."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(30)
    return not thread.is_alive()


def test_a_wait_for_a_pull_that_is_interrupted_anywhere_keeps_no_lock() -> None:
    for at in itertools.count():
        log = EventLog(0.0)
        with contextlib.suppress(KeyboardInterrupt, TimeoutError), Interrupted(at) as interrupted:
            log.wait_end(0.001)
        assert ends(lambda log=log: log.failed(ClosedError("closed"))), at  # type: ignore[misc]
        with pytest.raises(ClosedError):
            log.wait_end(30)
        if not interrupted.raised:
            break


# Python itself drops what comes out of a weak reference's callback, and says so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_close_that_is_interrupted_anywhere_ends_when_it_is_called_again() -> None:
    for at in itertools.count():
        router = mx.Router("127.0.0.1:1")
        with contextlib.suppress(KeyboardInterrupt), Interrupted(at) as interrupted:
            router.close()
        assert ends(router.close), at
        if not interrupted.raised:
            break


def test_a_result_is_closed_that_came_just_before_its_call_was_abandoned() -> None:
    closed, calls = threading.Event(), set[LoopCall[Any]]()

    class Result:
        def close(self) -> None:
            closed.set()

    async def work() -> Result:
        # It runs after this, the work's last step, and before what is called at the work's end.
        asyncio.get_running_loop().call_soon(call.abandon, calls)
        return Result()

    async def main() -> bool:
        calls.add(call)
        call.begin(calls)
        while calls:
            await asyncio.sleep(0)
        return await asyncio.to_thread(closed.wait, 30)

    waiter = Waiter()
    call = LoopCall(work, waiter, closes=True)
    assert asyncio.run(main())
    assert call.take() == ([], None)
