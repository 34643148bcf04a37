"""The layers of models, guessed from the names of their tensors."""

from __future__ import annotations

import importlib
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mx.core.naming import PART_NBYTES, layers_in_execution_order
from tests.support.checkpoints import tiny


def layers_of(names: list[str]) -> dict[str, list[str]]:
    return dict(layers_in_execution_order(names, dict.fromkeys(names, 4)))


def layers_of_model(model: nn.Module) -> dict[str, list[str]]:
    return layers_of(list(model.state_dict()))


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "gemma", "mixtral", "deepseek"])
def test_decoders_run_from_the_embedding_through_the_layers_to_the_head(kind: str) -> None:
    layers = layers_of_model(tiny(kind))
    assert list(layers) == ["embed", "model.layers.0", "model.layers.1", "head"]
    assert layers["embed"] == ["model.embed_tokens.weight"]
    assert layers["head"] == ["lm_head.weight", "model.norm.weight"]


def test_bare_weights_below_numbers_are_layers_where_nothing_else_is() -> None:
    blocks = [f"model.layers.{i}" for i in range(12)]
    names = ["lm_head.weight", "model.embed.weight", *(f"{block}.w" for block in blocks)]
    assert list(layers_of(names)) == ["embed", *blocks, "head"]
    projector = ["projector.0.weight", "projector.2.weight"]
    towers = [f"model.layers.{i}.mlp.weight" for i in range(2)]
    assert "projector.0" not in layers_of([*projector, *towers])


def test_gpt2_counts_past_nine() -> None:
    layers = layers_of_model(tiny("gpt2"))
    blocks = [f"transformer.h.{i}" for i in range(11)]
    assert list(layers) == ["embed", *blocks, "head"]
    assert layers["embed"] == ["transformer.wpe.weight", "transformer.wte.weight"]
    assert set(layers["head"]) >= {"transformer.ln_f.weight", "transformer.ln_f.bias"}


def test_bert() -> None:
    layers = layers_of_model(tiny("bert"))
    assert list(layers) == ["embed", "encoder.layer.0", "encoder.layer.1", "head"]
    assert all(name.startswith("embeddings.") for name in layers["embed"])
    assert layers["head"] == ["pooler.dense.bias", "pooler.dense.weight"]


def test_t5_encodes_before_it_decodes() -> None:
    layers = layers_of_model(tiny("t5"))
    assert list(layers) == [
        "embed", "encoder.block.0", "encoder.block.1", "encoder.head",
        "decoder.embed", "decoder.block.0", "decoder.block.1", "head",
    ]  # fmt: skip
    assert "shared.weight" in layers["embed"]
    assert layers["encoder.head"] == ["encoder.final_layer_norm.weight"]
    assert layers["head"] == ["decoder.final_layer_norm.weight", "lm_head.weight"]


def test_vit() -> None:
    layers = layers_of_model(tiny("vit"))
    names = list(layers)
    assert (names[0], names[-1], len(names)) == ("embed", "head", 4)
    assert all(name.startswith("vit.embeddings.") for name in layers["embed"])
    assert set(layers["head"]) >= {"classifier.weight", "vit.layernorm.weight"}


def test_older_vit_names() -> None:
    names = ["vit.embeddings.cls_token", "vit.layernorm.bias", "classifier.bias"]
    names += [f"vit.encoder.layer.{i}.output.dense.weight" for i in (1, 0, 10, 2)]
    assert list(layers_of(names)) == [
        "embed", *(f"vit.encoder.layer.{i}" for i in (0, 1, 2, 10)), "head",
    ]  # fmt: skip


