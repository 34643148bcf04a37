"""Reads in flight follow what the drive gives: as many as help, and no more."""

from __future__ import annotations

import heapq

from hypothesis import given
from hypothesis import strategies as st

from mx.core.read_depth import MOST_READS, ReadDepth
from mx.units import MIB

SPAN = 4 * MIB
DEPTHS = st.tuples(st.integers(1, MOST_READS), st.integers(1, MOST_READS)).map(sorted)


class Drive:
    """A simulated drive and its readers.

    Args:
        latency_s: How long an answer takes.
        bytes_per_s: What it gives to all reads together.
        work_s: What a reader does with a span, on one of two cores.
    """

    def __init__(self, latency_s: float, bytes_per_s: float, work_s: float = 0.0) -> None:
        self.latency_s, self.bytes_per_s, self.work_s = latency_s, bytes_per_s, work_s
        self.depth = ReadDepth(2, MOST_READS, 0.0)
        self.seen = [2]

    def run(self, spans: int) -> list[int]:
        """Read so many spans. Returns each depth that there was."""
        drive_free_s, cores = 0.0, [0.0, 0.0]
        ends: list[tuple[float, float]] = []  # when a reader is done, how long it has waited

        def begin(now_s: float) -> None:
            nonlocal drive_free_s
            drive_free_s = max(drive_free_s, now_s) + SPAN / self.bytes_per_s
            came_s = max(drive_free_s, now_s + self.latency_s)
            done_s = max(heapq.heappop(cores), came_s) + self.work_s
            heapq.heappush(cores, done_s)
            heapq.heappush(ends, (done_s, came_s - now_s))

        for _ in range(2):
            begin(0.0)
        for _ in range(spans):
            now_s, waited_s = heapq.heappop(ends)
            for _ in range(self.depth.landed(SPAN, waited_s, now_s)):
                begin(now_s)
            assert len(ends) == self.depth.running
            if self.depth.depth != self.seen[-1]:
                self.seen.append(self.depth.depth)
        return self.seen


def test_reads_that_take_long_are_many() -> None:
    """At 100 ms each, 16 are in flight after a second."""
    drive = Drive(latency_s=0.1, bytes_per_s=10e9)
    assert drive.run(40) == [2, 4, 8, 16]
    assert drive.depth.began_s < 1.1


@given(st.floats(0.3e9, 3e9))
def test_a_busy_drive_gets_no_more_than_it_needs(bytes_per_s: float) -> None:
    drive = Drive(latency_s=0.0001, bytes_per_s=bytes_per_s)
    seen = drive.run(4000)
    assert set(seen) <= {2, 4}
    assert len(seen) <= 16  # a try, and ever longer pauses


def test_processors_that_are_busy_ask_for_no_more() -> None:
    assert Drive(latency_s=0.0005, bytes_per_s=6e9, work_s=0.002).run(4000) == [2]


@given(st.floats(0.02, 0.2))
def test_a_drive_of_some_width_gets_what_fills_it(latency_s: float) -> None:
    """Of eight reads in flight the ninth waits for the others."""
    drive = Drive(latency_s, 8 * SPAN / latency_s)
    drive.run(2000)
    assert drive.depth.depth in (8, 16)
    assert {2, 4, 8} <= set(drive.seen)


@given(DEPTHS, st.lists(st.tuples(st.integers(0, SPAN), st.floats(0, 1), st.floats(-1, 1))))
def test_it_keeps_to_its_bounds(bounds: list[int], landed: list[tuple[int, float, float]]) -> None:
    """Whatever is measured, a clock that goes back among it."""
    first, most = bounds
    depth, readers, now_s = ReadDepth(first, most, 0.0), first, 0.0
    for nbytes, waited_s, step_s in landed:
        now_s += step_s
        go_on = depth.landed(nbytes, waited_s, now_s)
        assert go_on >= 0
        readers += go_on - 1
        assert readers == depth.running
        assert 1 <= depth.depth <= most
        assert 1 <= readers <= most


def test_a_bound_that_is_the_beginning_stays() -> None:
    depth = ReadDepth(8, 8, 0.0)
    assert [depth.landed(SPAN, 0.1, at / 10) for at in range(1, 200)] == [1] * 199
