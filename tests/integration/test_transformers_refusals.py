"""What `load` refuses: wrong and hostile configurations, weights that do not fit, bad arguments."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mx import api, config
from mx.engines import transformers as engine
from mx.errors import ConfigError, ManifestError, UnknownModelError
from tests.support import families
from tests.support.commands import commands, start_coordinator

SETTINGS = config.Settings()


@pytest.fixture(scope="module")
def coordinator() -> Iterator[str]:
    """A coordinator's address."""
    with commands() as run:
        yield start_coordinator(run)[0]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "small"
    families.save(families.FAMILIES["llama-tied"], folder)
    return folder


def load(name: str, coordinator: str, **more: Any) -> Any:
    return engine.load(name, coordinator=coordinator, settings=SETTINGS, **more)


def changed(small: Path, folder: Path, **fields: Any) -> Path:
    """A copy of a checkpoint with another configuration; None removes a field."""
    folder.mkdir()
    found = json.loads((small / "config.json").read_text()) | fields
    found = {name: value for name, value in found.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(found))
    (folder / "model.safetensors").write_bytes((small / "model.safetensors").read_bytes())
    return folder


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"auto_map": {"AutoModel": "evil.Evil"}}, "asks for code of its own.*never runs"),
    ({"model_type": "no-such"}, "knows no model of type 'no-such'"),
    ({"model_type": None}, "knows no model of type"),
    ({"model_type": ["x"]}, "knows no model of type"),
    ({"architectures": ["os.system"]}, "the class 'os.system', which is not one of transformers"),
    ({"architectures": ["AutoModel"]}, "the class 'AutoModel', which is not one"),
    ({"architectures": None}, "names no class.*model_class"),
    ({"quantization_config": {"quant_method": "fp8"}}, "are quantised"),
    ({"hidden_size": 128}, r"embed_tokens.weight is \[96, 128\] in the model, \[96, 64\]"),
    ({"num_hidden_layers": 2}, r"not in the model: .*model\.layers\.2\."),
    ({"num_hidden_layers": 4}, r"missing in the weights: .*model\.layers\.3\."),
    ({"tie_word_embeddings": False}, r"missing in the weights: lm_head\.weight"),
    ({"hidden_size": "large"}, "config.json"),
    ({"num_attention_heads": 0}, "transformers"),
    ({"num_hidden_layers": 10**9}, "asks for 1000000000 layers"),
    ({"hidden_act": "no-such"}, "can't build LlamaForCausalLM"),
]


@pytest.mark.parametrize(("fields", "said"), REFUSALS, ids=[str(f)[:40] for f, _ in REFUSALS])
def test_what_does_not_fit_is_refused_before_a_byte_moves(
    fields: dict[str, Any], said: str, coordinator: str, small: Path, tmp_path: Path
) -> None:
    folder = changed(small, tmp_path / "wrong", **fields)
    with (
        api.serve(folder, coordinator=coordinator, settings=SETTINGS),
        pytest.raises(ConfigError, match=said),
    ):
        load("wrong", coordinator)


def test_a_file_that_is_no_configuration_is_refused(
    coordinator: str, small: Path, tmp_path: Path
) -> None:
    for number, text in enumerate(["[1]", "{", '{"a": ' + "[" * 5000 + "]" * 5000 + "}"]):
        folder = changed(small, tmp_path / f"bad{number}")
        (folder / "config.json").write_text(text)
        with (
            api.serve(folder, coordinator=coordinator, settings=SETTINGS),
            pytest.raises(ManifestError),
        ):
            load(f"bad{number}", coordinator)


def test_trust_in_code_matters_where_a_file_names_some(
    coordinator: str, small: Path, tmp_path: Path
) -> None:
    named = {"auto_map": {"AutoModel": "evil.Evil"}}
    plain, evil = changed(small, tmp_path / "plain"), changed(small, tmp_path / "evil", **named)
    for folder in (plain, evil):
        with api.serve(folder, coordinator=coordinator, settings=SETTINGS):
            if folder == plain:
                assert load("plain", coordinator, trust_remote_code=True).config.hidden_size == 64
            else:
                with pytest.raises(ConfigError, match=r"asks for code of its own.*never runs"):
                    load("evil", coordinator, trust_remote_code=True)


def test_arguments_that_make_no_sense_are_refused(coordinator: str, small: Path) -> None:
    with pytest.raises(ConfigError, match="device_map"):
        load("x", coordinator, device_map="auto")
    with pytest.raises(UnknownModelError):
        load("no-source-serves-this", coordinator, wait_s=0.0)
    with pytest.raises(ConfigError, match="only one of"):
        load("x", coordinator, path=small, fallback=small)
    with pytest.raises(ConfigError, match="model_class"):
        engine.load("x", path=small, model_class=torch.nn.Linear)
    with pytest.raises(ConfigError, match="model_config"):
        engine.load("x", path=small, model_config={"hidden_size": 1})


def test_not_strict_does_as_from_pretrained_does(
    coordinator: str, small: Path, tmp_path: Path
) -> None:
    folder = changed(small, tmp_path / "more", num_hidden_layers=4)
    with api.serve(folder, coordinator=coordinator, settings=SETTINGS):
        model = load("more", coordinator, strict=False)
        engine.loading(model).wait()
    ours, theirs = families.tensors(model), families.tensors(families.reference(small))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert not ours["model.layers.3.mlp.up_proj.weight"].is_meta
