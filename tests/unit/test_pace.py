"""The speed of a path is measured right, however its parts come."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.core.striping import Pace
from mx.units import MIB

SPEED = 1e9
PART = 16 * MIB


def bursts(streams: int, jitter: float, count: int = 24) -> list[float]:
    """Return when the parts of parallel streams complete: `streams` nearly at once, repeatedly.
    `jitter` is a part of what one part takes."""
    took_s = PART / SPEED
    return [
        (burst + 1) * streams * took_s + each * jitter * took_s
        for burst in range(count)
        for each in range(streams)
    ]


@pytest.mark.parametrize("jitter", [0.0, 0.05, 0.2])
@pytest.mark.parametrize("streams", [1, 2, 3, 4, 6, 8])
def test_parts_that_come_in_bursts_make_a_path_no_faster(streams: int, jitter: float) -> None:
    """Found by the simulated connections: one with four streams took more than its share."""
    pace = Pace(SPEED, MIB)
    times = bursts(streams, jitter)
    for at_s, next_s in pairwise([*times, math.inf]):
        pace.completed(PART, at_s)
        if next_s - at_s > PART / SPEED / 2 and at_s > times[-1] / 2:
            # Until the next burst this is what all connections' shares go by.
            assert pace.bytes_per_s == pytest.approx(SPEED, rel=0.06)


@given(st.sampled_from((1, 2, 4)), st.floats(0.05, 20), st.sampled_from((1, 4, 16)))
def test_a_path_that_changes_is_known_after_some_parts(
    streams: int, factor: float, before: int
) -> None:
    """As quickly after a pause as after a change of speed: what is slow does not fade slowly."""
    pace = Pace(SPEED, MIB)
    times = bursts(streams, 0.0, before)
    for at_s in times:
        pace.completed(PART, at_s)
    pause_s = 1.0
    for at_s in bursts(streams, 0.0, 64 // streams):
        pace.completed(PART, times[-1] + pause_s + at_s / factor)
    assert pace.bytes_per_s == pytest.approx(SPEED * factor, rel=0.1)
