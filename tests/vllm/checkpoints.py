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


def write_fp8(folder: Path, *, seed: int) -> Path:
    """Write `write_checkpoint`'s model with linear weights in 8 bits, and return its folder."""
    import torch
    from safetensors.torch import load_file, save_file

    write_checkpoint(
        folder,
        seed=seed,
        quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"},
    )
    made: dict[str, Any] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        made[name] = tensor
        if name.endswith("_proj.weight"):
            scale = tensor.abs().max().float() / torch.finfo(torch.float8_e4m3fn).max
            made[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
            made[f"{name}_scale"] = scale
    save_file(made, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def bare(checkpoint: Path) -> Path:
    """Return a folder with a checkpoint's configuration and tokenizer, and no weights."""
    folder = checkpoint.with_name(checkpoint.name + "-bare")
    folder.mkdir(exist_ok=True)
    for file in checkpoint.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


#: The tokens of audio in prompts of `write_audio`'s model.
AUDIO, AUDIO_BEGIN, AUDIO_END = "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"


def tokenizer() -> Any:
    """Return a tokenizer of 250 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>", AUDIO, AUDIO_BEGIN, AUDIO_END]
    words = [*special, *(f"w{number}" for number in range(len(special), 250))]
    found = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "<unk>"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    fast: Any = PreTrainedTokenizerFast
    return fast(
        tokenizer_object=found,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=[AUDIO, AUDIO_BEGIN, AUDIO_END],
    )


def write_mixture(folder: Path, *, seed: int) -> Path:
    """Write a small Mixtral of four experts with random weights, and return its folder."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(seed)
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
    )
    model: torch.nn.Module = MixtralForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)  # type: ignore[operator]
    return folder


def write_audio(folder: Path, *, seed: int) -> Path:
    """Write a small Qwen2-Audio with random weights, and return its folder.

    Other multimodal models import torchvision, which no index has for torch's build for CPUs.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import (
        Qwen2AudioConfig,
        Qwen2AudioEncoderConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        Qwen2Config,
        WhisperFeatureExtractor,
    )

    torch.manual_seed(seed)
    config = Qwen2AudioConfig(
        audio_config=Qwen2AudioEncoderConfig(
            num_mel_bins=16,
            encoder_layers=2,
            encoder_attention_heads=4,
            encoder_ffn_dim=128,
            d_model=64,
        ),
        text_config=Qwen2Config(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
        ),
        audio_token_index=4,
    )
    model: torch.nn.Module = Qwen2AudioForConditionalGeneration(config)
    model.to(torch.bfloat16).save_pretrained(folder)  # type: ignore[operator]
    features: Any = WhisperFeatureExtractor
    processor: Any = Qwen2AudioProcessor
    processor(features(feature_size=16), tokenizer()).save_pretrained(folder)
    # transformers 5 writes names of its own, which vLLM 0.32 does not know.
    file = folder / "model.safetensors"
    tensors = {name.replace("model.model.", "model."): t for name, t in load_file(file).items()}
    save_file(tensors, str(file), metadata={"format": "pt"})
    return folder


def write_adapter(folder: Path, *, seed: int) -> Path:
    """Write an adapter (LoRA) of `write_checkpoint`'s model, and return its folder."""
    import torch
    from safetensors.torch import save_file

    rank, wide = 4, int(CONFIG["hidden_size"])
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for index in range(CONFIG["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{index}.self_attn.q_proj.lora_"
        for half, shape in (("A", (rank, wide)), ("B", (wide, rank))):
            tensors[f"{name}{half}.weight"] = torch.randn(shape, generator=generator) * 0.3
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "small",
        "r": rank,
        "lora_alpha": 16,
        "target_modules": ["q_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
    return folder
