"""Checkpoints for tests: real architectures from tiny configurations, and crafted files."""

from __future__ import annotations

import importlib
import mmap
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from mx.core.grid import BLOCK_BYTES
from mx.core.layout import TensorSpec
from mx.core.manifest import encode, plan_layout
from mx.core.types import Layout, Manifest
from mx.storage.landing import ArenaDigests
from mx.storage.reader import SPAN_BYTES, fill
from mx.storage.safetensors import Checkpoint, open_checkpoint
from mx.storage.writer import CheckpointWriter
from tests.support.crafted import crafted

#: Bytes of which no two parts are alike.
PATTERN = np.random.default_rng(0).integers(0, 256, 12 << 20, dtype=np.uint8).tobytes()


def tiny(kind: str) -> Any:
    """Return a randomly initialised model of the named architecture, small enough for any test."""
    # Its configurations are typed field by field; these are put together from parts.
    t: Any = importlib.import_module("transformers")
    t.utils.logging.disable_progress_bar()  # it would leave a thread behind
    wide = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    text = wide | {"vocab_size": 96, "intermediate_size": 48, "max_position_embeddings": 64}
    # bos, eos and pad must be inside the tiny vocabulary.
    text |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    model = _build(t, kind, wide, text)
    assert isinstance(model, nn.Module)
    return model


def _build(t: Any, kind: str, wide: dict[str, int], text: dict[str, int]) -> Any:
    match kind:
        case "llama":
            return t.LlamaForCausalLM(t.LlamaConfig(**text, tie_word_embeddings=False))
        case "mistral":
            return t.MistralForCausalLM(t.MistralConfig(**text, num_key_value_heads=1))
        case "qwen2":
            return t.Qwen2ForCausalLM(t.Qwen2Config(**text, num_key_value_heads=1))
        case "gemma":
            return t.GemmaForCausalLM(t.GemmaConfig(**text, num_key_value_heads=1, head_dim=16))
        case "mixtral":
            moe = {"num_key_value_heads": 1, "num_local_experts": 3}
            return t.MixtralForCausalLM(t.MixtralConfig(**text, **moe))
        case "deepseek":
            moe = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
            moe |= {"first_k_dense_replace": 1, "moe_intermediate_size": 16, "q_lora_rank": 16}
            moe |= {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
            return t.DeepseekV3ForCausalLM(t.DeepseekV3Config(**text, **moe, v_head_dim=16))
        case "gpt2":
            small = {"n_layer": 11, "n_embd": 16, "n_head": 2, "vocab_size": 96, "n_positions": 16}
            ends = {"bos_token_id": 1, "eos_token_id": 2}
            return t.GPT2LMHeadModel(t.GPT2Config(**small, **ends))
        case "bert":
            return t.BertModel(t.BertConfig(**text))
        case "t5":
            small = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "num_layers": 2}
            return t.T5ForConditionalGeneration(t.T5Config(**small, vocab_size=96))
        case "vit":
            return t.ViTForImageClassification(
                t.ViTConfig(**wide, intermediate_size=48, image_size=16, patch_size=8)
            )
    raise KeyError(kind)


def write_mixed(folder: Path, *, pad: int = 0) -> dict[str, bytes]:
    """Two files with tensors of many sizes, larger than a span some, in no helpful order."""
    sizes = [0, 1, 5, 255, 256, 4096, 100_000, BLOCK_BYTES, SPAN_BYTES + 4099, 2 * SPAN_BYTES, 3]
    random.Random(1).shuffle(sizes)
    tensors = {}
    for i, size in enumerate(sizes):
        tensors[f"model.layers.{i % 3}.mlp.w{i}"] = PATTERN[i * 7 : i * 7 + size]
    rows = [(name, "U8", [len(data)], data) for name, data in tensors.items()]
    (folder / "one.safetensors").write_bytes(crafted(rows[:5], pad=pad))
    (folder / "two.safetensors").write_bytes(crafted(rows[5:], {"format": "pt"}, pad=pad + 3))
    return tensors


def make_arena(layout: Layout) -> memoryview:
    """Return page-aligned memory for a layout, filled with a pattern so that missing bytes show."""
    nbytes = layout.arena_nbytes
    view = memoryview(mmap.mmap(-1, max(nbytes, 1)))
    view[:nbytes] = b"\xa5" * nbytes
    return view[:nbytes]


def loaded(path: Path, *, threads: int = 2) -> tuple[Checkpoint, Layout, memoryview, ArenaDigests]:
    checkpoint = open_checkpoint(path)
    layout = plan_layout(checkpoint.specs, checkpoint.aliases)
    arena = make_arena(layout)
    filled = fill(checkpoint, layout, arena, threads=threads)
    return checkpoint, layout, arena, filled


def manifest_of(path: Path) -> tuple[Manifest, memoryview]:
    """Return a checkpoint's manifest, made as a source makes it, and its arena."""
    checkpoint, layout, arena, filled = loaded(path)
    manifest = encode(
        layout,
        checkpoint.packaging,
        filled.roots,
        checkpoint.side_documents,
    )
    return manifest, arena


def specs_of(model: nn.Module) -> list[TensorSpec]:
    """Return what a module's state dict holds, each tensor as float32."""
    return [TensorSpec(name, "F32", tuple(t.shape)) for name, t in model.state_dict().items()]


def content(arena: memoryview, layout: Layout) -> dict[str, bytes]:
    """Return each tensor's bytes."""
    found = {}
    for tensor in layout.tensors:
        start = layout.layers[tensor.layer].arena_offset + tensor.offset
        found[tensor.name] = bytes(arena[start : start + tensor.nbytes])
    return found


def write_side_file(writer: CheckpointWriter, path: str, data: bytes) -> None:
    """Write a side file as a pull does, but in one piece."""
    writer.write_side_page(path, 0, data)
    writer.finish_side_file(path)
