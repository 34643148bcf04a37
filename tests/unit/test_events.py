"""The events of a pull, for each kind of waiter."""

from __future__ import annotations

import asyncio
import math
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace

import pytest

from mx.core.digest import document_digest
from mx.core.grid import Layer
from mx.core.layout import TensorSpec
from mx.core.manifest import encode, plan_layout
from mx.core.types import Manifest, Packaging
from mx.errors import (
    ClosedError,
    ConfigError,
    IntegrityError,
    LocalError,
    MxError,
    PeerBusyError,
    RevisionChangedError,
)
from mx.fetching.edition import EditionLog
from mx.fetching.events import EditionReadiness, EventLog
from mx.fetching.report import LayerEvent, PullReport, VerifiedBy, no_edition
from mx.tasks import require_other_thread


def landed(index: int) -> tuple[Layer, VerifiedBy]:
    """Return a layer, and how it was verified."""
    return Layer(index, f"layer.{index}", 1, 0, (), 0), VerifiedBy.DIGEST


def edition(state: EventLog, ready: EditionReadiness | None = None) -> EditionLog:
    """Return what an edition records in: of a new one, or of this one."""
    return EditionLog(state, ready or state.begin_anew(), no_edition)


def report() -> PullReport:
    return PullReport("m", "00", "00", 1, 1.0, 1.0, 1, "digest")


async def test_a_callback_is_called_once_per_layer_in_order_never_twice_at_a_time() -> None:
    state = EventLog(0.0)
    now = edition(state)
    now.planned(4)
    now.layer_ready(*landed(2))
    called: list[int] = []
    entered, go_on = threading.Event(), threading.Event()

    def slow(event: LayerEvent) -> None:
        if event.index == 0:
            entered.set()
            assert go_on.wait(10)
        called.append(event.index)

    state.on_layer(slow)
    assert called == [2]
    last: list[bool] = []
    first = threading.Thread(target=lambda: last.append(now.layer_ready(*landed(0))))
    first.start()
    assert entered.wait(10)
    # While one thread is in the callback, others leave their events to it, and go on.
    assert not now.layer_ready(*landed(3))
    assert not now.layer_ready(*landed(1))
    assert called == [2]
    # What the callback was called with is there for all, what comes after it for none.
    seen = state.layers()
    assert [now.is_ready(layer) for layer in range(4)] == [True, False, True, False]
    assert (first_seen := seen.next()) is not None and first_seen.index == 0
    with pytest.raises(TimeoutError):
        state.block(lambda: state.next_layer(seen), 0.05)
    go_on.set()
    first.join()
    assert called == [2, 0, 3, 1] and last == [True]
    assert not now.layer_ready(*landed(1))
    assert called == [2, 0, 3, 1]


async def test_an_exception_of_a_callback_is_raised_where_the_event_or_the_callback_is_added() -> (
    None
):
    state = EventLog(0.0)
    now = edition(state)
    now.planned(2)

    def refuse(event: LayerEvent) -> None:
        raise RuntimeError(event.name)

    state.on_layer(refuse)
    with pytest.raises(RuntimeError, match=r"layer\.0"):
        now.layer_ready(*landed(0))
    assert now.is_ready(0)
    with pytest.raises(RuntimeError, match=r"layer\.0"):
        state.on_layer(refuse)
    with pytest.raises(RuntimeError, match=r"layer\.1"):  # it was not left busy
        now.layer_ready(*landed(1))


async def test_a_callback_that_refuses_a_layer_of_before_is_called_no_more() -> None:
    state = EventLog(0.0)
    now = edition(state)
    now.planned(2)
    now.layer_ready(*landed(0))
    called: list[int] = []

    def refuse(event: LayerEvent) -> None:
        called.append(event.index)
        raise RuntimeError(event.name)

    with pytest.raises(RuntimeError, match=r"layer\.0"):
        state.on_layer(refuse)
    assert now.layer_ready(*landed(1))
    assert called == [0]


