"""The GPU rows' machinery runs, over fake GPUs; what it measures there means nothing."""

import pytest

from benchmarks import gpu
from mx.cuda import driver as cuda
from mx.errors import LocalError
from mx.transport import Unavailable
from mx.units import MIB
from tests.support.fake_cuda import FakeDriver

ROWS = [
    "same-GPU attach, 0.0 GB resident, vmm",
    "same-GPU attach, 0.0 GB resident, legacy",
    "device copy",
    "host to device",
    "device to host",
    "host to device, a memfd pinned for it and copied",
]


def test_rows_of_fake_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    install = "from tests.support.gpu_rig import cuda_ipc; cuda_ipc()\n"
    monkeypatch.setattr(gpu, "_SOURCE", install + gpu._SOURCE)
    monkeypatch.setattr(gpu, "SPARE_BYTES", 0)
    monkeypatch.setattr(gpu, "READ_BYTES", MIB)
    fake = FakeDriver(gpus=2)
    with cuda.installed(fake):
        rows = gpu.run(nbytes=3 * MIB, resident=2 * MIB, rounds=1)
    assert [row.work for row in rows][: len(ROWS)] == ROWS
    assert fake.live() == []


def test_without_a_gpu_it_says_why() -> None:
    if not isinstance(cuda.probe(), Unavailable):
        pytest.skip("there is one")
    with pytest.raises(LocalError, match="(?i)cuda"):
        gpu.run(nbytes=MIB, resident=MIB, rounds=1)
