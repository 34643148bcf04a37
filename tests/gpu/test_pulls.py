"""Serving from and pulling into GPU memory."""

from __future__ import annotations

import contextlib
import ctypes
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
from mx.core.types import Manifest, ModelKey, SourceState
from mx.cuda.device import CudaStream, Device, DeviceMemory
from mx.cuda.staged import SlotPart, StagedSession
from mx.errors import CapacityError, ConfigError, DigestError
from mx.memory import tensors as tensor_views
from mx.source.doubts import wrong_tensors
from mx.source.model import hold_checkpoint, hold_tensors
from mx.testing import spans
from mx.transport import DeviceView
from mx.units import MIB
from tests.gpu.rig import Spy
from tests.support.commands import free_port
from tests.support.described import describe
from tests.support.outcomes import error_of
from tests.support.tensors import same


def held(pull: api.Pull) -> dict[str, torch.Tensor]:
    """Return host copies of what a pull has on a GPU."""
    view, manifest = pull.device_buffer(), pull.manifest
    assert manifest is not None
    return on_host(view, manifest)


def on_host(view: DeviceView, manifest: Manifest) -> dict[str, torch.Tensor]:
    return tensor_views.state_dict(memoryview(bytearray(spans.peek(view))), manifest.layout)


def spoil(view: DeviceView, manifest: Manifest) -> str:
    """Write to a tensor of layer 1, and return its name."""
    layer = manifest.layout.layers[1]
    at = layer.arena_offset + layer.extents[0][0]
    spans.poke(view[at : at + 64], b"\x55" * 64)
    return manifest.layout.tensors[layer.first_tensor].name


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
def source(checkpoint: Path, settings: config.Settings) -> Iterator[api.Source]:
    with api.serve(checkpoint, model="m", settings=settings) as found:
        yield found


def pull(source: api.Source, settings: config.Settings, **options: Any) -> api.Pull:
    return api.pull("m", peer=source.endpoint, settings=settings, device="cuda:0", **options)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("verify", ["chunks", "strong"])
def test_from_host_memory_through_staging(
    source: api.Source,
    settings: config.Settings,
    weights: dict[str, torch.Tensor],
    transport: str,
    verify: str,
    gpu: Device,
) -> None:
    with pull(source, settings, transport=transport, verify=verify) as found:
        report = found.wait(30)
        view = found.device_buffer()
        assert isinstance(view, DeviceView) and view.device == gpu.key
        assert same(held(found), weights)
        if torch.cuda.is_available():
            for name, tensor in found.layer_state_dict(1).items():
                assert torch.equal(weights[name], tensor.cpu())
    assert report.verified == {"chunks": "digest", "strong": "strong"}[verify]
    assert report.paths[0].transport == transport


def addressed(array: Any, ordinal: int) -> torch.Tensor:
    """Return a tensor at a device address, which the host can't read: torch is built for CPUs."""
    buffer = (ctypes.c_ubyte * len(array.view)).from_address(array.view.address)
    buffer.owner = array.view.owner  # type: ignore[attr-defined]
    return torch.frombuffer(buffer, dtype=torch.uint8)


