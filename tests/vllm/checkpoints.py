"""Small models for real engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}


def write_checkpoint(folder: Path, *, seed: int, **changed: Any) -> Path:
    """Write a small Llama with random weights, and return its folder."""
    import torch
    from safetensors.torch import save_file

    config = CONFIG | changed
    wide, inner, vocabulary = (
        config[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    heads = config["num_key_value_heads"] * config["head_dim"]
    shapes = {"model.embed_tokens.weight": (vocabulary, wide), "model.norm.weight": (wide,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocabulary, wide)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        shapes |= {
            layer + "input_layernorm.weight": (wide,),
            layer + "post_attention_layernorm.weight": (wide,),
            layer + "self_attn.q_proj.weight": (wide, wide),
            layer + "self_attn.k_proj.weight": (heads, wide),
            layer + "self_attn.v_proj.weight": (heads, wide),
            layer + "self_attn.o_proj.weight": (wide, wide),
            layer + "mlp.gate_proj.weight": (inner, wide),
            layer + "mlp.up_proj.weight": (inner, wide),
            layer + "mlp.down_proj.weight": (wide, inner),
        }
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: (torch.randn(shape, generator=generator) * 0.1 + (len(shape) == 1)).bfloat16()
        for name, shape in shapes.items()
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def bare(checkpoint: Path) -> Path:
    """Return a folder with a checkpoint's configuration, and no weights."""
    folder = checkpoint.with_name(checkpoint.name + "-bare")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    return folder
