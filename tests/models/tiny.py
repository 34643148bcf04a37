"""Small models of any type that transformers has, and inputs for them."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers

#: What fields of configurations are made, the first pattern that matches. None: left as it is.
_FIELDS: list[tuple[str, int | None]] = [
    (r"num_kv_shared_layers", 0),
    (r"rotary_dim", 8),
    (r"(attn|expert)_layer_(period|offset)", None),
    (r"upsample_groups", 1),
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


#: Fields that are kept where the first way makes a model that does not fit together.
_OF_HEADS = re.compile(r".*(head|lora|kv_|qk_|groups?$|top_?k|d_kv|experts_per|out_)[a-z_]*|d_kv")
_OF_WIDTHS = re.compile(r".*(hidden|embed|dim|width|d_model|intermediate|ffn|size)[a-z_]*")


def configurations(config_class: Any) -> Iterator[Any]:
    """Yield small configurations of a type, each made in another way: one may not fit together."""
    for kept in (None, _OF_HEADS, _OF_WIDTHS):
        for made in (_changed, _constructed):
            with contextlib.suppress(Exception):  # transformers validates some of them
                yield made(config_class, kept)


def _changed(config_class: Any, kept: re.Pattern[str] | None) -> Any:
    """Return a small configuration: the default one, changed."""
    config = config_class()
    _shrink(config, kept)
    return config


def _constructed(config_class: Any, kept: re.Pattern[str] | None) -> Any:
    """Return a small configuration, made of small values: what follows from them is consistent."""
    return config_class(**_fields(config_class(), kept))


def _fields(config: Any, kept: re.Pattern[str] | None) -> dict[str, Any]:
    """Return what a configuration's class takes to make it small."""
    found: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, transformers.PreTrainedConfig):
            found[name] = {"model_type": value.model_type, **_fields(value, kept)}
        elif _is_number(value) and not (kept and kept.fullmatch(name)):
            small = _small(name, value)
            if small != value:
                found[name] = small
        elif value is None and name in _UNSET:
            found[name] = _UNSET[name]
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shrink(config: Any, kept: re.Pattern[str] | None) -> None:
    """Make a configuration small, and those in it."""
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PreTrainedConfig):
            if value.model_type == "timm_backbone":  # wants another library
                setattr(config, name, _backbone())
            else:
                _shrink(value, kept)
        elif _is_number(value) and not (kept and kept.fullmatch(name)):
            small = _small(name, value)
            if small != value:
                setattr(config, name, small)
    _fit(config)


def _backbone() -> Any:
    config_class: Any = transformers.ResNetConfig
    return config_class(
        embedding_size=16,
        hidden_sizes=[16, 24, 32, 48],
        depths=[1, 1, 1, 1],
        out_features=["stage2", "stage3", "stage4"],
    )


#: What a configuration says nothing of, though a model wants it.
_UNSET = {
    "prediction_length": 8,
    "vocab_size": 128,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "image_token_id": 3,
    "image_token_index": 3,
}


def _fit(config: Any) -> None:
    """Make a configuration's fields fit each other again."""
    for name, value in _UNSET.items():
        if getattr(config, name, value) is None:
            setattr(config, name, value)
    _fit_layers(config)
    _fit_heads(config)


def _fit_layers(config: Any) -> None:
    """Make what a configuration says of each layer fit the number of its layers."""
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        kinds = getattr(config, name, None)
        layers = getattr(config, "num_hidden_layers", None)
        if isinstance(kinds, list) and isinstance(layers, int) and len(kinds) > layers:
            # Of each kind one, as far as there is room.
            few = (list(dict.fromkeys(kinds)) + kinds)[:layers]
            setattr(config, name, few)
    has = vars(config)
    if has.get("layer_types", 0) is None and _is_number(has.get("num_hidden_layers")):
        config.layer_types = ["full_attention"] * config.num_hidden_layers
    if has.get("attn_layer_period"):
        config.attn_layer_period, config.attn_layer_offset = 2, 1
    if "attn_layer_indices" in has:
        config.attn_layer_indices = [1]
    if isinstance(has.get("per_layer_config"), dict) and has["per_layer_config"]:
        config.per_layer_config = {1: next(iter(has["per_layer_config"].values()))}


