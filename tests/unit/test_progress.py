"""The board of pulls: which reports it takes and how long it keeps them; and its wire format."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.codec import MAX_TOTAL_BYTES
from mx.coordinator.service import CoordinatorServicer
from mx.coordinator.state import CoordinatorState
from mx.core.progress_board import ENDED_S, EXPIRE_S, ProgressBoard
from mx.core.pull_status import PullPhase, PullStatus
from mx.core.types import ModelKey
from mx.errors import CapacityError, NotAllowedError, PeerProtocolError
from mx.wire.progress import MAX_LAYERS, MAX_SOURCES, pull_from_wire, pull_to_wire
from mx.wire.v1 import coordinator_pb2 as pb

STATUS = PullStatus(
    pull_id=str(uuid.UUID(int=1)),
    model=ModelKey("llama", "main", "checkpoint"),
    host="host-1",
    pid=7,
    phase=PullPhase.RUNNING,
    layers=10,
    ready=0b1000000001,
    nbytes=1000,
    done_bytes=400,
    seconds=1.5,
    sources=("127.0.0.1:7700", "[::1]:7701"),
    retries=2,
    gb_per_s=0.25,
)


def test_a_pull_is_shown_while_its_reports_are_recent() -> None:
    board, reporter = ProgressBoard(), object()
    board.report(0.0, reporter, STATUS)
    board.report(1.0, reporter, STATUS._replace(done_bytes=900))
    assert [pull.done_bytes for pull in board.pulls(1.0)] == [900]
    assert board.pulls(EXPIRE_S + 0.9, "llama") and not board.pulls(EXPIRE_S + 0.9, "other")
    assert not board.pulls(EXPIRE_S + 1.0)


def test_an_ended_pull_stays_a_moment_and_has_failed_unless_it_was_complete() -> None:
    board, one, two = ProgressBoard(), object(), object()
    board.report(0.0, one, STATUS)
    board.report(0.0, two, STATUS._replace(pull_id=str(uuid.UUID(int=2)), phase=PullPhase.COMPLETE))
    board.end(1.0, one)
    board.end(1.0, two)
    assert [pull.phase for pull in board.pulls(1.5)] == [PullPhase.FAILED, PullPhase.COMPLETE]
    assert not board.pulls(1.0 + ENDED_S)


def test_a_pull_has_one_reporter_and_the_number_of_pulls_is_bounded() -> None:
    board, reporter = ProgressBoard(limit=2), object()
    board.report(0.0, reporter, STATUS)
    with pytest.raises(NotAllowedError):
        board.report(1.0, object(), STATUS)
    with pytest.raises(NotAllowedError, match="another pull"):
        board.report(1.0, reporter, STATUS._replace(pull_id=str(uuid.UUID(int=2))))
    board.report(1.0, object(), STATUS._replace(pull_id=str(uuid.UUID(int=2))))
    with pytest.raises(CapacityError):
        board.report(1.0, object(), STATUS._replace(pull_id=str(uuid.UUID(int=3))))
    board.report(EXPIRE_S, object(), STATUS)  # forgotten by then, so any reporter may
    assert len(board.pulls(EXPIRE_S)) == 2


@given(
    layers=st.integers(0, 300),
    data=st.data(),
    phase=st.sampled_from(PullPhase),
    nbytes=st.integers(0, MAX_TOTAL_BYTES),
    seconds=st.floats(0, 1e9),
)
def test_a_status_survives_the_wire(
    layers: int, data: st.DataObject, phase: PullPhase, nbytes: int, seconds: float
) -> None:
    ready = data.draw(st.integers(0, (1 << layers) - 1))
    done = data.draw(st.integers(0, nbytes))
    status = STATUS._replace(
        layers=layers,
        ready=ready,
        phase=phase,
        nbytes=nbytes,
        done_bytes=done,
        seconds=seconds,
    )
    message = pb.PullProgress.FromString(pull_to_wire(status).SerializeToString())
    assert pull_from_wire(message) == status


@pytest.mark.parametrize(
    "change",
    [
        {"pull_id": "me"},
        {"phase": 0},
        {"phase": 99},
        {"layers": 9},  # the tenth of them is ready
        {"layers": MAX_LAYERS + 1},
        {"ready": bytes(MAX_LAYERS // 8 + 1)},
        {"done_bytes": 1001},
        {"nbytes": 2**64 - 1},
        {"seconds": 1e300},
        {"seconds": float("nan")},
        {"gb_per_s": float("inf")},
        {"host": "a\x1b[2J"},
        {"host": "h" * 300},
        {"sources": ["no address"]},
        {"sources": ["127.0.0.1:1"] * (MAX_SOURCES + 1)},
        {"model": {"name": ""}},
    ],
)
def test_an_invalid_status_is_refused(change: dict[str, Any]) -> None:
    message = pull_to_wire(STATUS)
    for name, value in change.items():
        message.ClearField(name)
        message.MergeFrom(pb.PullProgress(**{name: value}))
    with pytest.raises(PeerProtocolError):
        pull_from_wire(message)


def test_a_pull_that_moves_to_another_connection_runs_on() -> None:
    board, before, after = ProgressBoard(), object(), object()
    board.report(0.0, before, STATUS, "us")
    with pytest.raises(NotAllowedError):
        board.report(0.1, after, STATUS, "us")
    board.end(0.5, before, moves=True)
    with pytest.raises(NotAllowedError):
        board.report(0.6, object(), STATUS, "others")
    assert [each.phase for each in board.pulls(2.0)] == [PullPhase.RUNNING]
    board.report(2.0, after, STATUS, "us")
    board.end(2.5, before)  # late, which ends nothing
    assert [each.phase for each in board.pulls(6.0)] == [PullPhase.RUNNING]
    board.end(6.5, after)
    assert [each.phase for each in board.pulls(6.6)] == [PullPhase.FAILED]


class Context:
    def peer(self) -> str:
        return "ipv4:10.0.0.1:5000"

    def auth_context(self) -> dict[str, tuple[bytes, ...]]:
        return {}


async def test_a_coordinator_that_stops_ends_reports_and_no_pull() -> None:
    servicer = CoordinatorServicer(CoordinatorState())

    async def reports() -> AsyncIterator[pb.ProgressRequest]:
        yield pb.ProgressRequest(pull=pull_to_wire(STATUS))
        await asyncio.Event().wait()

    async with asyncio.timeout(30):
        reporting = asyncio.create_task(servicer.Progress(reports(), Context()))
        while not servicer.pulls_by_phase():
            await asyncio.sleep(0.01)
        servicer.stop()
        await reporting
    # It goes on to another one: who shares the state is told no end.
    assert servicer.pulls_by_phase() == {"running": 1}