async def test_a_callbacks_cancelled_error_is_named_as_the_cause() -> None:
    state = EventLog(0.0)
    now = edition(state)
    now.planned(1)

    def cancelled(event: LayerEvent) -> None:
        raise asyncio.CancelledError

    state.on_layer(cancelled)
    with now.guard():
        now.layer_ready(*landed(0))
    await asyncio.sleep(0)
    assert isinstance(now.failure, LocalError) and "raised CancelledError" in now.failure.message
    assert isinstance(now.failure.__cause__, asyncio.CancelledError)


async def test_a_callback_that_waits_for_the_pull_is_refused_at_once() -> None:
    state = EventLog(0.0)
    now = edition(state)
    now.planned(2)
    refused: list[str] = []

    def wait(event: LayerEvent) -> None:
        assert state.wait_layer(event.index) is event
        for blocks in (state.wait_end, lambda: state.wait_layer(1), require_other_thread):
            with pytest.raises(ConfigError) as error:
                blocks()
            refused.append(error.value.message)

    state.on_layer(wait)
    now.layer_ready(*landed(0))
    assert len(refused) == 3 and len(set(refused)) == 1
    require_other_thread()  # this thread is the caller's again


def test_a_wait_without_an_end_waits() -> None:
    state = EventLog(0.0)
    ending = threading.Timer(0.05, lambda: state.finished(report()))
    ending.start()
    assert state.wait_end(math.inf).model == "m"
    ending.join()


def test_the_first_outcome_counts() -> None:
    state = EventLog(0.0)
    state.failed(ClosedError("first"))
    state.finished(report())
    state.failed(ClosedError("second"))
    assert state.report is None
    with pytest.raises(ClosedError, match="first"):
        state.wait_end(0)
    state = EventLog(0.0)
    state.finished(report())
    state.failed(ClosedError("late"))
    assert state.error is None
    assert state.wait_end(0).model == "m"


async def test_a_pull_begins_again_only_while_no_caller_has_its_layers_or_its_memory() -> None:
    state = EventLog(0.0)
    edition(state).planned(2)
    ready = state.begin_again()
    assert ready is not None
    waiting = threading.Thread(target=state.keep_memory)  # there is no memory until `planned`
    waiting.start()
    edition(state, ready).planned(3)
    waiting.join()
    assert state.begin_again() is None
    state = EventLog(0.0)
    now = edition(state)
    now.planned(2)
    now.layer_ready(*landed(0))
    assert state.begin_again() is None
    # Where that is meant, a layer counts once the caller has seen it.
    ready = state.begin_again(unseen=True)
    assert ready is not None
    now = edition(state, ready)
    now.planned(2)
    now.layer_ready(*landed(0))
    assert state.wait_layer(0) is not None
    assert state.begin_again(unseen=True) is None


async def test_what_an_ended_edition_records_reaches_no_listener() -> None:
    state, seen = EventLog(0.0), list[int]()
    ready = state.begin_anew()
    ended = edition(state, ready)
    ended.planned(2)
    state.on_layer(lambda event: seen.append(event.index))
    reader = state.layers()
    ended.layer_ready(*landed(0))
    assert reader.next() is not None
    now = edition(state)
    with pytest.raises(RevisionChangedError):
        reader.next()
    ended.planned(1)
    ready.told = manifest(1).ref.identity
    ended.layer_ready(*landed(1))
    now.planned(2, manifest(2))  # not of the weights that the caller knew before
    assert (seen, now.layers_ready) == ([0], 0)
    now.layer_ready(*landed(1))
    assert (seen, now.layers_ready) == ([0, 1], 1)
    assert not now.is_ready(0)


async def test_a_callbacks_error_ends_the_edition_whose_event_it_refused() -> None:
    """A thread of an ended edition is still in the callback, and calls it with what comes next."""
    state, entered, go_on = EventLog(0.0), threading.Event(), threading.Event()
    ended = edition(state)
    ended.planned(2)

    def refuse_others(event: LayerEvent) -> None:
        if event.index:
            raise RuntimeError(event.name)
        entered.set()
        assert go_on.wait(10)

    state.on_layer(refuse_others)
    old = threading.Thread(target=ended.layer_ready, args=landed(0))
    old.start()
    assert entered.wait(10)
    now = edition(state)
    now.planned(2)
    now.layer_ready(*landed(1))
    go_on.set()
    old.join()
    await asyncio.sleep(0)
    assert isinstance(now.failure, MxError) and str(now.failure.__cause__) == "layer.1"
    assert ended.failure is None


