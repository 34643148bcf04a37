"""A source's bounds: admission, token buckets, shares of the rate, and meters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.core.grants import Principal
from mx.core.limits import (
    BURST_S,
    LEAST_BYTES_PER_S,
    RETRY_MOST_S,
    RETRY_S,
    Bounds,
    Retries,
    TokenBucket,
    grant_share,
    slice_nbytes,
)
from mx.source.limits import Meter, SourceLimits
from mx.units import GB, MIB
from tests.support.clock import ManualClock

RATE = 50e6


# -- buckets --------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 4 * MIB), st.floats(0, 0.5)), min_size=1, max_size=50),
    st.floats(1e6, 1e10),
)
def test_a_bucket_never_lets_more_through_than_its_rate_and_a_burst(
    takes: list[tuple[int, float]], rate: float
) -> None:
    bucket, now_s, sent = TokenBucket(rate, 0.0), 0.0, 0
    for nbytes, idle_s in takes:
        now_s += idle_s
        now_s += bucket.take(nbytes, now_s)  # the sender waits, and then sends
        sent += nbytes
        assert sent <= rate * (now_s + BURST_S) * 1.0001 + 1


def test_a_bucket_in_constant_use_gives_its_whole_rate() -> None:
    clock, sent = ManualClock(), 0
    bucket = TokenBucket(RATE, clock())
    while clock() < 10.0:
        clock.advance(bucket.take(MIB, clock()))
        sent += MIB
    assert sent == pytest.approx(10 * RATE, rel=0.01)


def test_callers_are_served_in_the_order_in_which_they_take() -> None:
    bucket = TokenBucket(RATE, 0.0)
    waits = [bucket.take(5 * MIB, 0.0) for _ in range(4)]
    assert waits == sorted(waits)
    assert waits[3] - waits[2] == pytest.approx(5 * MIB / RATE)


def test_a_new_rate_holds_from_then_on() -> None:
    bucket = TokenBucket(RATE, 0.0)
    bucket.take(int(RATE * BURST_S), 0.0)  # empty
    bucket.set_rate(RATE / 2, 1.0)  # full again by now
    assert bucket.take(int(RATE * BURST_S), 1.0) == pytest.approx(BURST_S)
    assert TokenBucket(RATE, 5.0).take(1, 4.0) == 0  # a clock that went back


def test_slices_are_short_in_time_and_neither_tiny_nor_huge() -> None:
    assert slice_nbytes(1) == slice_nbytes(1e6) == 64 * 1024
    assert slice_nbytes(100e6) == 1_000_000
    assert slice_nbytes(1e12) == 4 * MIB


@given(st.integers(10**6, 10**12), st.lists(st.integers(1, 16), max_size=50))
def test_every_reader_has_the_same_share_however_many_grants_it_has(
    rate: int, grants: list[int]
) -> None:
    parts = [grant_share(rate, len(grants), each) for each in grants]
    assert all(part >= LEAST_BYTES_PER_S for part in parts)
    if all(part > LEAST_BYTES_PER_S for part in parts) and grants:
        held = [part * each for part, each in zip(parts, grants, strict=True)]
        assert held == pytest.approx([rate / len(grants)] * len(grants))
    assert grant_share(rate, 0, 0) == rate


# -- admission ------------------------------------------------------------------------------------


def test_retries_of_a_crowd_are_spread_out_within_a_bound() -> None:
    retries = Retries()
    answers = [retries.after_s(0.0) for _ in range(1000)]
    assert answers[:3] == pytest.approx([0.5, 0.55, 0.6])
    assert answers == sorted(answers) and answers[-1] == RETRY_MOST_S
    assert retries.after_s(60.0) == RETRY_S


# -- a source -------------------------------------------------------------------------------------


def reader(name: str) -> Principal:
    return Principal(f"ipv4:10.0.0.1:{name}", "10.0.0.1", name)


def test_a_reader_with_several_grants_is_one_reader() -> None:
    limits = SourceLimits(Bounds(max_readers=1), clock=ManualClock())
    limits.opened("g1", "s", reader("me"), sent=True)
    limits.opened("g2", "s", reader("me"), sent=False)
    assert limits.admit(reader("me")) == []
    assert limits.admit(reader("other")) is None
    limits.closed("g1")
    assert limits.admit(reader("other")) is None
    limits.closed("g2")
    limits.closed("g2")
    assert limits.admit(reader("other")) == []


def test_what_is_sent_and_what_is_fetched_share_the_rate() -> None:
    clock = ManualClock()
    limits = SourceLimits(Bounds(max_bytes_per_s=90 * 10**6), clock=clock)
    assert limits.limiter is not None
    limits.opened("tcp", "s", reader("a"), sent=True)
    assert limits.share("tcp") == 0  # the source limits it itself
    limits.opened("shm", "s", reader("b"), sent=False)
    limits.opened("ucx", "s", reader("c"), sent=False)
    assert limits.share("shm") == limits.share("ucx") == 30e6
    # In the ten seconds from now on the sender may send a third, to all readers together.
    clock.advance(1.0)
    start_s, sent = clock(), 0
    while clock() < start_s + 10:
        clock.advance(limits.limiter.delay_s(100_000))
        sent += 100_000
    assert sent == pytest.approx(300e6, rel=0.02)
    limits.closed("shm")
    limits.closed("ucx")
    start_s, sent = clock(), 0
    while clock() < start_s + 10:
        clock.advance(limits.limiter.delay_s(100_000))
        sent += 100_000
    assert sent == pytest.approx(900e6, rel=0.02)


def test_without_bounds_nothing_is_limited() -> None:
    limits = SourceLimits(clock=ManualClock())
    limits.opened("g", "s", reader("a"), sent=False)
    assert limits.limiter is None and limits.share("g") == 0 and limits.admit(reader("b")) == []


# -- meters ---------------------------------------------------------------------------------------


def test_a_meter_returns_the_rate_since_its_last_call() -> None:
    meter = Meter(0.0, stale_s=3.0)
    assert meter.gb_per_s(GB, 2.0) == 0.5
    assert meter.gb_per_s(GB, 3.0) == 0.0
    assert meter.gb_per_s(GB, 3.0) == 0.0  # no time has passed


def test_a_readers_last_rate_stands_until_it_is_stale() -> None:
    meter = Meter(0.0, stale_s=3.0)
    meter.opened("g", 0.0)
    meter.reported("g", 2 * GB, 1.0)
    assert meter.gb_per_s(0, 1.1) == meter.gb_per_s(0, 1.9) == 2.0
    meter.reported("g", 3 * GB, 2.0)
    meter.reported("g", GB, 3.0)  # a count that decreases is ignored
    meter.reported("unknown", GB, 3.0)
    assert meter.gb_per_s(0, 4.0) == 1.0
    assert meter.gb_per_s(0, 5.1) == 0.0


def test_the_last_report_of_a_short_read_counts_once() -> None:
    meter = Meter(0.0, stale_s=3.0)
    meter.opened("short", 0.5)
    meter.reported("short", GB, 1.0)
    meter.closed("short")
    assert meter.gb_per_s(0, 2.0) == 0.5
    meter.opened("long", 2.0)
    meter.reported("long", GB, 3.0)
    assert meter.gb_per_s(0, 4.0) == 1.0
    meter.closed("long")
    assert meter.gb_per_s(0, 5.0) == 0.0


def test_reports_count_only_for_readers_that_fetch() -> None:
    clock = ManualClock()
    limits = SourceLimits(clock=clock)
    limits.opened("shm", "s", reader("a"), sent=False)
    limits.opened("tcp", "s", reader("b"), sent=True)
    clock.advance(1.0)
    limits.reported("shm", GB)
    limits.reported("tcp", 7 * GB)  # counted where it was sent
    limits.reported("gone", GB)
    assert limits.gb_per_s("s", 2 * GB) == 3.0
    limits.forget("s")
    clock.advance(1.0)
    assert limits.gb_per_s("s", 0) == 0.0