def test_streams_wait_instead_of_the_cpu(
    gpu: Device,
    source: api.Source,
    settings: config.Settings,
    weights: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setattr(tensor_views, "_on_device", addressed)
    name = "lm_head.weight"
    with pull(source, settings) as found:
        signals, tensors = found.signals(), found.early_state_dict()
        wanted = tensors[name]
        with DeviceMemory(gpu, wanted.nbytes) as copy, CudaStream(gpu) as stream:
            last = signals.layers - 1
            signals.wait_verified(last, stream.handle)
            with gpu.current():
                gpu.driver.copy_dtod(copy.address, wanted.data_ptr(), wanted.nbytes, stream.handle)
            stream.synchronize()
            signals.check([last])
            copied = spans.peek(DeviceView(gpu.key, copy.address, wanted.nbytes, copy))
            assert copied == bytes(weights[name].view(torch.uint8).numpy().data)
        found.wait(30)
        signals.check()
        del wanted, tensors


def test_a_failed_pull_lets_streams_go(
    gpu: Device,
    source: api.Source,
    settings: config.Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queued = threading.Event()

    copy = StagedSession._copy

    def lose(self: StagedSession, part: SlotPart) -> None:
        assert queued.wait(60)
        if part.slot is not None:  # a part that is not read any more has none
            part.slot.view[0] ^= 1
        copy(self, part)

    monkeypatch.setattr(StagedSession, "_copy", lose)
    with pull(source, settings, transport="tcp") as found:
        signals = found.signals()
        with CudaStream(gpu) as stream:
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
    checkpoint: Path, weights: dict[str, torch.Tensor], settings: config.Settings
) -> None:
    with api.pull("m", path=checkpoint, settings=settings, device="cuda:0") as found:
        found.wait(30)
        assert same(held(found), weights)


def test_a_source_on_a_gpu_says_so(
    gpu: Device,
    checkpoint: Path,
    weights: dict[str, torch.Tensor],
    settings: config.Settings,
) -> None:
    manifests = []
    for what in (checkpoint, weights):
        key = ModelKey("m", "main", "checkpoint")
        found = (
            hold_checkpoint(checkpoint, key, device="cuda:0", threads=2)
            if what is checkpoint
            else hold_tensors(*describe(weights), key, device="cuda:0")
        )
        (region,) = found.regions()
        record = found.record("here:1", Place(), ["cuda_ipc"], SourceState.SERVING)
        assert region.device == record.place.device == record.table.regions[0].device == gpu.key
        assert isinstance(region.view, DeviceView)
        assert same(on_host(region.view, found.manifest), weights)
        manifests.append(found.manifest.ref.identity)
        del region
        found.arena.release()
    cpu = hold_checkpoint(checkpoint, key, threads=2)
    assert manifests == [cpu.manifest.ref.identity] * 2
    whole = range(len(cpu.manifest.layout.layers))
    assert [cpu.pages.get(i) for i in whole] == [found.pages.get(i) for i in whole]
    cpu.arena.release()


def test_wrong_bytes_are_noticed_on_the_device(
    spy: Spy,
    source: api.Source,
    settings: config.Settings,
) -> None:
    def torn(copy: Any, target: int, host: int, nbytes: int, stream: int) -> Any:
        # The digests' own lists are small; a chunk loses its last byte on the way.
        return copy(target, host, nbytes - (nbytes > 100_000), stream)

    spy.replace("cuMemcpyHtoDAsync", torn)
    with pull(source, settings, transport="pcie_p2p") as found, pytest.raises(DigestError):
        found.wait(30)


def test_too_big_for_the_gpu(spy: Spy, source: api.Source, settings: config.Settings) -> None:
    spy.replace("cuMemGetInfo", lambda real: (real()[0], 65 * MIB, 1 << 30))
    with pull(source, settings) as found, pytest.raises(CapacityError, match="free memory on"):
        found.wait(30)


@pytest.mark.parametrize(
    ("device", "says"), [("cuda:99", "GPU-"), ("gpu", "cpu or cuda:N"), ("cuda:x", "cuda:0")]
)
def test_no_such_device(device: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        api.pull("m", device=device)
    with pytest.raises(ConfigError, match=says):
        api.serve("nowhere", model="m", device=device)


def test_into_is_host_memory() -> None:
    with pytest.raises(ConfigError, match="host memory"):
        api.pull("m", device="cuda:0", into=memoryview(bytearray(10)))


@pytest.mark.parametrize("holder", ["source", "replica"])
def test_a_process_that_writes_to_a_gpus_memory_is_no_liar(
    checkpoint: Path, settings: config.Settings, holder: str
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
            name = spoil(view, manifest)
            with api.pull("m", peer=endpoint, settings=settings) as reader:
                error = error_of(reader)
            assert "changed" in str(error), error
            assert "match the model's identity" not in str(error) and "lies" not in error.hint
            holds = giver.hold() if isinstance(giver, api.Pull) else giver
            assert name in holds.withdrawn


def test_what_was_written_to_a_gpus_memory_is_found_by_hashing_the_chunk_again(
    checkpoint: Path,
) -> None:
    key = ModelKey("m", "main", "checkpoint")
    found = hold_checkpoint(checkpoint, key, device="cuda:0", threads=2)
    try:
        chunks = range(len(found.manifest.grid))
        assert not any(wrong_tensors(found, chunk) for chunk in chunks)
        assert isinstance(found.arena.view, DeviceView)
        name = spoil(found.arena.view, found.manifest)
        assert {wrong_tensors(found, chunk) for chunk in chunks} == {"", name}
    finally:
        found.release()