def manifest(first: int) -> Manifest:
    layout = plan_layout([TensorSpec("w", "U8", (10,))])
    return encode(layout, Packaging(), {"w": document_digest(bytes([first]))})


async def test_a_manifest_is_waited_for_and_its_weights_are_then_the_pulls() -> None:
    state, found = EventLog(0.0), list[Manifest]()
    now = edition(state)
    with pytest.raises(TimeoutError):
        state.wait_manifest(0)
    waiting = threading.Thread(target=lambda: found.append(state.wait_manifest()))
    waiting.start()
    now.planned(1, manifest(1))
    waiting.join()
    assert found[0] is state.wait_manifest(0)
    ready = state.begin_again()
    assert ready is not None
    now = edition(state, ready)
    with pytest.raises(TimeoutError):
        state.wait_manifest(0)
    with pytest.raises(IntegrityError, match=found[0].ref.identity.hex()):
        now.planned(1, manifest(2))
    now.planned(1, again := replace(manifest(1)))
    assert state.wait_manifest(0) is again
    state.failed(ClosedError("later"))
    assert state.wait_manifest(0) is again


async def test_a_pull_without_a_manifest_says_so_at_its_end() -> None:
    state = EventLog(0.0)
    edition(state).planned(0)
    with pytest.raises(TimeoutError):
        state.wait_manifest(0)
    state.finished(report())
    with pytest.raises(ConfigError, match="manifest"):
        state.wait_manifest()
    state = EventLog(0.0)
    state.failed(ClosedError("first"))
    with pytest.raises(ClosedError, match="first"):
        state.wait_manifest()


def test_who_comes_while_a_pull_is_failing_is_told_at_once() -> None:
    state, told = EventLog(0.0), list[MxError]()
    state.failing(ClosedError("first"))
    state.on_failure(told.append)
    assert [str(error) for error in told] == ["first"]
    state.failed(ClosedError("first"))
    assert len(told) == 1


def test_a_waiter_whose_loop_was_closed_does_not_hinder_others() -> None:
    state = EventLog(0.0)
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(state.wait_end_async())
    loop.run_until_complete(asyncio.sleep(0))
    waiting.get_coro().close()  # as if it had been dropped
    loop.close()
    state._wakers.add((loop, asyncio.Event()))
    state.finished(report())
    assert state.ended


def test_each_waiter_gets_an_error_of_its_own_and_its_traceback_does_not_grow() -> None:
    state = EventLog(0.0)
    cause = OSError("the cable")
    try:
        raise PeerBusyError("busy", peer="1.2.3.4:5", hint="later", retry_after_s=7.0) from cause
    except PeerBusyError as error:
        failure = error
    state.failed(failure)

    def caught(wait: Callable[[], object]) -> PeerBusyError:
        try:
            wait()
        except PeerBusyError as raised:
            return raised
        raise AssertionError("it did not fail")

    waits: list[Callable[[], object]] = [
        state.wait_end,
        state.keep_memory,
        lambda: state.wait_layer(0),
        lambda: asyncio.run(state.wait_end_async()),
        lambda: asyncio.run(state.layers().next_async()),
    ]
    before = len(traceback.extract_tb(failure.__traceback__))
    errors = [caught(wait) for wait in waits]
    for wait, first in zip(waits, errors, strict=True):
        again = caught(wait)
        assert again is not first
        lengths = [len(traceback.extract_tb(each.__traceback__)) for each in (first, again)]
        assert lengths[0] == lengths[1]
        assert (str(again), again.peer, again.hint) == (str(failure), "1.2.3.4:5", "later")
        assert again.retry_after_s == 7.0
        assert again.__cause__ is cause
    assert len(set(map(id, [failure, *errors]))) == len(waits) + 1
    assert len(traceback.extract_tb(failure.__traceback__)) == before