def _fit_heads(config: Any) -> None:
    """Make the widths and numbers of heads fit each other."""
    has = vars(config)
    heads, width = has.get("num_attention_heads"), has.get("hidden_size")
    if has.get("qk_rope_head_dim") and _is_number(has.get("head_dim")):
        config.head_dim = config.qk_rope_head_dim
    if has.get("kv_lora_rank") and _is_number(has.get("num_attention_heads")):
        config.num_key_value_heads = config.num_attention_heads
    if _is_number(heads) and has.get("num_key_value_heads", 0) is None:
        config.num_key_value_heads = heads
    if _is_number(heads) and _is_number(width) and has.get("head_dim", 0) is None:
        config.head_dim = width // heads
    if isinstance(has.get("num_heads"), list | tuple) and _is_number(has.get("embed_dim")):
        config.embed_dim = 16 * has["num_heads"][0]
        if _is_number(width) and has.get("depths"):
            config.hidden_size = config.embed_dim * 2 ** (len(has["depths"]) - 1)
    rope = has.get("rope_parameters")
    thrice = isinstance(rope, dict) and _is_number(heads) and _is_number(width)
    if thrice and ("mrope_section" in rope or re.search("vl|omni", config.model_type)):
        half = (has.get("head_dim") or width // heads) // 2
        rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    if {"expand", "num_heads", "head_dim", "state_size"} <= has.keys():
        config.num_heads = config.expand * config.hidden_size // config.head_dim
        config.n_groups = 1
    if hasattr(has.get("attn_config"), "clip_qkv"):  # is not set by itself
        config.attn_config.rope_theta, config.attn_config.clip_qkv = 10_000.0, 8.0
    if has.get("mamba_d_ssm") and has.get("mamba_n_heads"):
        config.mamba_d_head = config.mamba_d_ssm // config.mamba_n_heads
    elif {"mamba_n_heads", "mamba_d_head", "mamba_expand", "hidden_size"} <= has.keys():
        config.mamba_d_head = config.mamba_expand * config.hidden_size // config.mamba_n_heads


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
    candidates: list[Any] = []
    for name in dict.fromkeys([*_MAPPINGS[:-1], *_other_mappings(), _MAPPINGS[-1]]):
        mapping = getattr(transformers, name)
        if config_class in mapping:
            found = mapping[config_class]
            candidates += found if isinstance(found, tuple) else [found]
    # Some name the class of a part of theirs.
    own = [each for each in candidates if each.config_class is config_class]
    return next(iter([*own, *candidates]), None)


@functools.cache  # `dir` takes half a second
def _other_mappings() -> list[str]:
    return sorted(name for name in dir(transformers) if re.fullmatch("MODEL_FOR_.*_MAPPING", name))


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
MOST = 120_000_000


def models(config_class: Any, model_class: Any) -> Iterator[Any]:
    """Yield small models, each made in another way: inputs may not fit one.

    Raises:
        Exception: transformers can't make any: the first reason, which may be anything.
    """
    first: Exception | None = None
    made = 0
    for config in configurations(config_class):
        try:
            yield _make(config, model_class)
            made += 1
        except Exception as error:  # noqa: BLE001 - transformers raises anything
            first = first or error
    if not made:
        raise first or ValueError("no configuration of it can be made small")


def _make(config: Any, model_class: Any) -> Any:
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(copy.deepcopy(config)).parameters())
    if size > MOST:
        raise ValueError(f"{size / 1e6:.0f} million parameters: not small")
    torch.manual_seed(0)
    return model_class(config).eval()
