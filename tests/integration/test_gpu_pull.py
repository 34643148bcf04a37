"""Serving from and pulling into GPU memory, on fake GPUs: everything but the kernels is real."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mx import api, config
from mx.core.topology import Place
from mx.core.types import ModelKey, SourceState
from mx.cuda import blake3
from mx.cuda import driver as cuda
from mx.cuda.device import Device, DeviceMemory, Stream, device_key
from mx.cuda.errors import CudaUnavailableError
from mx.cuda.ring import PinnedRing, Slot
from mx.errors import CapacityError, ConfigError, DigestError
from mx.memory import tensors as tensor_views
from mx.source.doubts import wrong_tensors
from mx.source.model import hold_checkpoint, hold_tensors
from mx.transport import DeviceView
from mx.units import MIB
from tests.support import fake_kernels
from tests.support.commands import free_port
from tests.support.described import describe
from tests.support.fake_cuda import FakeDriver, fake_uuid
from tests.support.outcomes import error_of
from tests.support.tensors import same

pytestmark = pytest.mark.integration


def on_fake_device(array: object, ordinal: int) -> torch.Tensor:
    """A GPU's bytes where the fake one has them."""
    view = array.view  # type: ignore[attr-defined]
    buffer = (ctypes.c_ubyte * len(view)).from_address(view.address)
    buffer.owner = view.owner  # type: ignore[attr-defined]
    return torch.frombuffer(buffer, dtype=torch.uint8)


@pytest.fixture(params=[False, True], ids=["late", "at once"])
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    monkeypatch.setattr(blake3, "compiled", fake_kernels.images)
    monkeypatch.setattr(tensor_views, "_on_device", on_fake_device)
    driver = FakeDriver(gpus=2, eager=request.param)
    with cuda.installed(driver):
        yield driver
    gc.collect()
    assert driver.live() == []


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    found = {
        f"model.layers.{layer}.{name}": torch.randn(*shape, generator=made).to(dtype)
        for layer in range(3)
        for name, shape, dtype in (
            ("self_attn.q_proj.weight", (512, 700), torch.bfloat16),
            ("input_layernorm.weight", (333,), torch.float32),  # not a multiple of 256 bytes
            ("mlp.up_proj.weight", (1500, 512), torch.float16),
            ("mlp.bias", (3,), torch.uint8),
        )
    }
    found["model.embed_tokens.weight"] = torch.randn(1000, 64, generator=made)
    found["lm_head.weight"] = torch.randn(1000, 64, generator=made)
    return found


@pytest.fixture
def checkpoint(tmp_path: Path, weights: dict[str, torch.Tensor]) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture
def settings() -> config.Settings:
    found = config.load()
    return replace(found, coordinator=f"127.0.0.1:{free_port()}")


@pytest.fixture
def source(fake: FakeDriver, checkpoint: Path, settings: config.Settings) -> Iterator[api.Source]:
    with api.serve(checkpoint, model="m", settings=settings) as found:
        yield found


def pull(source: api.Source, settings: config.Settings, **options: Any) -> api.Pull:
    return api.pull("m", peer=source.endpoint, settings=settings, device="cuda:1", **options)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("verify", ["chunks", "strong"])
def test_from_host_memory_through_staging(
    source: api.Source,
    settings: config.Settings,
    weights: dict[str, torch.Tensor],
    transport: str,
    verify: str,
) -> None:
    with pull(source, settings, transport=transport, verify=verify) as found:
        report = found.wait(30)
        view = found.device_buffer()
        assert isinstance(view, DeviceView) and view.device == device_key(fake_uuid(1))
        assert same(found.state_dict(), weights)
        tensors = found.layer_state_dict(1)
    assert report.verified == {"chunks": "digest", "strong": "strong"}[verify]
    assert report.paths[0].transport == transport
    assert all(torch.equal(weights[name], tensor) for name, tensor in tensors.items())


