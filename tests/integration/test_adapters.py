"""Adapters of PEFT are models: they load from peers by their names as they do from folders."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

import mx
from mx.engines import transformers as engine
from tests.support import families
from tests.support.daemon import daemon

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # PEFT asks
]

_NAMES = ("org/base", "org/adapter")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of a model, and of an adapter of it."""
    place = tmp_path_factory.mktemp("adapters")
    families.save(families.FAMILIES["llama"], place / "base")
    model = transformers.LlamaForCausalLM.from_pretrained(place / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers in an older way
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    families.scramble(adapted, seed=7)
    adapted.save_pretrained(place / "adapter")
    config = place / "adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace(str(place / "base"), _NAMES[0]))
    return place / "base", place / "adapter"


@pytest.fixture(scope="module")
def served(folders: tuple[Path, Path]) -> Iterator[str]:
    """The address of a coordinator that lists both; transformers is patched to ask it."""
    with daemon() as (_, address):
        sources = [
            mx.serve(folder, model=name, coordinator=address)
            for folder, name in zip(folders, _NAMES, strict=True)
        ]
        engine.patch(coordinator=address)
        try:
            yield address
        finally:
            engine.unpatch()
            for source in sources:
                source.close()


def same(model: Any, other: Any) -> bool:
    ours, theirs = model.state_dict(), other.state_dict()
    return (
        any("lora" in name for name in ours)
        and ours.keys() == theirs.keys()
        and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    )


def test_peft_model(served: str, folders: tuple[Path, Path]) -> None:
    base = transformers.LlamaForCausalLM.from_pretrained(folders[0])
    expected = peft.PeftModel.from_pretrained(base, folders[1])
    model = transformers.AutoModelForCausalLM.from_pretrained(_NAMES[0])
    assert same(peft.PeftModel.from_pretrained(model, _NAMES[1]), expected)
    assert peft.PeftConfig.from_pretrained(_NAMES[1]).r == 4


def test_load_adapter(served: str, folders: tuple[Path, Path]) -> None:
    expected = transformers.LlamaForCausalLM.from_pretrained(folders[0])
    expected.load_adapter(str(folders[1]))
    model = transformers.AutoModelForCausalLM.from_pretrained(_NAMES[0])
    model.load_adapter(_NAMES[1])
    assert same(model, expected)


def test_auto_model_of_an_adapter(served: str, folders: tuple[Path, Path]) -> None:
    """The model that the adapter names comes from peers, too."""
    expected = transformers.LlamaForCausalLM.from_pretrained(folders[0])
    expected.load_adapter(str(folders[1]))
    assert same(transformers.AutoModelForCausalLM.from_pretrained(_NAMES[1]), expected)


def test_an_adapter_with_other_files_beside_it(
    served: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Some have the configuration of their base, and what was trained besides."""
    folder = tmp_path / "adapter"
    shutil.copytree(folders[1], folder)
    shutil.copy(folders[0] / "config.json", folder)
    save_file({"new": torch.ones(3)}, folder / "new_embeddings.safetensors")
    base = transformers.LlamaForCausalLM.from_pretrained(folders[0])
    expected = peft.PeftModel.from_pretrained(base, folder)
    with mx.serve(folder, model="org/beside", coordinator=served) as source:
        companions = [each.path for each in source.manifest.packaging.companions]
        assert companions == ["new_embeddings.safetensors"]
        model = transformers.AutoModelForCausalLM.from_pretrained(_NAMES[0])
        assert same(peft.PeftModel.from_pretrained(model, "org/beside"), expected)
