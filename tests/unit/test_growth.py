"""Connections are added for as long as they make a pull faster, and none is closed."""

from __future__ import annotations

import math
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from mx.core import growth
from mx.core.growth import FASTER, MOST_STREAMS, StreamGrowth
from mx.core.paths import FIRST_STREAMS
from mx.units import MIB

SETTINGS = st.one_of(st.just("auto"), st.integers(1, 64))
CORES = st.integers(1, 256)
BYTES_PER_S = st.floats(1e6, 1e11)


class Pull:
    """A simulated pull, which opens what it is to open after a while.

    Args:
        rate: The bytes per second with so many connections, to all sources.
        cores: How many cores there are.
        busy: How many of them are busy with so many connections.
        sources: How many sources there are.
        admitted: How many connections each source admits.
    """

    def __init__(
        self,
        rate: Callable[[int], float],
        cores: int = 1024,
        busy: Callable[[int], float] = lambda streams: 0.0,
        sources: int = 1,
        admitted: int = 1024,
    ) -> None:
        self.growth = StreamGrowth.of("auto", cores, 0.0)
        self.rate, self.busy, self.sources, self.admitted = rate, busy, sources, admitted
        self.now_s = self.nbytes = self.busy_s = 0.0
        self.streams = FIRST_STREAMS
        self.seen = [FIRST_STREAMS]

    def run(self, looks: int = 2000) -> int:
        """Look so many times. Returns how many connections each source has in the end."""
        for _ in range(looks):
            if self.growth.due_s == math.inf:
                break
            passed_s = self.growth.due_s - self.now_s
            assert passed_s > 0
            # A window takes many looks where little comes.
            passed_s = max(passed_s, growth.WINDOW_NBYTES / self.rate(self.all_streams) / 3)
            self.now_s += passed_s
            self.nbytes += self.rate(self.all_streams) * passed_s
            self.busy_s += self.busy(self.all_streams) * passed_s
            open_streams = [self.streams] * self.sources
            self.growth.look(self.now_s, int(self.nbytes), self.busy_s, open_streams)
            self.streams = max(self.streams, min(self.growth.streams, self.admitted))
            self.seen.append(self.growth.streams)
        return self.streams

    @property
    def all_streams(self) -> int:
        return self.streams * self.sources


@given(SETTINGS, CORES, st.data())
def test_it_never_shrinks_and_keeps_to_its_bounds(
    setting: int | str, cores: int, data: st.DataObject
) -> None:
    """Whatever is measured, a clock that stands and bytes that were taken back among it."""
    found = StreamGrowth.of(setting, cores, 0.0)
    first = most = setting if isinstance(setting, int) else 0
    if setting == "auto":
        first, most = FIRST_STREAMS, MOST_STREAMS
    assert found.streams == first
    now_s, busy_s = 0.0, 0.0
    for _ in range(30):
        now_s += data.draw(st.floats(0, 10))
        busy_s += data.draw(st.floats(0, 10))
        nbytes = data.draw(st.integers(0, 1 << 40))
        before = found.streams
        streams = data.draw(st.lists(st.integers(0, 64), max_size=20))
        if found.due_s <= now_s:
            found.look(now_s, nbytes, busy_s, streams)
            assert found.due_s > now_s
        assert before <= found.streams <= most
        if found.streams > before:
            assert found.streams * len(streams) <= MOST_STREAMS
            assert min(streams) >= before


def test_a_number_is_that_number() -> None:
    assert StreamGrowth.of(5, 64, 0.0).due_s == math.inf


@given(BYTES_PER_S)
def test_all_are_opened_where_each_makes_the_pull_faster(bytes_per_s: float) -> None:
    pull = Pull(lambda streams: streams * bytes_per_s)
    assert pull.run() == MOST_STREAMS
    assert sorted(set(pull.seen)) == [2, 3, 4, 6, 9, 13, 16]


@given(BYTES_PER_S, st.integers(1, 24))
def test_it_ends_near_where_the_link_is_full(bytes_per_s: float, full: int) -> None:
    """What the link carries is had but for a tenth, and one step more is opened to see that."""

    def rate(streams: int) -> float:
        return min(streams, full) * bytes_per_s

    pull = Pull(rate)
    streams = pull.run()
    assert rate(streams) * FASTER >= rate(MOST_STREAMS)
    assert streams <= max(3, full * 1.5 * 1.5)


def test_it_waits_for_cores() -> None:
    pull = Pull(lambda streams: streams * 1e9, cores=8, busy=lambda streams: 1.0 * streams)
    assert pull.run() == 9  # with six there was one free for more, with nine there is none
    assert pull.growth.due_s < math.inf
    pull.busy = lambda streams: 1.0
    assert pull.run() == MOST_STREAMS
    assert Pull(lambda streams: streams * 1e9, cores=1, busy=lambda _: 0.5).run() == 2


def test_a_source_that_refuses_more_keeps_what_it_has() -> None:
    pull = Pull(lambda streams: streams * 1e9, admitted=3)
    assert pull.run() == 3
    assert pull.growth.streams == 4  # and it goes no further


@given(st.integers(1, 20))
def test_all_sources_together_have_no_more_than_there_may_be(sources: int) -> None:
    pull = Pull(lambda streams: streams * 1e9, sources=sources)
    assert pull.run() * sources <= max(MOST_STREAMS, FIRST_STREAMS * sources)


def test_one_slow_moment_is_forgiven_and_two_are_not() -> None:
    for slow, ends in ((1, MOST_STREAMS), (2, 3)):
        pull = Pull(lambda streams: streams * 1e10)
        while pull.growth.streams == 2:
            pull.run(1)
        pull.run(1)  # the window begins
        for _ in range(slow):
            pull.now_s += 1.0
            pull.nbytes += growth.WINDOW_NBYTES * 2
            pull.growth.look(pull.now_s, int(pull.nbytes), 0.0, [3])
        assert pull.run() == ends


def test_a_rate_of_few_bytes_is_none() -> None:
    """One step of 4 MiB more or less is no tenth of what is measured."""
    found = StreamGrowth.of("auto", 64, 0.0)
    for look in range(1, 100):
        found.look(look * 1.0, look * MIB, 0.0, [2])
    assert found.streams == FIRST_STREAMS


def test_without_a_source_that_takes_more_it_goes_on_looking() -> None:
    found = StreamGrowth.of("auto", 64, 0.0)
    for look in range(1, 100):
        found.look(look * 1.0, look << 32, 0.0, [])
    assert found.streams == FIRST_STREAMS and found.due_s < math.inf
