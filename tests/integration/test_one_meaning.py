"""`from_pretrained` of a name that is updated, or lost, in the middle: its configuration and its
weights are of one revision, or both from disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import mx
from mx import config
from mx.engines.transformers import lookup, patch, patched, unpatch
from mx.engines.transformers.loads import begin
from tests.support import families
from tests.support.daemon import daemon

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def coordinator() -> Iterator[str]:
    with daemon() as (_, address):
        yield address


@pytest.fixture
def patches(coordinator: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    settings = config.load({"cache_socket": "off"}, environ={"HOME": "/nonexistent"})
    patch(coordinator=coordinator, settings=settings)
    yield
    unpatch()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "small"
    families.save(families.FAMILIES["llama"], folder)
    return folder


def scaled(small: Path, folder: Path, factor: float) -> Path:
    """Return a checkpoint whose weights, and one field of its configuration, are multiplied."""
    shutil.copytree(small, folder)
    fields = json.loads((small / "config.json").read_text()) | {"rms_norm_eps": factor / 8}
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = load_file(small / "model.safetensors")
    multiplied = {name: tensor * factor for name, tensor in tensors.items()}
    save_file(multiplied, str(folder / "model.safetensors"), {"format": "pt"})
    return folder


def factors(model: Any, small: Path) -> tuple[float, float]:
    """Return by what the configuration of a model and its weights are multiplied."""
    name = "model.embed_tokens.weight"
    first = load_file(small / "model.safetensors")[name]
    weight = model.state_dict()[name]
    found = [each for each in (1.0, 2.0, 4.0) if torch.equal(weight, first * each)]
    return model.config.rms_norm_eps * 8, found[0]


def in_cache(folder: Path, cache: Path, name: str) -> None:
    """Put a checkpoint into a cache of the hub's."""
    there = cache / ("models--" + name.replace("/", "--"))
    (there / "refs").mkdir(parents=True)
    (there / "refs" / "main").write_text("a" * 40)
    shutil.copytree(folder, there / "snapshots" / ("a" * 40))


def after(function: Any, then: Callable[[], object]) -> Any:
    """Return a function that does something else once, after it has returned."""
    waiting = [then]

    def made(*given: Any, **named: Any) -> Any:
        found = function(*given, **named)
        if waiting:
            waiting.pop()()
        return found

    return made


def auto(name: str, **more: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(name, **more)


def piped(name: str, **more: Any) -> Any:
    """Return the model of a pipeline of transformers, which reads the configuration by itself."""
    words = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    made: Any = transformers.pipeline
    fast: Any = PreTrainedTokenizerFast
    tokenizer = fast(tokenizer_object=words)
    return made("text-generation", model=name, tokenizer=tokenizer, model_kwargs=more).model


@pytest.mark.parametrize("when", ["after the configuration", "after the look-up of the weights"])
def test_an_update_in_the_middle(
    patches: None,
    coordinator: str,
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
) -> None:
    monkeypatch.setattr(lookup, "FRESH_S", 0.0)
    one, two = scaled(small, tmp_path / "one", 1), scaled(small, tmp_path / "two", 2)
    name = "org/" + when.rpartition(" ")[2]
    # A process that has the first revision goes on serving it.
    with (
        mx.serve(one, model=name, coordinator=coordinator) as source,
        mx.serve(one, model=name, coordinator=coordinator),
    ):
        if when == "after the configuration":
            changed = after(AutoConfig.from_pretrained, lambda: source.update(two))
            monkeypatch.setattr(AutoConfig, "from_pretrained", changed)
        else:
            monkeypatch.setattr(patched, "begin", after(begin, lambda: source.update(two)))
        loads = AutoModelForCausalLM if when == "after the configuration" else LlamaForCausalLM
        assert factors(loads.from_pretrained(name), small) == (1, 1)
        assert factors(loads.from_pretrained(name), small) == (2, 2)


def test_a_call_soon_after_an_update(
    patches: None, coordinator: str, small: Path, tmp_path: Path
) -> None:
    """No source has what the name meant a moment ago."""
    one, two = scaled(small, tmp_path / "one", 1), scaled(small, tmp_path / "two", 2)
    with mx.serve(one, model="org/soon", coordinator=coordinator) as source:
        assert factors(AutoModelForCausalLM.from_pretrained("org/soon"), small) == (1, 1)
        source.update(two, grace_s=0)
        assert factors(AutoModelForCausalLM.from_pretrained("org/soon"), small) == (2, 2)


def test_an_update_in_the_middle_of_a_pipeline(
    patches: None, coordinator: str, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "FRESH_S", 0.0)
    one, two = scaled(small, tmp_path / "one", 1), scaled(small, tmp_path / "two", 2)
    with (
        mx.serve(one, model="org/piped", coordinator=coordinator) as source,
        mx.serve(one, model="org/piped", coordinator=coordinator),
    ):
        changed = after(AutoConfig.from_pretrained, lambda: source.update(two))
        monkeypatch.setattr(AutoConfig, "from_pretrained", changed)
        assert factors(piped("org/piped"), small) == (1, 1)
        assert factors(piped("org/piped"), small) == (2, 2)


def test_a_revision_that_was_resolved_stays(
    patches: None, coordinator: str, small: Path, tmp_path: Path
) -> None:
    """Libraries resolve a revision once, and give what they got to each call after it."""
    hub: Any = transformers.utils.hub
    one, two = scaled(small, tmp_path / "one", 1), scaled(small, tmp_path / "two", 2)
    with (
        mx.serve(one, model="org/fixed", coordinator=coordinator) as source,
        mx.serve(one, model="org/fixed", coordinator=coordinator),
        mx.serve(two, model="org/other", coordinator=coordinator),
    ):
        revision = hub.resolve_revision("org/fixed")
        assert revision == "main"
        source.update(two)
        for name, given, scale in (
            ("org/fixed", revision, 1), ("org/fixed", None, 2), ("org/other", revision, 2)
        ):  # fmt: skip
            found = AutoModelForCausalLM.from_pretrained(name, revision=given)
            assert factors(found, small) == (scale, scale)


@pytest.mark.parametrize("loads", [auto, piped])
@pytest.mark.parametrize("why", ["lost", "left to disk"])
def test_weights_from_disk_have_the_configuration_of_the_disk(
    patches: None,
    coordinator: str,
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    why: str,
    loads: Any,
) -> None:
    """What the hub's cache has under this name is not what is served."""
    served, kept = scaled(small, tmp_path / "served", 2), scaled(small, tmp_path / "kept", 4)
    name, cache = "org/" + why.replace(" ", "-"), tmp_path / "cache"
    in_cache(kept, cache, name)
    more = {"disable_mmap": True} if why == "left to disk" else {}
    with mx.serve(served, model=name, coordinator=coordinator) as source:
        assert factors(loads(name, cache_dir=cache), small) == (2, 2)
        if why == "lost":
            changed = after(AutoConfig.from_pretrained, source.close)
            monkeypatch.setattr(AutoConfig, "from_pretrained", changed)
        assert factors(loads(name, cache_dir=cache, **more), small) == (4, 4)
