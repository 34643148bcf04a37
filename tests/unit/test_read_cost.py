"""What a read costs in the target, in calls of Python functions: their number depends on no other
program."""

from __future__ import annotations

import sys
import time
from types import FrameType

import pytest

from benchmarks import read_cost

READS = 200
#: 54 for each read, and what adds the connection.
MOST_CALLS = 60


def test_a_read_makes_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [0]
    times: list[int] = []

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        calls[0] += event == "call"

    def clock() -> float:
        times.append(calls[0])
        sys.setprofile(count if len(times) == 1 else None)
        return float(len(times))

    monkeypatch.setattr(read_cost, "READS", READS)
    monkeypatch.setattr(time, "process_time", clock)
    read_cost.microseconds_per_read()
    assert times[1] <= MOST_CALLS * READS
