"""The board of pulls of a coordinator that shares its state: what it tells others, and hears."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest

from mx.core.changes import ChangeKind, PullChange
from mx.core.progress_board import ENDED_S, EXPIRE_S, WINDOW_S, ProgressBoard, SharedPull
from mx.core.pull_status import PullPhase, PullStatus
from mx.core.types import ModelKey
from mx.errors import CapacityError, NotAllowedError

A, B, C = "a" * 32, "b" * 32, "c" * 32
WHO = "10.0.0.7"


def pull(number: int = 1, done_bytes: int = 0) -> PullStatus:
    return PullStatus(
        str(uuid.UUID(int=number)), ModelKey("llama", "main", "checkpoint"), "host-1", 7,
        PullPhase.RUNNING, 10, 0, 1 << 40, done_bytes, 1.5, ("10.0.0.9:7700",),
        measured_host="10.0.0.8",
    )  # fmt: skip


def told(number: int = 1, *, claim: int = 0, principal: str = WHO, done: int = 0) -> SharedPull:
    return SharedPull(pull(number, done), principal, claim, 0.0, EXPIRE_S)


def sharing(limit: int = 100) -> ProgressBoard:
    board = ProgressBoard(limit, lambda model, source_host, host: 100.0)
    board.share()
    return board


def all_told(board: ProgressBoard, now: float) -> list[SharedPull]:
    return [each for each in iter(lambda: board.next_untold(now), None) if each is not None]


def done(board: ProgressBoard, now: float) -> list[int]:
    return [each.done_bytes for each in board.pulls(now)]


def test_a_pull_is_seen_elsewhere_while_it_reports_and_ends_there_with_its_end() -> None:
    ends: list[str] = []

    def on_change(change: PullChange) -> None:
        ends.extend([change.record.pull_id] if change.kind is ChangeKind.GONE else [])

    here, there, stream = sharing(), ProgressBoard(100, on_change=on_change), object()
    there.share()
    for now, nbytes in ((0.0, 1), (1.0, 2), (2.0, 3)):
        here.report(now, stream, pull(done_bytes=nbytes), WHO)
        for row in all_told(here, now + 0.4):
            there.hear(now + 0.5, A, replace(row, age_s=0.5, left_s=row.left_s - 0.1))
        assert done(there, now + 0.5) == [nbytes]
    assert not all_told(there, 3.0), "who hears of a pull does not tell it"
    here.end(3.0, stream)
    (end,) = all_told(here, 3.0)
    assert end.status.phase is PullPhase.FAILED and end.left_s == ENDED_S
    there.hear(3.0, A, end)
    assert [each.phase for each in there.pulls(3.0)] == [PullPhase.FAILED]
    assert not there.pulls(3.0 + ENDED_S)
    assert ends == [end.status.pull_id]


def test_a_pull_of_a_coordinator_that_is_gone_ends_by_itself() -> None:
    board = sharing()
    board.hear(10.0, A, told())
    assert board.pulls(10.0 + EXPIRE_S - 0.1) and not board.pulls(10.0 + EXPIRE_S)
    board.hear(20.0, A, replace(told(), left_s=1e9))
    assert not board.pulls(20.0 + EXPIRE_S), "whatever is said to be left"
    board.hear(30.0, A, replace(told(), left_s=-1.0))
    assert not board.pulls(30.0)


def test_of_several_rows_of_a_pull_the_latest_claim_holds_everywhere() -> None:
    left, next_one, third = sharing(), sharing(), sharing()
    stream = object()
    left.report(5.0, stream, pull(done_bytes=1), WHO)
    (first,) = all_told(left, 5.0)
    for board in (next_one, third):
        board.hear(5.0, A, first)
    # The clock of the next one is behind: its claim is later all the same.
    next_one.report(4.9, object(), pull(done_bytes=2), WHO)
    (claimed,) = all_told(next_one, 4.9)
    assert claimed.claim > first.claim
    left.end(6.0, stream)
    for row, who in ((claimed, B), *((each, A) for each in all_told(left, 6.0))):
        third.hear(6.0, who, row)
    left.hear(6.0, B, claimed)
    next_one.hear(6.0, A, first)
    for board in (left, next_one, third):
        assert done(board, 6.0) == [2]
        assert [each.phase for each in board.pulls(6.0)] == [PullPhase.RUNNING]
    assert not all_told(left, 6.0), "it is another's by now"


def test_a_pull_is_not_taken_by_another_principal() -> None:
    board = sharing()
    board.hear(0.0, A, told(done=1))
    with pytest.raises(NotAllowedError, match="another principal"):
        board.report(1.0, object(), pull(done_bytes=2), "10.0.0.8")
    board.hear(1.0, B, told(claim=9, principal="10.0.0.8", done=3))
    assert done(board, 1.0) == [1]
    board.report(1.0, object(), pull(done_bytes=4), WHO)
    board.hear(1.0, B, told(claim=9999, principal="10.0.0.8", done=5))
    assert done(board, 1.0) == [4]


def test_pulls_elsewhere_are_bounded_and_take_no_place_from_those_here() -> None:
    board = sharing(limit=4)
    for number in range(1, 9):
        board.hear(0.0, A, told(number, principal="10.0.0.6"))
    assert len(board.pulls(0.0)) == 2, "a principal has half of the places"
    for number in range(11, 19):
        board.hear(0.0, B, told(number, principal=f"10.0.1.{number}"))
    assert len(board.pulls(0.0)) == 4
    for number in range(21, 25):
        board.report(0.0, object(), pull(number), WHO)
    with pytest.raises(CapacityError):
        board.report(0.0, object(), pull(25), WHO)
    assert len(board.pulls(0.0)) == 8
    assert not board.pulls(EXPIRE_S)
    board.hear(EXPIRE_S, C, told(31, principal="10.0.0.6"))
    assert len(board.pulls(EXPIRE_S)) == 1, "what has ended counts no more"


def test_principals_take_turns_and_nothing_is_kept_of_pulls_that_are_gone() -> None:
    board, stream = sharing(), object()
    for number in range(1, 4):
        board.report(0.0, object(), pull(number), "many")
    board.report(0.0, stream, pull(9), "one")
    board.report(0.5, stream, pull(9, done_bytes=5), "one")
    order = [board.next_untold(0.5) for _ in range(2)]
    assert [each and each.principal for each in order] == ["many", "one"]
    assert order[1] is not None and order[1].status.done_bytes == 5, "only the latest is told"
    board.not_told([pull(9).pull_id, pull(77).pull_id])
    assert [each.principal for each in all_told(board, 0.5)] == ["many", "one", "many"]
    board.report(0.6, stream, pull(9, done_bytes=6), "one")
    assert not board.pulls(100.0)
    assert not all_told(board, 100.0)
    alone = ProgressBoard()
    alone.report(0.0, object(), pull(), WHO)
    assert not all_told(alone, 0.0), "a pull that shares with no other keeps nothing"


def test_rates_are_measured_of_pulls_elsewhere_too() -> None:
    here, there, stream = sharing(), sharing(), object()
    for second in range(4):
        now = second * WINDOW_S / 2
        here.report(now, stream, pull(done_bytes=1 + second * 10**9), WHO)
        (row,) = all_told(here, now + 0.3)
        there.hear(now + 0.7, A, replace(row, age_s=0.7))
    (rate,), (same,) = here.rates.listed(4.0), there.rates.listed(4.0)
    assert same.gb_per_s == pytest.approx(rate.gb_per_s)
    assert (same.source_host, same.host) == (rate.source_host, rate.host)
