"""mx serve and mx pull in real processes on one GPU: pulled bytes equal the checkpoint's."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import mx
from benchmarks.processes import Cluster
from mx.memory.tensors import state_dict
from mx.testing import spans
from mx.transport import DeviceView
from tests.support.tensors import same

MODEL = "small"


def checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """Write a checkpoint with a few layers of odd shapes and dtypes, 70 MB."""
    made = torch.Generator().manual_seed(11)
    tensors = {"model.embed_tokens.weight": torch.randn(4099, 1024, generator=made).bfloat16()}
    for layer in range(3):
        name = f"model.layers.{layer}"
        tensors[f"{name}.mlp.weight"] = torch.randn(2048, 1027, generator=made)
        tensors[f"{name}.norm.weight"] = torch.randn(1027, generator=made).half()
        tensors[f"{name}.flags"] = torch.randint(0, 2, (13,), generator=made).bool()
    tensors["lm_head.weight"] = torch.randn(4099, 1024, generator=made).bfloat16()
    save_file(tensors, folder / "model.safetensors")
    return tensors


@contextmanager
def served(folder: Path, device: str) -> Iterator[Cluster]:
    cluster = Cluster()
    try:
        cluster.serve(folder, MODEL, "--device", device)
        yield cluster
    finally:
        cluster.close()


def check(pull: mx.Pull, wanted: dict[str, torch.Tensor], device: str) -> None:
    """Compare the bytes that a pull has with a checkpoint's, wherever they are."""
    view, manifest = pull.memory(), pull.manifest
    assert isinstance(view, DeviceView if device == "cuda" else memoryview) and manifest
    found = state_dict(memoryview(bytearray(spans.peek(view))), manifest.layout)
    assert same(found, wanted)
    if device == "cpu" or torch.cuda.is_available():
        state = pull.state_dict()
        assert same({name: tensor.cpu() for name, tensor in state.items()}, wanted)
        assert {tensor.device.type for tensor in state.values()} == {device}


@pytest.mark.parametrize("attach", [True, False])
def test_gpu_to_gpu(tmp_path: Path, attach: bool) -> None:
    tensors = checkpoint(tmp_path)
    with served(tmp_path, "cuda:0") as cluster:
        with mx.pull(
            MODEL, coordinator=cluster.coordinator, device="cuda:0", attach=attach
        ) as pull:
            assert len(list(pull.layers())) == 5
            report = pull.wait(60)
            check(pull, tensors, "cuda")
        assert [path.transport for path in report.paths] == ["cuda_ipc"]
        assert [path.attached for path in report.paths] == [attach]


@pytest.mark.parametrize("source, target", [("cpu", "cuda:0"), ("cuda:0", "cpu")])
def test_between_host_and_gpu(tmp_path: Path, source: str, target: str) -> None:
    tensors = checkpoint(tmp_path)
    with served(tmp_path, source) as cluster:
        with mx.pull(MODEL, coordinator=cluster.coordinator, device=target) as pull:
            report = pull.wait(60)
            check(pull, tensors, target.partition(":")[0])
        assert "pcie_p2p" in [path.transport for path in report.paths]


def test_the_command_says_by_which_path(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    with served(tmp_path, "cuda:0") as cluster:
        found = subprocess.run(
            [
                *(sys.executable, "-m", "mx", "pull", MODEL, "--device", "cuda:0", "--json"),
                *("--coordinator", cluster.coordinator),
            ],
            stdout=subprocess.PIPE,
            timeout=100,
            check=True,
        )
    report = json.loads(found.stdout)
    assert report["verified"]
    assert [path["transport"] for path in report["paths"]] == ["cuda_ipc-attach"]
