"""Adapters of PEFT are models: they load from peers by their names as they do from folders."""

from __future__ import annotations

import json
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
from tests.support.commands import Run, start_coordinator
from tests.support.daemon import daemon
from tests.support.outcomes import until

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


def copied(folder: Path, to: Path, **fields: Any) -> Path:
    """A copy of an adapter's folder with other fields in its configuration."""
    to.mkdir(exist_ok=True)
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    config = to / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    return to


def test_adapters_are_listed_with_their_base(
    run: Run, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    base, adapter = folders
    coordinator, _ = start_coordinator(run)
    at = ("--coordinator", coordinator)
    hostile = copied(adapter, tmp_path / "x", base_model_name_or_path="\x1b[2Jorg/\u202ex" * 9999)
    odd = copied(adapter, tmp_path / "odd", base_model_name_or_path=["org/base"])
    sources = [
        run("serve", str(folder), "--model", name, *at, "--json")
        for folder, name in ((adapter, "ad"), (hostile, "x"), (odd, "odd"), (base, "whole"))
    ]
    said = [source.json().get("base", "") for source in sources]
    assert said == [_NAMES[0], ("[2Jorg/x" * 9999)[:600], "", ""]
    until(lambda: f"  adapter of {_NAMES[0]}" in sources[0].err, "its base is told")
    for name, expected in zip(("ad", "x", "odd", "whole"), said, strict=True):
        listed = run("models", name, *at, "--json")
        assert listed.wait() == 0, listed.err
        assert [each.get("base", "") for each in listed.json()["models"]] == [expected]
    for name, base_of in zip(("ad", "x"), said, strict=False):
        listed = run("models", name, *at)
        assert listed.wait() == 0
        assert f"  adapter of {base_of[:30]}" in listed.out
        assert not {"\x1b", "\u202e"} & set(listed.out)
    pulled = run("pull", "ad", *at, "--out", str(tmp_path / "out"), "--json")
    assert pulled.wait() == 0, pulled.err
    assert pulled.json()["base"] == _NAMES[0]


@pytest.mark.parametrize("whole", [False, True])
def test_an_adapter_beside_the_configuration_or_the_weights_of_a_model(
    served: str, folders: tuple[Path, Path], tmp_path: Path, whole: bool
) -> None:
    """Its weights are the main ones there, or a companion of these."""
    base, adapter = folders
    folder = copied(adapter, tmp_path / "both")
    for name in ("config.json", *(["model.safetensors"] if whole else [])):
        (folder / name).write_bytes((base / name).read_bytes())
    expected = transformers.LlamaForCausalLM.from_pretrained(base)
    expected.load_adapter(str(adapter))
    with mx.serve(folder, model="org/both", coordinator=served) as source:
        assert source.notes.base == ("" if whole else _NAMES[0])
        assert same(transformers.AutoModelForCausalLM.from_pretrained("org/both"), expected)
        model = transformers.AutoModelForCausalLM.from_pretrained(_NAMES[0])
        model.load_adapter("org/both")
        assert same(model, expected)
