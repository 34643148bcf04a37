"""Small models of any type that transformers has, and inputs for them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers

#: What fields of configurations are made, the first pattern that matches. None: left as it is.
_FIELDS: list[tuple[str, int | None]] = [
    (r"(num_)?(.*_)?(key_value_heads|kv_heads|query_groups)", 2),
    (r"(num_|n_)?.*(attention_heads|num_heads|n_heads?|_heads)", 4),
    (r"num_feat_extract_layers", None),
    (r"(num_|n_)?(.*_)?(layers?|depth|blocks)", 2),
    (
        r"(.*_)?(hidden_size|d_model|n_embd|hidden_dim|embed_dim|embedding_size|model_dim|dim|width)",
        64,
    ),
    (r"(.*_)?(intermediate_size|ffn_dim|d_ff|n_inner|ffn_hidden_size|mlp_dim|feedforward_dim)", 96),
    (r"(.*_)?head_dim|d_kv|kv_channels", 16),
    (r"(num_|n_)(local_|routed_)?experts", 4),
    (r"(num_)?experts_per_(tok|token)|.*top_?k(_experts)?", 2),
    (r"n_group|topk_group|n_shared_experts", 1),
    (r"vocab_size(_per_layer_input)?", 128),
    (r"(.*_)?vocab_size", 128),
    (r"image_size|crop_size", 64),
    (r"max_position_embeddings|n_positions|max_(source|target)_positions", 128),
    (r"q_lora_rank|kv_lora_rank", 16),
    (r"qk_rope_head_dim|qk_nope_head_dim", 8),
    (r"v_head_dim", 16),
    (r"first_k_dense_replace", 1),
]
_TOKEN = re.compile(r".*_(token|index)(_id)?")


def shrink(config: Any) -> None:
    """Make a configuration small, and those in it."""
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PreTrainedConfig):
            shrink(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            small = _small(name, value)
            if small != value:
                setattr(config, name, small)
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        kinds = getattr(config, name, None)
        layers = getattr(config, "num_hidden_layers", None)
        if isinstance(kinds, list) and isinstance(layers, int) and len(kinds) > layers:
            # Of each kind one, as far as there is room.
            few = (list(dict.fromkeys(kinds)) + kinds)[:layers]
            setattr(config, name, few)


def _small(name: str, value: int) -> int:
    if _TOKEN.fullmatch(name) and value >= 128:
        return 3
    for pattern, small in _FIELDS:
        if re.fullmatch(pattern, name):
            return value if small is None else min(value, small)
    return value


_MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "MODEL_FOR_OBJECT_DETECTION_MAPPING",
    "MODEL_MAPPING",
)


def class_of(config_class: Any) -> Any:
    """Return the class of model that people use of a type; None if it has none."""
    for name in _MAPPINGS:
        mapping = getattr(transformers, name)
        if config_class in mapping:
            found = mapping[config_class]
            return found[0] if isinstance(found, tuple) else found
    return None


def types() -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, the configuration's and the model's class of every type."""
    for name in sorted(transformers.CONFIG_MAPPING):
        config_class = transformers.CONFIG_MAPPING[name]
        try:
            found = class_of(config_class)
        except Exception:  # noqa: BLE001 - its library is not installed
            found = None
        if found is not None:
            yield name, config_class, found


#: The most parameters of a model that counts as small.
MOST = 60_000_000


def make(config_class: Any, model_class: Any) -> Any:
    """Return a small model.

    Raises:
        Exception: transformers can't make one: anything.
    """
    config = config_class()
    shrink(config)
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(config).parameters())
    if size > MOST:
        raise ValueError(f"{size / 1e6:.0f} million parameters: not small")
    torch.manual_seed(0)
    return model_class(config).eval()


def candidates(model: Any) -> Iterator[dict[str, Any]]:
    """Yield inputs that the model's forward may take."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(4, 100, (1, 12), generator=generator)
    accepted = inspect.signature(model.forward).parameters
    main = model.main_input_name
    config = model.config
    vision = getattr(config, "vision_config", None)
    size = getattr(config, "image_size", None) or getattr(vision, "image_size", None) or 64
    size = size if isinstance(size, int) else size[0]
    channels = getattr(config, "num_channels", None) or 3
    mels = getattr(config, "num_mel_bins", None) or 80
    length = 2 * (getattr(config, "max_source_positions", None) or 64)
    images = torch.rand(1, channels, size, size, generator=generator)
    options: list[dict[str, Any]] = [
        {"input_ids": ids},
        {"input_ids": ids, "decoder_input_ids": ids[:, :4]},
        {"pixel_values": images},
        {"input_ids": ids, "pixel_values": images},
        {"input_features": torch.rand(1, mels, length, generator=generator)},
        {"input_features": torch.rand(1, length, mels, generator=generator)},
        {"input_values": torch.rand(1, 4000, generator=generator)},
        {"input_values": torch.rand(1, 1, 4000, generator=generator)},
        {"input_values": torch.rand(1, 1024, 128, generator=generator)},
        {"pixel_values": torch.rand(1, 8, channels, size, size, generator=generator)},
        {"inputs_embeds": torch.rand(1, 12, 64, generator=generator)},
        {"inputs": torch.randint(4, 100, (1, 64), generator=generator)},
    ]
    # What has the main input first; decoders' own input where there is one.
    for option in sorted(options, key=lambda each: main not in each):
        if "decoder_input_ids" in accepted and "decoder_input_ids" not in option:
            yield {**option, "decoder_input_ids": ids[:, :4]}
        if all(name in accepted or "kwargs" in accepted for name in option):
            yield option


def computed(model: Any, given: dict[str, Any]) -> list[torch.Tensor]:
    """Return all floating-point tensors that a forward returns."""
    torch.manual_seed(5)
    with torch.no_grad():
        found = model(**given)
    leaves = torch.utils._pytree.tree_leaves(dict(found) if isinstance(found, dict) else found)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
