"""Models of every family compute while their layers arrive, and what they compute is equal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mx import api, config
from mx.engines.transformers.loader import load, loading
from mx.engines.transformers.pending import Pending
from tests.support import families
from tests.support.commands import commands, start_coordinator
from tests.support.gates import gate

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS = config.Settings()


@pytest.fixture(scope="module")
def coordinator() -> Iterator[str]:
    """A coordinator's address."""
    with commands() as run:
        yield start_coordinator(run)[0]


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_family_computes_what_a_copy_from_disk_computes(
    family: str, coordinator: str, tmp_path: Path
) -> None:
    """Also when each layer is missing at the time of its first use."""
    folder = tmp_path / family
    families.save(families.FAMILIES[family], folder)
    reference = families.reference(folder)
    with gate() as gated, api.serve(folder, coordinator=coordinator, settings=SETTINGS):
        model = load(family, coordinator=coordinator, settings=SETTINGS)
        assert any(isinstance(each, Pending) for each in model.parameters())
        assert (model.dtype, model.device) == (reference.dtype, reference.device)
        assert gated.waited == 0
        assert torch.equal(families.outputs(model), families.outputs(reference))
        assert gated.waited > 1
        gated.open(loading(model)).wait()
    assert families.differences(model, reference) == []
    assert model.config.to_dict() | {"_name_or_path": ""} == reference.config.to_dict() | {
        "_name_or_path": ""
    }
    for module in model.modules():
        assert "forward" not in module.__dict__ and not module._forward_pre_hooks
    if model.can_generate():
        assert torch.equal(families.generated(model), families.generated(reference))
        assert model.generation_config == reference.generation_config


@pytest.mark.parametrize("family", ["llama", "mixtral", "t5", "whisper"])
def test_generation_begins_before_the_layers_are_here(
    family: str, coordinator: str, tmp_path: Path
) -> None:
    folder = tmp_path / family
    families.save(families.FAMILIES[family], folder)
    reference = families.reference(folder, dtype=torch.bfloat16)
    with gate() as gated, api.serve(folder, coordinator=coordinator, settings=SETTINGS):
        model = load(family, coordinator=coordinator, settings=SETTINGS, dtype=torch.bfloat16)
        assert torch.equal(families.generated(model), families.generated(reference))
        gated.open(loading(model)).wait()
    assert families.differences(model, reference) == []
