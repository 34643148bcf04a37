"""Makes checkpoints to measure with: the names and shapes of Llama, with random bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

_HEADER_ALIGNMENT = 8


def llama_shapes(
    layers: int, hidden: int, intermediate: int, vocabulary: int
) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a Llama with these dimensions: 9 tensors a layer and 3 more."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for number in range(layers):
        prefix = f"model.layers.{number}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"{prefix}self_attn.{name}.weight"] = (hidden, hidden)
        for name in ("gate_proj", "up_proj"):
            shapes[f"{prefix}mlp.{name}.weight"] = (intermediate, hidden)
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, intermediate)
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (vocabulary, hidden)
    return shapes


def write_checkpoint(path: Path, shapes: Mapping[str, tuple[int, ...]], *, seed: int = 0) -> int:
    """Write bf16 tensors of random bytes as one safetensors file and return the payload's bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        nbytes = 2 * int(np.prod(shape))
        header[name] = {
            "dtype": "BF16",
            "shape": list(shape),
            "data_offsets": [offset, offset + nbytes],
        }
        offset += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    rng = np.random.Generator(np.random.SFC64(seed))
    left = offset
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        while left:
            take = min(left, 64 << 20)
            file.write(rng.bytes(take))
            left -= take
    return offset


def two_gigabyte_checkpoint(folder: Path) -> Path:
    """Return a checkpoint of 2.6 GB in 26 layers, made once and kept in `folder`."""
    path = folder / "llama-2gb.safetensors"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        write_checkpoint(partial, llama_shapes(24, 2048, 5632, 16000))
        partial.rename(path)
    return path