def test_diffusers_unet_goes_down_through_the_middle_and_up() -> None:
    diffusers: Any = importlib.import_module("diffusers")
    model = diffusers.UNet2DConditionModel(
        block_out_channels=(4, 8),
        norm_num_groups=2,
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=2,
    )
    layers = layers_of_model(model)
    assert list(layers) == [
        "embed", "down_blocks.0", "down_blocks.1", "mid_block", "up_blocks.0", "up_blocks.1",
        "head",
    ]  # fmt: skip
    assert {name.split(".")[0] for name in layers["embed"]} == {"conv_in", "time_embedding"}
    assert {name.split(".")[0] for name in layers["head"]} == {"conv_norm_out", "conv_out"}


def test_diffusers_dit() -> None:
    diffusers: Any = importlib.import_module("diffusers")
    model = diffusers.DiTTransformer2DModel(
        num_layers=2, num_attention_heads=2, attention_head_dim=4, sample_size=8,
        norm_num_groups=2, num_embeds_ada_norm=8,
    )  # fmt: skip
    layers = layers_of_model(model)
    assert list(layers) == ["embed", "transformer_blocks.0", "transformer_blocks.1", "head"]
    assert {name.split(".")[0] for name in layers["embed"]} == {"pos_embed"}
    assert {name.split(".")[0] for name in layers["head"]} == {"proj_out_1", "proj_out_2"}


def test_vision_towers_run_before_language_models() -> None:
    names = [
        "model.vision_tower.embeddings.patch_embedding.weight",
        *(f"model.vision_tower.encoder.layers.{i}.mlp.fc1.weight" for i in range(2)),
        "model.vision_tower.post_layernorm.weight",
        "model.multi_modal_projector.linear_1.weight",
        "model.language_model.embed_tokens.weight",
        *(f"model.language_model.layers.{i}.mlp.up_proj.weight" for i in range(2)),
        "model.language_model.norm.weight",
        "lm_head.weight",
    ]
    layers = layers_of(random.Random(1).sample(names, len(names)))
    assert [name for members in layers.values() for name in members] == [
        *names[:3], names[4], names[3], *names[5:8], names[9], names[8],
    ]  # fmt: skip
    assert len(layers) == 8


def test_models_that_fit_no_pattern_are_cut_by_size() -> None:
    sizes = {f"blob{i}": PART_NBYTES // 3 for i in range(7)} | {"huge": 3 * PART_NBYTES}
    layers = layers_in_execution_order(sizes, sizes)
    assert [name for name, _ in layers] == ["part.0", "part.1", "part.2", "part.3"]
    assert [members for _, members in layers] == [
        ["blob0", "blob1", "blob2"], ["blob3", "blob4", "blob5"], ["blob6"], ["huge"],
    ]  # fmt: skip


def test_too_many_numbers_are_not_layers() -> None:
    names = [f"table.{i}.row.value" for i in range(5000)]
    assert list(layers_of(names)) == ["part.0"]


def test_fifty_thousand_experts() -> None:
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
        for layer in range(64)
        for expert in range(260)
        for part in ("down", "gate", "up")
    ]
    layers = layers_of(random.Random(2).sample(names, len(names)))
    assert list(layers) == [f"model.layers.{i}" for i in range(64)]
    assert [name for members in layers.values() for name in members] == names


PARTS = st.sampled_from(
    ["0", "1", "2", "10", "00", "9" * 5000, "layers", "encoder", "mid_block", "embed", "norm", "a"]
)
NAMES = st.lists(PARTS, min_size=1, max_size=6).map(".".join) | st.text(min_size=1, max_size=8)


@given(st.lists(NAMES, unique=True, max_size=40), st.randoms(use_true_random=False))
def test_every_tensor_is_in_one_layer_for_any_order_of_names(
    names: list[str], rng: random.Random
) -> None:
    sizes = {name: rng.choice([0, 1, PART_NBYTES]) for name in names}
    layers = layers_in_execution_order(names, sizes)
    assert sorted(name for _, members in layers for name in members) == sorted(names)
    assert all(members for _, members in layers)
    assert len({name for name, _ in layers}) == len(layers)
    assert layers_in_execution_order(rng.sample(names, len(names)), sizes) == layers
