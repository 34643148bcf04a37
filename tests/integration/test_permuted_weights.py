"""Weights in another order than row-major, from a module to a state dict and to a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from mx import api


class Engine(nn.Module):
    """Weights as engines keep them: a transposed FP8 weight, channels last, a tie, a slice."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(1536, 4096).to(torch.float8_e4m3fn)  # longer than a piece of a file
        self.fp8 = nn.Parameter(weight.t(), requires_grad=False)
        self.conv = nn.Conv2d(3, 8, 3)
        last = self.conv.weight.detach().contiguous(memory_format=torch.channels_last)
        self.conv.weight = nn.Parameter(last)
        self.tied = self.conv.weight
        self.register_buffer("rows", self.fp8.detach()[:, 3:7])


def check_bits(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        same = tensor.contiguous().view(torch.uint8)
        assert torch.equal(found[name].contiguous().view(torch.uint8), same), name


@pytest.mark.parametrize("options", [{}, {"attach": False}, {"transport": "tcp"}])
def test_a_module_arrives_with_its_strides(coordinator: str, options: dict[str, Any]) -> None:
    expected = Engine().state_dict()
    with api.serve(expected, model="m", coordinator=coordinator):
        found = api.load("m", coordinator=coordinator, verify="strong", **options)
    check_bits(found, expected)
    for name, tensor in expected.items():
        assert found[name].stride() == tensor.stride(), name
    assert found["tied"].data_ptr() == found["conv.weight"].data_ptr()


def test_a_module_is_written_row_major(coordinator: str, tmp_path: Path) -> None:
    expected = Engine().state_dict()
    with (
        api.serve(expected, model="m", coordinator=coordinator) as source,
        api.pull("m", coordinator=coordinator, out=tmp_path / "out") as pull,
    ):
        pull.wait()
        live = source.manifest.ref.identity
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(tensor.is_contiguous() for tensor in found.values())
    check_bits(found, {name: expected[name] for name in ("fp8", "conv.weight", "conv.bias")})
    # The same values in another order are another identity.
    with api.serve(tmp_path / "out", model="written", coordinator=coordinator) as source:
        assert source.manifest.ref.identity != live
        check_bits(
            api.load("written", coordinator=coordinator),
            {name: expected[name] for name in ("fp8", "conv.weight", "conv.bias", "tied")},
        )
