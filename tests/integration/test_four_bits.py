"""Tensors of four bits: torch has two of their elements in one (`float4_e2m1fn_x2`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import mx
from mx.errors import ConfigError
from tests.support.daemon import daemon

_PAIRS = torch.float4_e2m1fn_x2


@pytest.fixture(scope="module")
def coordinator() -> Iterator[str]:
    with daemon() as (_, address):
        yield address


def pairs(*shape: int, first: int = 0) -> torch.Tensor:
    """Return a tensor of F4, no two bytes alike."""
    return torch.arange(torch.Size(shape).numel()).add(first).byte().view(*shape).view(_PAIRS)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        (one[n].dtype, one[n].shape) == (other[n].dtype, other[n].shape)
        and torch.equal(one[n].view(torch.uint8), other[n].view(torch.uint8))
        for n in one
    )


def tensors() -> dict[str, torch.Tensor]:
    return {
        "model.layers.0.w": pairs(4, 6),
        "model.layers.0.row": pairs(10, first=3),
        "model.layers.1.none": pairs(0, 4),
        "model.layers.1.scale": torch.arange(4.0),
    }


def test_from_a_file(coordinator: str, tmp_path: Path) -> None:
    """As safetensors.torch gives them; the file comes out bit for bit; `into` takes them."""
    path = tmp_path / "model" / "model.safetensors"
    path.parent.mkdir()
    save_file(tensors(), path)
    expected = load_file(path)
    out = tmp_path / "out"
    with mx.serve(path.parent, model="f4", coordinator=coordinator):
        assert same(mx.load("f4", coordinator=coordinator), expected)
        mx.pull("f4", coordinator=coordinator, out=out).wait()
        assert (out / path.name).read_bytes() == path.read_bytes()
        here = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
        with mx.pull("f4", coordinator=coordinator, into=here) as pull:
            pull.wait()
        assert same(here, expected)
        wrong = here | {"model.layers.0.w": torch.empty(4, 12, dtype=torch.uint8)}
        with pytest.raises(ConfigError, match=r"U8 \[4, 12\] here, F4 \[4, 12\] in the model"):
            mx.pull("f4", coordinator=coordinator, into=wrong).wait()
    assert same(mx.load("f4", coordinator=coordinator, path=path.parent), expected)


@pytest.mark.parametrize("copy", [True, False])
def test_from_memory(coordinator: str, copy: bool) -> None:
    """The same name stands for the same weights as those of the file; views stay views."""
    lent = tensors()
    lent["model.layers.0.tied"] = lent["model.layers.0.w"][1:3]
    name = f"live-{copy}"
    with mx.serve(lent, model=name, coordinator=coordinator, copy=copy) as source:
        found = mx.load(name, coordinator=coordinator)
        assert same(found, lent)
        if not copy:
            with source.changing():
                lent["model.layers.0.w"].view(torch.uint8).fill_(9)
            assert same(mx.load(name, coordinator=coordinator), lent)


def test_pairs_in_another_order_are_refused() -> None:
    with pytest.raises(ConfigError, match="not in row-major order"):
        mx.serve({"a": pairs(4, 6).t()}, model="turned")


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_tensors_are_real_whatever_the_default_device(
    device: str, coordinator: str, tmp_path: Path
) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    with mx.serve(tmp_path, model=f"on-{device}", coordinator=coordinator), torch.device(device):
        found = mx.load(f"on-{device}", coordinator=coordinator)
        with mx.pull(f"on-{device}", coordinator=coordinator) as pull:
            for layer in pull.layers():
                assert all(t.device.type == "cpu" for t in layer.tensors().values())
    assert {t.device.type for t in found.values()} == {"cpu"}
    assert same(found, load_file(tmp_path / "model.safetensors"))
