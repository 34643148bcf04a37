"""Arenas in GPU memory, on fake GPUs."""

from __future__ import annotations

import ctypes
import gc
import random
from collections.abc import Iterator

import pytest
from blake3 import blake3

from mx.cuda import blake3 as compiler
from mx.cuda import driver as cuda
from mx.cuda.device import device_key
from mx.errors import CapacityError, LocalError
from mx.memory.device import DeviceArena, HostReader
from mx.units import GIB, MIB
from mx.views import host_view
from tests.support import fake_kernels
from tests.support.fake_cuda import GRANULARITY_BYTES, FakeDriver, fake_uuid


@pytest.fixture(params=[True, False], ids=["vmm", "cuMemAlloc"])
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    monkeypatch.setattr(compiler, "compiled", fake_kernels.images)
    driver = FakeDriver(vmm=request.param)
    with cuda.installed(driver):
        yield driver
    gc.collect()
    assert driver.live() == []


@pytest.mark.parametrize("nbytes", [0, 1, 3 * MIB])
def test_one_piece_on_its_device(fake: FakeDriver, nbytes: int) -> None:
    arena = DeviceArena(nbytes, "cuda:1")
    assert arena.view.device == device_key(fake_uuid(1)) and len(arena.view) == nbytes
    with arena.device.current():
        found = fake.pointer(arena.address)
    assert found.ordinal == 1 and found.base == arena.address and found.nbytes >= nbytes
    vmm = arena.device.has_vmm
    assert (found.fd_capable, found.ipc_capable) == (vmm, not vmm)
    assert fake.used_nbytes(1) >= nbytes and (not vmm or not found.nbytes % GRANULARITY_BYTES)
    arena.release()
    arena.release()


def test_views_keep_the_memory(fake: FakeDriver) -> None:
    arena = DeviceArena(MIB, "cuda:0")
    part = arena.private_view()[100:200]
    arena.release()
    ctypes.memset(part.address, 7, len(part))
    assert fake.used_nbytes() > 0
    del part, arena
    gc.collect()
    assert fake.used_nbytes() == 0


def test_too_big_is_said_before_anything_is_taken(fake: FakeDriver) -> None:
    with pytest.raises(CapacityError, match=r"the model needs 1.07 GB on cuda:GPU-.*free memory"):
        DeviceArena(GIB, "cuda:0")
    assert not fake.calls["mem_alloc"] and not fake.calls["vmm_create"]


def test_hashes_what_landed_as_the_host_would(fake: FakeDriver) -> None:
    data = random.Random(5).randbytes(3 * MIB)
    blocks = [slice(256, 256 + MIB), slice(256 + MIB, 1_500_000), slice(1_500_416, 2_500_417)]
    arena = DeviceArena(len(data), "cuda:0")
    ctypes.memmove(arena.address, data, len(data))
    hasher = arena.hasher([arena.view[block] for block in blocks])
    hasher.landed(100)
    assert hasher.block_digests() == b"".join(blake3(data[block]).digest() for block in blocks)
    with pytest.raises(LocalError, match="in host memory"):
        arena.hasher([memoryview(data)[block] for block in blocks])
    arena.release()


def test_filled_layer_by_layer(fake: FakeDriver) -> None:
    arena = DeviceArena(12 * 4096, "cuda:0")
    with arena.filling() as window:
        for start, nbytes in ((8192, 5000), (0, 4096)):
            window.view[start : start + nbytes] = bytes([start // 4096 + 1]) * nbytes
            window.layer_done(start, nbytes)
            assert not any(window.view[start : start + nbytes])  # its pages are given back
    assert ctypes.string_at(arena.address + 8192, 5000) == b"\3" * 5000
    assert ctypes.string_at(arena.address, 4096) == b"\1" * 4096
    arena.release()


def test_bytes_for_the_host(fake: FakeDriver) -> None:
    data = random.Random(6).randbytes(5 * MIB)
    arena = DeviceArena(len(data), "cuda:0")
    ctypes.memmove(arena.address, data, len(data))
    reader = HostReader()
    assert bytes(host_view(reader.whole(arena.view))) == data
    assert b"".join(bytes(piece) for piece in reader.pieces(arena.view[7:-9])) == data[7:-9]
    assert (
        bytes(host_view(reader.whole(arena.view[3:3])))
        == b""
        == b"".join(reader.pieces(arena.view[3:3]))
    )
    host = memoryview(data)
    assert reader.whole(host) is host and list(reader.pieces(host)) == [host]
    reader.close()
    reader.close()
    arena.release()


def test_kernels_that_can_t_be_compiled_leave_it_to_the_host(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(capability: int) -> object:
        raise LocalError(f"no kernels for {capability}")

    monkeypatch.setattr(compiler, "compiled", refuse)
    data = random.Random(1).randbytes(3 * MIB)
    arena = DeviceArena(len(data), "cuda:0")
    arena.ring.upload(arena.address, memoryview(data))
    sizes = [1, 1000, MIB, 5, 900_000]
    hasher = arena.hasher([arena.view[16 * n : 16 * n + size] for n, size in enumerate(sizes)])
    digests = [blake3(data[16 * n : 16 * n + size]).digest() for n, size in enumerate(sizes)]
    for _ in range(2):
        assert hasher.block_digests() == b"".join(digests)
    assert [r.message for r in caplog.records if "no kernels for 90" in r.message] == [
        f"{arena.device.key} is hashed on the host, which takes its bytes over PCIe: "
        "no kernels for 90"
    ]
    arena.release()


def test_digests_of_fresh_memory_are_not_those_of_zeros(fake: FakeDriver) -> None:
    """The fake's memory is garbage until written: a read that skips bytes shows."""
    arena = DeviceArena(4096, "cuda:0")
    digests = arena.hasher([arena.view]).block_digests()
    assert digests != blake3(bytes(4096)).digest()
    arena.release()
