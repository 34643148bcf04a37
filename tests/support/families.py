"""Small models of the families that people use, with weights that all matter, and their inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

#: A small text model's configuration.
_TEXT = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OLD = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 96, "n_positions": 128}
_IMAGE = {"image_size": 32, "patch_size": 8, "num_labels": 5}
_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1}

Make = Callable[[], Any]


def _of(name: str, **fields: Any) -> Make:
    """Return what makes a model of this class; its configuration has these fields."""

    def make() -> Any:
        model_class = getattr(transformers, name)
        return model_class(model_class.config_class(**fields))

    return make


#: Functions that make the models, by family.
FAMILIES: dict[str, Make] = {
    "llama": _of("LlamaForCausalLM", **_TEXT),
    "llama-tied": _of("LlamaForCausalLM", **_TEXT, tie_word_embeddings=True),
    "qwen2": _of("Qwen2ForCausalLM", **_TEXT, tie_word_embeddings=True),
    "qwen3": _of("Qwen3ForCausalLM", **_TEXT, head_dim=16),
    "qwen3-moe": _of(
        "Qwen3MoeForCausalLM", **_TEXT, head_dim=16, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=48, decoder_sparse_step=1,
    ),
    "mistral": _of("MistralForCausalLM", **_TEXT, sliding_window=8),
    "mixtral": _of("MixtralForCausalLM", **_TEXT, num_local_experts=4, num_experts_per_tok=2),
    "deepseek-v3": _of(
        "DeepseekV3ForCausalLM", **_TEXT | {"num_key_value_heads": 4}, q_lora_rank=32,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, n_routed_experts=4,
        num_experts_per_tok=2, n_group=2, topk_group=1, moe_intermediate_size=48,
        first_k_dense_replace=1, n_shared_experts=1,
    ),
    "gemma": _of("GemmaForCausalLM", **_TEXT, head_dim=16),
    "gemma2": _of("Gemma2ForCausalLM", **_TEXT, head_dim=16, sliding_window=8),
    "gemma3": _of("Gemma3ForCausalLM", **_TEXT, head_dim=16, sliding_window=8),
    "phi": _of("PhiForCausalLM", **_TEXT),
    "phi3": _of("Phi3ForCausalLM", **_TEXT),
    "gpt2": _of("GPT2LMHeadModel", **_OLD, bos_token_id=1, eos_token_id=2),
    "opt": _of(
        "OPTForCausalLM", vocab_size=96, hidden_size=64, ffn_dim=96, num_hidden_layers=3,
        num_attention_heads=4, max_position_embeddings=128, word_embed_proj_dim=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    ),
    "t5": _of(
        "T5ForConditionalGeneration", vocab_size=96, d_model=64, d_kv=16, d_ff=96, num_layers=2,
        num_heads=4, **_IDS,
    ),
    "bert": _of("BertForMaskedLM", **_TEXT),
    "vit": _of("ViTForImageClassification", **_TEXT | _IMAGE),
    "whisper": _of(
        "WhisperForConditionalGeneration", vocab_size=96, d_model=64, encoder_layers=2,
        decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96,
        decoder_ffn_dim=96, num_mel_bins=16, max_source_positions=20, max_target_positions=40,
        suppress_tokens=None, begin_suppress_tokens=None, **_IDS,
    ),
    "mamba": _of(
        "MambaForCausalLM", vocab_size=96, hidden_size=64, num_hidden_layers=3, state_size=8,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    ),
    "mamba2": _of(
        "Mamba2ForCausalLM", vocab_size=96, hidden_size=64, num_hidden_layers=2, state_size=8,
        head_dim=16, num_heads=8, n_groups=2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    ),
}  # fmt: skip


def scramble(model: Any, seed: int = 1) -> None:
    """Give every parameter and every persistent buffer values of its own.

    Models initialise norms to ones and biases to zeros: with those, a weight that was mixed up
    with another may not be noticed.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator) * 0.05
                keeps = 1.0 if "norm" in name or tensor.dim() < 2 else 0.3
                tensor.copy_((tensor * keeps + noise).to(tensor.dtype))


def save(make: Make, folder: Path) -> None:
    """Write a model of a family as a checkpoint."""
    torch.manual_seed(0)
    model = make().eval()
    scramble(model)
    model.save_pretrained(folder)


def inputs(model: Any) -> dict[str, torch.Tensor]:
    """Return inputs of a model's forward."""
    config = model.config
    name = model.main_input_name
    generator = torch.Generator().manual_seed(3)
    if name == "pixel_values":
        size = config.image_size
        found = {name: torch.rand(1, 3, size, size, generator=generator)}
    elif name == "input_features":
        length = 2 * config.max_source_positions
        found = {name: torch.rand(1, config.num_mel_bins, length, generator=generator)}
    else:
        found = {name: torch.randint(3, config.vocab_size, (2, 9), generator=generator)}
    if found[name].is_floating_point():
        found[name] = found[name].to(model.dtype)
    if config.is_encoder_decoder:
        found["decoder_input_ids"] = torch.tensor([[1, 5, 7]] * len(found[name]))
    return found


def outputs(model: Any) -> torch.Tensor:
    """Return the logits of a forward."""
    with torch.no_grad():
        logits: torch.Tensor = model(**inputs(model)).logits
    return logits


def generated(model: Any) -> torch.Tensor:
    """Return what a model generates, greedily."""
    given = inputs(model)[model.main_input_name]
    found: torch.Tensor = model.generate(given, max_new_tokens=6, do_sample=False)
    return found


def reference(folder: Path, **options: Any) -> Any:
    """Return a model that transformers loads from disk, whose parameters are in memory of their
    own: where a tensor lies decides, in the last bit, what is computed with it."""
    architecture = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    model = getattr(transformers, architecture).from_pretrained(folder, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    return model


def tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return every parameter and every buffer, also those that a state dict leaves out."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def differences(model: Any, other: Any) -> list[str]:
    """Return what differs between two models' tensors: names, kinds, values, bit for bit; ties."""
    ours, theirs = tensors(model), tensors(other)
    found = sorted(ours.keys() ^ theirs.keys())
    for name in ours.keys() & theirs.keys():
        one, two = ours[name], theirs[name]
        same = type(one) is type(two) and one.dtype == two.dtype and one.shape == two.shape
        same = same and one.requires_grad == two.requires_grad and not one.is_meta
        if not same or not torch.equal(one.nan_to_num(), two.nan_to_num()):
            found.append(name)
    return found + sorted(_ties(model) ^ _ties(other))


def _ties(model: Any) -> set[str]:
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return {" = ".join(sorted(names)) for names in groups.values() if len(names) > 1}
