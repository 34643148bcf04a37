"""What `patch` replaces, and that `unpatch` puts it back."""

from __future__ import annotations

import logging
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
import transformers
from transformers import modeling_utils, tokenization_utils_base
from transformers.utils import hub

import mx
from mx import config
from mx.engines.transformers import patch, tested, unpatch
from mx.engines.transformers.loads import begin
from mx.engines.transformers.lookup import Lookup
from mx.errors import ConfigError, NoSourceError
from tests.support.commands import environment
from tests.support.daemon import daemon

NOWHERE = "127.0.0.1:9"


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the hub is tried again and again, with pauses that grow."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def settings() -> Iterator[config.Settings]:
    yield config.load({"cache_socket": "off"}, environ={"HOME": "/nonexistent"})
    unpatch()


def replaced() -> list[Any]:
    """Everything that is replaced."""
    return [
        hub.cached_files,
        hub.has_file,
        hub.list_repo_templates,
        hub.resolve_revision,
        vars(modeling_utils)["get_model_conversion_mapping"],
        vars(modeling_utils)["safe_open"],
        safetensors.safe_open,
        safetensors.torch.safe_open,  # type: ignore[attr-defined]
        vars(tokenization_utils_base)["list_repo_templates"],
        vars(tokenization_utils_base)["resolve_revision"],
        vars(modeling_utils.PreTrainedModel)["from_pretrained"],
        vars(tokenization_utils_base.PreTrainedTokenizerBase)["from_pretrained"],
    ]


def test_everything_is_put_back(settings: config.Settings) -> None:
    before = replaced()
    patch(coordinator=NOWHERE, settings=settings)
    assert all(now is not was for now, was in zip(replaced(), before, strict=True))
    patch(coordinator=NOWHERE, settings=settings)  # once is enough
    unpatch()
    unpatch()
    assert all(now is was for now, was in zip(replaced(), before, strict=True))


def test_a_block_undoes_what_it_has_replaced(settings: config.Settings) -> None:
    before = replaced()
    with pytest.raises(ZeroDivisionError), patch(coordinator=NOWHERE, settings=settings):
        assert all(now is not was for now, was in zip(replaced(), before, strict=True))
        with patch(coordinator=NOWHERE, settings=settings):
            pass
        assert replaced() != before
        raise ZeroDivisionError
    assert replaced() == before
    with patch(coordinator=NOWHERE, settings=settings):
        unpatch()
        patch(coordinator=NOWHERE, settings=settings)  # another, that the block leaves
    assert replaced() != before


def test_another_coordinator_is_refused(settings: config.Settings) -> None:
    patch(coordinator=NOWHERE, settings=settings)
    with pytest.raises(ConfigError, match=r"unpatch\(\) first"):
        patch(coordinator="127.0.0.1:10", settings=settings)


def test_children_have_the_version_of_these_tests() -> None:
    """So that `make test-transformers` tests one release everywhere."""
    code = "import transformers; print(transformers.__version__)"
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, check=True)
    assert found.stdout.decode().strip() == transformers.__version__


def test_an_unknown_version_is_told(
    settings: config.Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Importing its image processors replaces the module.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "9.1.0")
    tested.warn_if_untested.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with patch(coordinator=NOWHERE, settings=settings):
                pass
        tested.warn_if_untested()  # as `mx.engines.transformers.load` does
    assert caplog.text.count("transformers 9.1.0 was not tested with mx") == 1
    caplog.clear()
    # One in which a function that is replaced has another name: all is left to it.
    before = replaced()
    monkeypatch.delattr(modeling_utils, "safe_open")
    with caplog.at_level(logging.WARNING):
        patch(coordinator=NOWHERE, settings=settings)
    assert "has no safe_open: everything comes from disk" in caplog.text
    monkeypatch.undo()
    assert replaced() == before