def test_streams_wait_instead_of_the_cpu(
    fake: FakeDriver,
    source: api.Source,
    settings: config.Settings,
    weights: dict[str, torch.Tensor],
) -> None:
    name = "lm_head.weight"
    with pull(source, settings) as found, Device.open(fake, "cuda:1") as device:
        signals, tensors = found.signals(), found.early_state_dict()
        wanted = tensors[name]
        with DeviceMemory(device, wanted.nbytes) as copy, Stream(device) as stream:
            last = signals.layers - 1
            signals.wait_verified(last, stream.handle)
            with device.current():
                fake.copy_dtod(copy.address, wanted.data_ptr(), wanted.nbytes, stream.handle)
            stream.synchronize()
            signals.check([last])
            assert ctypes.string_at(copy.address, wanted.nbytes) == bytes(
                weights[name].view(torch.uint8).numpy().data
            )
        found.wait(30)
        signals.check()


def test_a_failed_pull_lets_streams_go(
    fake: FakeDriver,
    source: api.Source,
    settings: config.Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queued = threading.Event()

    def lose(self: PinnedRing, slot: Slot, target: int, nbytes: int, offset: int = 0) -> None:
        assert queued.wait(60)
        slot.view[offset] ^= 1  # what is staged is hashed where it is staged
        slot.event.record(self._up)

    monkeypatch.setattr(PinnedRing, "push", lose)
    with pull(source, settings, transport="tcp") as found, Device.open(fake, "cuda:1") as device:
        signals = found.signals()
        with Stream(device) as stream:
            signals.wait_verified(0, stream.handle)
            queued.set()
            stream.synchronize()
        with pytest.raises(DigestError, match="do not match the model's identity"):
            signals.check([0])


def test_signals_are_for_gpus(source: api.Source, settings: config.Settings) -> None:
    with api.pull("m", peer=source.endpoint, settings=settings) as found:
        with pytest.raises(ConfigError, match="cuda:N"):
            found.signals()
        found.wait(30)


def test_written_to_disk_by_a_copy_back(
    source: api.Source,
    settings: config.Settings,
    weights: dict[str, torch.Tensor],
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    with pull(source, settings, out=out) as found:
        found.wait(30)
    assert same(load_file(out / "model.safetensors"), weights)


def test_from_disk(
    fake: FakeDriver, checkpoint: Path, weights: dict[str, torch.Tensor], settings: config.Settings
) -> None:
    with api.pull("m", path=checkpoint, settings=settings, device="cuda:0") as found:
        found.wait(30)
        assert same(found.state_dict(), weights)
        assert fake.used_nbytes(0) and not fake.used_nbytes(1)


def test_a_source_on_a_gpu_says_so(
    fake: FakeDriver,
    checkpoint: Path,
    weights: dict[str, torch.Tensor],
    settings: config.Settings,
) -> None:
    manifests = []
    for what in (checkpoint, weights):
        key = ModelKey("m", "main", "checkpoint")
        held = (
            hold_checkpoint(checkpoint, key, device="cuda:0", threads=2)
            if what is checkpoint
            else hold_tensors(*describe(weights), key, device="cuda:0")
        )
        (region,) = held.regions()
        record = held.record("here:1", Place(), ["cuda_ipc"], SourceState.SERVING)
        expected = device_key(fake_uuid(0))
        assert region.device == record.place.device == record.table.regions[0].device == expected
        assert isinstance(region.view, DeviceView)
        assert same(tensor_views.state_dict(region.view, held.manifest.layout), weights)
        manifests.append(held.manifest.ref.identity)
        del region
        held.arena.release()
    cpu = hold_checkpoint(checkpoint, key, threads=2)
    assert manifests == [cpu.manifest.ref.identity] * 2
    whole = range(len(cpu.manifest.layout.layers))
    assert [cpu.pages.get(i) for i in whole] == [held.pages.get(i) for i in whole]
    cpu.arena.release()


def test_wrong_bytes_are_noticed_on_the_device(
    fake: FakeDriver,
    source: api.Source,
    settings: config.Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy = FakeDriver.copy_htod

    def torn(self: FakeDriver, target: int, host: int, nbytes: int, stream: int) -> None:
        # The digests' own lists are small; a chunk loses its last byte on the way.
        copy(self, target, host, nbytes - (nbytes > 100_000), stream)

    monkeypatch.setattr(FakeDriver, "copy_htod", torn)
    with pull(source, settings, transport="pcie_p2p") as found, pytest.raises(DigestError):
        found.wait(30)


def test_too_big_for_the_gpu(
    source: api.Source, settings: config.Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeDriver, "mem_info", lambda self: (70 * MIB, 1 << 30))
    with pull(source, settings) as found, pytest.raises(CapacityError, match="free memory on"):
        found.wait(30)


@pytest.mark.parametrize(
    ("device", "says"), [("cuda:7", fake_uuid(1)), ("gpu", "cpu or cuda:N"), ("cuda:x", "cuda:0")]
)
def test_no_such_device(fake: FakeDriver, device: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        api.pull("m", device=device)
    with pytest.raises(ConfigError, match=says):
        api.serve("nowhere", model="m", device=device)


def test_no_cuda_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_driver", CudaUnavailableError("no libcuda", hint="get one"))
    with pytest.raises(ConfigError, match=r"no libcuda \(get one; or use `device=cpu`\)"):
        api.pull("m", device="cuda:0")


def test_into_is_host_memory(fake: FakeDriver) -> None:
    with pytest.raises(ConfigError, match="host memory"):
        api.pull("m", device="cuda:0", into=memoryview(bytearray(10)))


@pytest.mark.parametrize("holder", ["source", "replica"])
def test_a_process_that_writes_to_a_gpus_memory_is_no_liar(
    fake: FakeDriver, checkpoint: Path, settings: config.Settings, holder: str
) -> None:
    """The chunk is hashed again where it is, and withdrawn."""
    device = "cuda:0" if holder == "source" else "cpu"
    with api.serve(checkpoint, model="m", device=device, settings=settings) as source:
        giver: api.Source | api.Pull = source
        if holder == "replica":
            giver = pull(source, settings, hold=True)
        with contextlib.ExitStack() as ends:
            if isinstance(giver, api.Pull):
                ends.enter_context(giver)
                endpoint = giver.hold().endpoint
                source.close()
            else:
                endpoint = giver.endpoint
            view, manifest = giver.memory(), giver.manifest
            assert isinstance(view, DeviceView) and manifest is not None
            with api.pull("m", peer=endpoint, settings=settings) as reader:
                reader.wait(30)
            layer = manifest.layout.layers[1]
            ctypes.memset(view.address + layer.arena_offset + layer.extents[0][0], 0x55, 64)
            with api.pull("m", peer=endpoint, settings=settings) as reader:
                error = error_of(reader)
            assert "changed" in str(error), error
            assert "match the model's identity" not in str(error) and "lies" not in error.hint
            name = manifest.layout.tensors[layer.first_tensor].name
            held = giver.hold() if isinstance(giver, api.Pull) else giver
            assert name in held.withdrawn


def test_what_was_written_to_a_gpus_memory_is_found_by_hashing_the_chunk_again(
    fake: FakeDriver, checkpoint: Path
) -> None:
    key = ModelKey("m", "main", "checkpoint")
    held = hold_checkpoint(checkpoint, key, device="cuda:0", threads=2)
    try:
        chunks = range(len(held.manifest.grid))
        assert not any(wrong_tensors(held, chunk) for chunk in chunks)
        layer = held.manifest.layout.layers[1]
        tensor = held.manifest.layout.tensors[layer.first_tensor]
        view = held.arena.view
        assert isinstance(view, DeviceView)
        ctypes.memset(view.address + layer.arena_offset + layer.extents[0][0], 0x55, 64)
        assert {wrong_tensors(held, chunk) for chunk in chunks} == {"", tensor.name}
    finally:
        held.release()
