"""The benchmark of GPUs runs; what it measures here means nothing."""

import pytest

from benchmarks import gpu
from mx.units import MIB

ROWS = [
    "same-GPU attach, 0.0 GB resident, vmm",
    "same-GPU attach, 0.0 GB resident, legacy",
    "device copy",
    "host to device",
    "device to host",
    "host to device, a memfd pinned for it and copied",
]


def test_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "SPARE_BYTES", 0)
    monkeypatch.setattr(gpu, "READ_BYTES", MIB)
    rows = gpu.run(nbytes=3 * MIB, resident=2 * MIB, rounds=1)
    assert [row.work for row in rows][: len(ROWS)] == ROWS
