"""What `patch` replaces, and that `unpatch` puts it back."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import safetensors
import safetensors.torch
import transformers
from transformers import modeling_utils, tokenization_utils_base
from transformers.utils import hub

from mx import config
from mx.engines.transformers import patch, unpatch
from mx.engines.transformers.lookup import Lookup
from mx.errors import ConfigError

NOWHERE = "127.0.0.1:9"


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


def test_another_coordinator_is_refused(settings: config.Settings) -> None:
    patch(coordinator=NOWHERE, settings=settings)
    with pytest.raises(ConfigError, match=r"unpatch\(\) first"):
        patch(coordinator="127.0.0.1:10", settings=settings)


def test_an_unknown_version_is_told(
    settings: config.Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Importing its image processors replaces the module.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "9.1.0")
    with caplog.at_level(logging.WARNING):
        patch(coordinator=NOWHERE, settings=settings)
    assert "transformers 9.1.0 is not known here" in caplog.text
    caplog.clear()
    unpatch()
    # One in which a function that is replaced has another name: all is left to it.
    before = replaced()
    monkeypatch.delattr(modeling_utils, "safe_open")
    with caplog.at_level(logging.WARNING):
        patch(coordinator=NOWHERE, settings=settings)
    assert "has no safe_open: everything comes from disk" in caplog.text
    monkeypatch.undo()
    assert replaced() == before


def test_modules_that_were_imported_meanwhile_get_it_back(
    settings: config.Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = hub.cached_files
    patch(coordinator=NOWHERE, settings=settings)
    late = types.ModuleType("transformers.models.late")
    vars(late)["cached_files"] = hub.cached_files
    monkeypatch.setitem(sys.modules, late.__name__, late)
    unpatch()
    assert vars(late)["cached_files"] is before


@pytest.mark.parametrize("kind", ["AutoConfig", "AutoModel", "AutoTokenizer", "AutoProcessor"])
def test_what_may_run_code_asks_no_peers(
    settings: config.Settings, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A configuration names the code, so that it must not come from peers either."""
    asked = []
    monkeypatch.setattr(Lookup, "find", lambda _, name, revision: asked.append(name))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    patch(coordinator=NOWHERE, settings=settings)
    auto = getattr(transformers, kind)
    with pytest.raises((OSError, ValueError)):
        auto.from_pretrained("org/unknown", trust_remote_code=True, local_files_only=True)
    assert not asked
    with pytest.raises((OSError, ValueError)):
        auto.from_pretrained("org/unknown", local_files_only=True)
    assert asked
