"""A few threads that share pieces of work, and work on a thread beside the loop."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable

import pytest

from mx import tasks
from mx.errors import ClosedError
from mx.tasks import dismiss, in_thread, unexpected
from mx.threads import Threads

ENDS = "can't create new thread at interpreter shutdown"
TOO_MANY = "can't start new thread"


@pytest.fixture
def no_thread(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let no thread start."""

    def none_starts(why: str) -> None:
        def start(_: threading.Thread) -> None:
            raise RuntimeError(why)

        monkeypatch.setattr(threading.Thread, "start", start)

    return none_starts


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "mx-some"]


def test_results_come_in_order_from_no_more_threads_than_were_asked_for() -> None:
    most, meet = [0], threading.Barrier(3)

    def work(number: int, more: int) -> int:
        if number < 3:
            meet.wait(30)  # all three work at once
        most[0] = max(most[0], len(names()))
        return number + more

    with Threads(3, "mx-some") as threads:
        assert list(threads.map(work, range(50), range(50))) == [2 * n for n in range(50)]
    assert most == [3] and not names()


@pytest.mark.parametrize("why", [ENDS, TOO_MANY])
def test_where_no_thread_starts_the_caller_does_the_work(
    no_thread: Callable[[str], None], why: str
) -> None:
    no_thread(why)
    with Threads(3, "mx-some") as threads:
        found = list(threads.map(lambda _: threading.current_thread(), range(3)))
        assert found == [threading.current_thread()] * 3
        with pytest.raises(ZeroDivisionError):
            threads.submit(lambda: 1 // 0).result()


def test_an_error_comes_in_its_place_and_keeps_nothing() -> None:
    class Work:
        def __call__(self, number: int) -> int:
            return 6 // number

    work = Work()
    gone = weakref.ref(work)
    with Threads(1, "mx-some") as threads:
        results = threads.map(work, [3, 0, 1])
        assert next(results) == 2
        with pytest.raises(ZeroDivisionError):
            next(results)
        del work, results
    assert gone() is None


def test_what_has_not_begun_is_left_out_on_shutdown() -> None:
    begun, go_on, did = threading.Event(), threading.Event(), list[int]()

    def work(number: int) -> None:
        begun.set()
        go_on.wait(30)
        did.append(number)

    threads = Threads(1, "mx-some")
    futures = [threads.submit(work, number) for number in range(3)]
    begun.wait(30)
    timer = threading.Timer(0.1, go_on.set)
    timer.start()
    threads.shutdown(cancel_futures=True)
    threads.shutdown()
    timer.join()
    assert did == [0] and [future.cancelled() for future in futures] == [False, True, True]
    with pytest.raises(RuntimeError):
        threads.submit(work, 3)


def test_work_beside_the_loop_is_done_on_it_while_the_interpreter_ends(
    no_thread: Callable[[str], None],
) -> None:
    """The main thread counts as alive for as long as it waits for executors' threads."""

    async def main() -> None:
        no_thread(ENDS)
        assert await in_thread(threading.current_thread) is threading.current_thread()
        no_thread(TOO_MANY)
        with pytest.raises(RuntimeError):
            await in_thread(threading.current_thread)

    asyncio.run(main())


def test_an_error_says_that_the_process_ends() -> None:
    found = unexpected(RuntimeError(ENDS))
    assert isinstance(found, ClosedError) and "this process ends" in str(found)
    found = unexpected(RuntimeError(TOO_MANY))
    assert "could not go on" in str(found) and "defect" not in str(found)


async def _idle_worker() -> threading.Thread:
    """Have some work done, and return its thread, which waits for more."""
    worker = await in_thread(threading.current_thread)
    while all(each is not worker for each, _ in tasks._idle) and worker.is_alive():
        await asyncio.sleep(0)
    return worker


async def _both_idle() -> None:
    """A result is there before its thread waits for more."""
    async with asyncio.timeout(30):
        while len(tasks._idle) < 2:
            await asyncio.sleep(0)


def test_work_goes_to_a_thread_that_waits_for_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_idle_s", 60.0)

    async def main() -> None:
        worker = await _idle_worker()
        meeting = threading.Barrier(2)

        def meet() -> threading.Thread:
            meeting.wait(30)
            return threading.current_thread()

        both = await asyncio.gather(in_thread(meet), in_thread(meet))
        assert worker in both and both[0] is not both[1]
        await _both_idle()
        with pytest.raises(ZeroDivisionError):  # which does not end it
            await in_thread(divmod, 1, 0)
        await _both_idle()
        dismiss()
        for thread in both:
            thread.join(30)
            assert not thread.is_alive()

    asyncio.run(main())


def test_a_thread_without_work_ends() -> None:
    async def main() -> None:
        worker = await in_thread(threading.current_thread)
        worker.join(30)
        assert not worker.is_alive() and not tasks._idle

    asyncio.run(main())


def test_a_thread_that_waits_for_work_keeps_nothing_of_what_it_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks, "_idle_s", 60.0)

    class Result:
        pass

    async def main() -> None:
        for _ in range(2):  # the first work of the thread, and more
            kept = weakref.ref(await in_thread(Result))
            await asyncio.sleep(0)  # the loop's own step keeps it until then
            while not tasks._idle:
                await asyncio.sleep(0)
            assert kept() is None
        dismiss()

    asyncio.run(main())
