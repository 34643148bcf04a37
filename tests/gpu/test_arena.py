"""Arenas in GPU memory."""

from __future__ import annotations

import gc
import random
from contextlib import closing

import pytest
from blake3 import blake3

from mx.core.grid import BLOCK_BYTES
from mx.core.layout import TensorSpec
from mx.core.manifest import encode, plan_layout
from mx.core.types import Packaging
from mx.cuda import blake3 as compiler
from mx.cuda.device import Device
from mx.errors import CapacityError, DigestError, LocalError
from mx.memory.device import DeviceArena, HostReader
from mx.memory.verify import check_layer
from mx.storage.reader import fill_from_tensors
from mx.testing import spans
from mx.units import MIB
from mx.views import host_view
from tests.gpu.rig import Spy


@pytest.fixture(params=[True, False], ids=["vmm", "cuMemAlloc"], autouse=True)
def vmm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Give whether the GPU has virtual memory management: a GPU of old has none."""
    if not request.param:
        monkeypatch.setattr(Device, "has_vmm", False)
    return bool(request.param)


@pytest.mark.parametrize("nbytes", [0, 1, 3 * MIB])
def test_one_piece_on_its_device(gpu: Device, vmm: bool, nbytes: int) -> None:
    last = gpu.driver.device_count() - 1
    uuid = gpu.driver.device_uuid(last)
    arena = DeviceArena(nbytes, f"cuda:{last}")
    assert arena.view.device == f"cuda:{uuid}" and len(arena.view) == nbytes
    with arena.device.current():
        found = gpu.driver.pointer(arena.address)
    assert found.ordinal == last and found.base == arena.address and found.nbytes >= nbytes
    assert (found.fd_capable, found.ipc_capable) == (vmm, not vmm)
    assert not vmm or not found.nbytes % gpu.driver.vmm_granularity(last)
    arena.release()
    arena.release()


def test_views_keep_the_memory(spy: Spy, vmm: bool) -> None:
    free = "cuMemUnmap" if vmm else "cuMemFree"
    arena = DeviceArena(MIB, "cuda:0")
    part = arena.private_view()[100:200]
    arena.release()
    before = spy.calls[free]
    spans.poke(part, b"7" * len(part))
    assert spans.peek(part) == b"7" * len(part) and spy.calls[free] == before
    del part, arena
    gc.collect()
    assert spy.calls[free] > before


def test_too_big_is_said_before_anything_is_taken(gpu: Device, spy: Spy) -> None:
    with pytest.raises(CapacityError, match="the model needs .* on cuda:GPU-"):
        DeviceArena(gpu.memory_info()[1], "cuda:0")
    assert not spy.calls["cuMemAlloc"] and not spy.calls["cuMemCreate"]


def test_hashes_what_landed_as_the_host_would() -> None:
    data = random.Random(5).randbytes(3 * MIB)
    blocks = [slice(256, 256 + MIB), slice(256 + MIB, 1_500_000), slice(1_500_416, 2_500_417)]
    arena = DeviceArena(len(data), "cuda:0")
    spans.poke(arena.view, data)
    hasher = arena.hasher([arena.view[block] for block in blocks])
    hasher.landed(100)
    assert hasher.block_digests() == b"".join(blake3(data[block]).digest() for block in blocks)
    with pytest.raises(LocalError, match="in host memory"):
        arena.hasher([memoryview(data)[block] for block in blocks])
    arena.release()


def test_filled_layer_by_layer() -> None:
    arena = DeviceArena(12 * 4096, "cuda:0")
    with arena.filling() as window:
        for start, nbytes in ((8192, 5000), (0, 4096)):
            window.view[start : start + nbytes] = bytes([start // 4096 + 1]) * nbytes
            window.layer_done(start, nbytes)
            assert not any(window.view[start : start + nbytes])  # its pages are given back
    assert spans.peek(arena.view[8192:13192]) == b"\3" * 5000
    assert spans.peek(arena.view[:4096]) == b"\1" * 4096
    arena.release()


def test_bytes_for_the_host() -> None:
    data = random.Random(6).randbytes(5 * MIB)
    arena = DeviceArena(len(data), "cuda:0")
    spans.poke(arena.view, data)
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
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
    (said,) = [r.getMessage() for r in caplog.records if "no kernels for" in r.getMessage()]
    assert said.startswith(f"{arena.device.key} is hashed on the host")
    arena.release()


def test_attached_memory_is_hashed_where_it_is() -> None:
    sizes = {"model.layers.0.mlp.a": 5 * BLOCK_BYTES + 17, "model.layers.1.mlp.d": 2 * BLOCK_BYTES}
    layout = plan_layout([TensorSpec(name, "U8", (size,)) for name, size in sizes.items()])
    host = memoryview(bytearray(layout.arena_nbytes))
    tensors = {name: memoryview(b"x" * size) for name, size in sizes.items()}
    manifest = encode(layout, Packaging(), fill_from_tensors(tensors, layout, host).roots)
    arena = DeviceArena(len(host), "cuda:0")
    spans.poke(arena.view, bytes(host))
    with closing(HostReader()) as reader:
        for layer in layout.layers:
            check_layer(manifest, arena.view, layer.index, reader)
        at = layout.layers[1].arena_offset + BLOCK_BYTES
        spans.poke(arena.view[at : at + 1], b"\0")
        check_layer(manifest, arena.view, 0, reader)
        with pytest.raises(DigestError, match=r"model\.layers\.1\.mlp\.d"):
            check_layer(manifest, arena.view, 1, reader)
    arena.release()