@pytest.mark.parametrize("name", ["transformers.models.late", "peft.utils.late", "program"])
def test_modules_that_were_imported_meanwhile_get_it_back(
    settings: config.Settings, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before = hub.cached_files, safetensors.safe_open
    patch(coordinator=NOWHERE, settings=settings)
    late = types.ModuleType(name)
    vars(late)["cached_files"], vars(late)["opened"] = hub.cached_files, safetensors.safe_open
    monkeypatch.setitem(sys.modules, late.__name__, late)
    unpatch()
    assert (vars(late)["cached_files"], vars(late)["opened"]) == before


def test_notes_have_a_reason(settings: config.Settings, tmp_path: Path) -> None:
    """Why a file did not come from peers, whatever kept it from them."""
    patch(coordinator=NOWHERE, settings=settings)
    cases: tuple[tuple[str, str, dict[str, Any], str], ...] = (
        ("org/unknown", "modeling.py", {}, "code never comes from peers"),
        ("org/unknown", "x.json", {"repo_type": "dataset"}, "it is a dataset"),
        ("org/unknown", "x.json", {}, "no coordinator answers"),
        (str(tmp_path), "x.json", {}, "it is a path"),
    )
    for name, filename, more, reason in cases:
        with pytest.raises(OSError) as caught:
            hub.cached_files(name, [filename], cache_dir=str(tmp_path / "cache"), **more)
        notes = getattr(caught.value, "__notes__", [])
        assert len(notes) == 1 and reason in notes[0]


def test_a_note_where_files_are_found_and_weights_are_not(
    settings: config.Settings, tmp_path: Path
) -> None:
    """transformers itself raises then, and not the function that looks for its files."""
    transformers.LlamaConfig(hidden_size=32, num_hidden_layers=1).save_pretrained(tmp_path)
    patch(coordinator=NOWHERE, settings=settings)
    with pytest.raises(OSError) as caught:
        transformers.LlamaForCausalLM.from_pretrained(tmp_path, variant="fp16")
    notes = getattr(caught.value, "__notes__", [])
    assert len(notes) == 1 and notes[0].endswith("it is a path")


def of_hub(cache: Path, eps: float) -> tuple[Path, Any]:
    """Put a small Llama, org/mix, where the hub's files are; return its folder, and it."""
    snapshot = cache / "models--org--mix" / "snapshots" / ("a" * 40)
    shape: Any = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    configuration = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, vocab_size=16, rms_norm_eps=eps, **shape
    )
    model: Any = transformers.LlamaForCausalLM(configuration)
    model.save_pretrained(snapshot)
    (cache / "models--org--mix" / "refs").mkdir()
    (cache / "models--org--mix" / "refs" / "main").write_text("a" * 40)
    return snapshot, model


@pytest.mark.integration
@pytest.mark.parametrize("how", ["left", "no source"])
def test_a_configuration_of_peers_gets_no_weights_of_the_hub(
    settings: config.Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The hub's cache has another model of the same name, with a configuration of its own."""
    theirs, _ = of_hub(tmp_path / "peer", 0.5)
    _, ours = of_hub(tmp_path / "hub", 1e-6)
    more: dict[str, Any] = {"cache_dir": str(tmp_path / "hub"), "local_files_only": True}
    with daemon() as (_, address), mx.serve(theirs, model="org/mix", coordinator=address):
        patch(coordinator=address, settings=settings)
        auto = transformers.AutoModelForCausalLM
        assert auto.from_pretrained("org/mix", **more).config.rms_norm_eps == 0.5
        if how == "left":
            more["offload_folder"] = str(tmp_path / "offloaded")
        else:

            def pull(*_: object, **__: object) -> None:
                raise NoSourceError("the only source has gone")

            monkeypatch.setattr("mx.engines.transformers.loads.pull", pull)
        found = auto.from_pretrained("org/mix", **more)
        unpatch()
    assert found.config.rms_norm_eps == 1e-6
    for name, tensor in ours.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor)


def test_a_part_on_disk_is_left_to_transformers(settings: config.Settings) -> None:
    """accelerate reads it from the checkpoint's file again, whenever it is needed."""
    lookup = Lookup(settings, NOWHERE)
    for more in ({}, {"torch_dtype": "float32"}, {"dtype": "auto"}):
        kwargs = {"device_map": {"model": "cpu", "lm_head": "disk"}, **more}
        found, reason = begin(lookup, transformers.LlamaForCausalLM, "org/x", (), kwargs, "5.23.0")
        assert found is None and "`device_map` leaves a part on disk" in reason
    lookup.close()


@pytest.mark.parametrize("kind", ["AutoConfig", "AutoModel", "AutoTokenizer", "AutoProcessor"])
def test_code_may_be_trusted_where_peers_have_none(
    settings: config.Settings, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """No model whose files name code is taken from peers: what is, may be trusted, or not."""
    asked = []
    monkeypatch.setattr(Lookup, "find", lambda _, name, revision: asked.append(name))
    patch(coordinator=NOWHERE, settings=settings)
    auto = getattr(transformers, kind)
    with pytest.raises((OSError, ValueError)):
        auto.from_pretrained("org/unknown", trust_remote_code=True, local_files_only=True)
    assert asked
