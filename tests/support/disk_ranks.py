"""Ranks that read their slices of one checkpoint, and what they are to have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import mx
from mx import config


def slices_of(rank: int, ranks: int) -> dict[str, Any]:
    return {"*q_proj*": mx.Shard(0, rank, ranks), "*down_proj*": mx.Shard(1, rank, ranks)}


def right_of(folder: Path, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    found = load_file(folder / "model.safetensors")
    for name, tensor in found.items():
        if "q_proj" in name or "down_proj" in name:
            found[name] = tensor.chunk(ranks, int("down_proj" in name))[rank].contiguous()
    return found


def patient(stall_s: str = "60") -> config.Settings:
    return config.load(environ={"HOME": "/nonexistent", "MX_PEER_STALL_TIMEOUT_S": stall_s})
