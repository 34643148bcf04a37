"""Estimates of pulls, and measured rates."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mx.core.estimates import (
    ATTACH_S,
    SETUP_S,
    Size,
    SourceLoad,
    estimate,
    in_order_of_readiness,
)
from mx.core.paths import Medium, Path
from mx.core.planner import Plan, plan
from mx.core.progress_board import WINDOW_S, ProgressBoard
from mx.core.pull_status import PullPhase, PullStatus
from mx.core.rates import (
    FRESH_S,
    KEPT_S,
    MAX_PAIRS,
    MOST_GB_PER_S,
    MOST_IN_HOST_GB_PER_S,
    Rate,
    Rates,
    fastest_link,
)
from mx.core.topology import Nic, Place
from mx.core.types import ModelKey, SourceRecord, SourceRole
from tests.support.records import make_record

MODEL = ModelKey("llama")
SIZE = Size(1_000_000_000, 100_000_000)


def source(name: str, *, held: int = 4) -> SourceRecord:
    record = make_record(
        [b"identity", b"layout"],
        source_id=name,
        endpoint=f"{name}:7700",
        held=((0, held),),
        role=SourceRole.ORIGIN if held == 4 else SourceRole.RELAY,
    )
    return replace(record, place=Place(boot_id=name, hostname=name))


def plan_of(*sources: SourceRecord, attach: bool = False, gb_per_s: float = 1.0) -> Plan:
    def reach(transport: str, there: Place) -> Path | str:
        if transport == "shm":
            return Path("shm", 10.0, attach=True) if attach else "another host"
        return Path("tcp", gb_per_s, medium=Medium.NETWORK)

    return plan(Place(boot_id="here", hostname="here"), sources, ["shm", "tcp"], reach)


def test_times_follow_from_declared_and_rather_from_measured_bandwidth() -> None:
    declared = estimate(MODEL, "t", SIZE, plan_of(source("a")), measured={}, loads={})
    assert declared.seconds_to_ready == pytest.approx(SETUP_S + 1.0)
    assert declared.seconds_to_first_layer == pytest.approx(SETUP_S + 0.1)
    assert not declared.measured and "declared" in str(declared)
    measured = estimate(MODEL, "t", SIZE, plan_of(source("a")), measured={"a": 0.5}, loads={})
    assert measured.seconds_to_ready == pytest.approx(SETUP_S + 2.0)
    assert measured.measured and "measured" in str(measured)
    assert measured.costs[0].nbytes == SIZE.nbytes and measured.costs[0].slowdown == 1.0


def test_what_a_source_gives_to_others_is_not_there_for_one_more() -> None:
    busy = {"a": SourceLoad(readers=3, gb_per_s=1.0)}
    found = estimate(MODEL, "t", SIZE, plan_of(source("a")), measured={}, loads=busy)
    assert found.gb_per_s == pytest.approx(0.25)
    assert found.costs[0].readers == 3
    assert found.costs[0].slowdown == pytest.approx(4 / 3)
    half = {"a": SourceLoad(readers=1, gb_per_s=0.2)}
    found = estimate(MODEL, "t", SIZE, plan_of(source("a")), measured={}, loads=half)
    assert found.gb_per_s == pytest.approx(0.8)
    assert found.costs[0].slowdown == pytest.approx(1.0)


def test_attached_memory_moves_nothing_and_no_path_is_said() -> None:
    found = estimate(MODEL, "t", SIZE, plan_of(source("a"), attach=True), measured={}, loads={})
    assert (found.attaches, found.seconds_to_ready, found.costs[0].nbytes) == (True, ATTACH_S, 0)
    none = estimate(MODEL, "t", SIZE, plan_of(), measured={}, loads={})
    assert none.seconds_to_ready is None and none.why_none == "no source is listed"
    assert "no source is listed" in str(none)


def test_sources_that_still_receive_give_no_sooner_than_they_have_it() -> None:
    relay = source("r", held=2)
    found = estimate(MODEL, "t", SIZE, plan_of(relay), measured={}, loads={}, arriving_s=30.0)
    assert found.partial and found.seconds_to_ready == 30.0
    whole = estimate(MODEL, "t", SIZE, plan_of(source("a")), measured={}, loads={}, arriving_s=30.0)
    assert not whole.partial and whole.seconds_to_ready == pytest.approx(SETUP_S + 1.0)


@example(declared=1.0, measured=1e8, readers=201, gives=5e-324, nbytes=384)
@given(
    declared=st.floats(1e-6, 1e3),
    measured=st.none() | st.floats(0, 1e9),
    readers=st.integers(0, 1 << 31),
    gives=st.floats(0, 1e9),
    nbytes=st.integers(0, 1 << 50),
)
def test_whatever_others_claim_an_estimate_is_a_number(
    declared: float, measured: float | None, readers: int, gives: float, nbytes: int
) -> None:
    found = estimate(
        MODEL,
        "t",
        Size(nbytes, nbytes // 3),
        plan_of(source("a"), source("b"), gb_per_s=declared),
        measured={} if measured is None else {"a": measured},
        loads={"a": SourceLoad(readers, gives)},
    )
    first_s, ready_s = found.seconds_to_first_layer, found.seconds_to_ready
    assert first_s is not None and ready_s is not None
    assert 0 < first_s <= ready_s < float("inf")
    assert abs(sum(cost.nbytes for cost in found.costs) - nbytes) <= 2 + nbytes * 1e-9
    assert all(cost.slowdown >= 1.0 and cost.gb_per_s > 0 for cost in found.costs)


def test_places_are_in_the_order_in_which_they_would_be_ready() -> None:
    def at(host: str, gb_per_s: float) -> object:
        return estimate(
            MODEL, host, SIZE, plan_of(source("a"), gb_per_s=gb_per_s), measured={}, loads={}
        )

    nowhere = estimate(MODEL, "nowhere", SIZE, plan_of(), measured={}, loads={})
    found = in_order_of_readiness([nowhere, at("slow", 0.1), at("fast", 2.0)])  # type: ignore[list-item]
    assert [each.host for each in found] == ["fast", "slow", "nowhere"]


def test_the_fastest_recent_rate_of_two_hosts_counts() -> None:
    rates = Rates()
    rates.observe(0.0, "m", "s", "t", 1.0)
    rates.observe(1.0, "m", "s", "t", 0.4)
    rates.observe(2.0, "m", "s", "other", 0.0)
    assert [(each.gb_per_s, each.age_s) for each in rates.listed(5.0)] == [(1.0, 5.0)]
    rates.observe(FRESH_S + 1, "m", "s", "t", 0.5)
    assert rates.listed(FRESH_S + 1, {"s"})[0].gb_per_s == 0.5
    assert rates.listed(FRESH_S + 1, {"x"}) == []
    assert rates.listed(FRESH_S + KEPT_S + 2) == []
    for n in range(MAX_PAIRS + 10):
        rates.observe(1000.0, "m", "s", str(n), 1.0)
    assert len(rates.listed(1000.0)) == MAX_PAIRS


def test_a_rate_belongs_to_its_model() -> None:
    rates = Rates()
    rates.observe(0.0, "ours", "s", "t", 1.0)
    rates.observe(1.0, "theirs", "s", "t", 2.0)
    rates.observe(1.0, "theirs", "s", "u", 2.0)
    assert {each.host: each.gb_per_s for each in rates.listed(1.0)} == {"t": 2.0, "u": 2.0}
    seen = rates.listed(1.0, sees=lambda model: model == "ours")
    assert [(each.host, each.gb_per_s) for each in seen] == [("t", 1.0)]


def test_no_rate_is_faster_than_the_link_or_of_a_pull_that_is_not_known() -> None:
    nics = (Nic("eth0", "up", speed_mbit_per_s=10_000), Nic("eth1", "down", speed_mbit_per_s=10))
    place = Place(hostname="a", addresses=("10.0.0.1",), nics=nics)
    record = replace(source("a"), endpoint="10.0.0.1:7700", place=place)
    unknown = replace(record, endpoint="10.0.0.2:7700", place=Place())
    sources = (record, unknown)
    assert fastest_link(sources, "10.0.0.1", "b") == 1.25
    assert fastest_link(sources, "10.0.0.1", "a") == MOST_IN_HOST_GB_PER_S
    assert fastest_link(sources, "10.0.0.2", "b") == MOST_GB_PER_S
    assert fastest_link(sources, "10.0.0.3", "b") == 0.0

    def board_of(**known: object) -> list[Rate]:
        board, one = (
            ProgressBoard(link_gb_per_s=lambda _, *hosts: fastest_link(sources, *hosts)),
            object(),
        )
        for second in range(4):
            done = 1 + second * 10**12
            board.report(second, one, status(1, nbytes=10**14, done_bytes=done, **known))
        return board.rates.listed(4.0)

    assert [each.gb_per_s for each in board_of(measured_host="b")] == [1.25]
    assert not board_of(measured_host="")
    assert not board_of(measured_host="b", sources=("10.0.0.3:7700",))


def measuring() -> ProgressBoard:
    return ProgressBoard(link_gb_per_s=lambda model, source_host, host: MOST_GB_PER_S)


def status(number: int, **more: object) -> PullStatus:
    found = PullStatus(
        pull_id=str(uuid.UUID(int=number)),
        model=MODEL,
        host="h",
        pid=1,
        phase=PullPhase.RUNNING,
        layers=4,
        ready=0,
        nbytes=1000,
        done_bytes=100,
        seconds=1.0,
        sources=("10.0.0.1:7700",),
        gb_per_s=0.5,
        measured_host="h",
    )
    return found._replace(**more)  # type: ignore[arg-type]


def test_a_board_measures_over_a_while_between_two_hosts_alone() -> None:
    board, one, two = measuring(), object(), object()
    nbytes = 10_000_000_000
    for second in range(4):  # 1 GB/s since its first report
        done = 1 + second * 1_000_000_000
        board.report(float(second), one, status(1, nbytes=nbytes, done_bytes=done))
        assert len(board.rates.listed(second)) == (second >= WINDOW_S)
    (rate,) = board.rates.listed(3.0)
    assert (rate.source_host, rate.host, rate.gb_per_s) == ("10.0.0.1", "h", 1.0)
    both = ("10.0.0.1:7700", "10.0.0.2:7700")
    for second in range(10):
        done = 1 + second * 1_000_000
        board.report(second, two, status(2, nbytes=nbytes, done_bytes=done, sources=both))
    assert len(board.rates.listed(9.0)) == 1


def test_a_short_pull_is_measured_at_its_end_unless_it_was_too_short() -> None:
    for seconds, found in ((0.1, []), (1.0, [9e-7])):
        board, one = measuring(), object()
        board.report(0.0, one, status(1))
        ended = status(1, done_bytes=1000, phase=PullPhase.COMPLETE, sources=())
        board.report(seconds, one, ended)
        board.report(10.0, one, ended)  # one that takes requests goes on
        assert [each.gb_per_s for each in board.rates.listed(10.0)] == found
