"""The bars of a real GPU: copies beside the bare copy, the attach of 10 GB, the kernels' speed."""

from __future__ import annotations

import pytest

from benchmarks import gpu as rows
from mx.cuda.device import Device
from mx.units import GIB
from tests.gpu.claims import FIGURES


def test_as_fast_as_the_bars_say(gpu: Device, request: pytest.FixtureRequest) -> None:
    if gpu.driver.device_name(0).startswith("Stand-in"):
        pytest.skip("speed is claimed on a GPU alone")
    found = rows.run(nbytes=2 * GIB, resident=10 * 10**9, rounds=5)
    request.config.stash[FIGURES] = found
    missed = [f"{row.work}: {row.value} {row.unit}, {row.bar}" for row in found if not row.ok]
    assert not missed
