"""What building a model leaves in its engine is undone, wherever the engine keeps it."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mx.engines.replica.registries import undone_unless_kept

torch_cuda: Any = torch.cuda


@pytest.fixture
def engine() -> Iterator[Any]:
    """A module of an engine's package."""
    module: Any = types.ModuleType("an_engine.layers")
    module.BY_NAME, module.BY_ADDRESS, module.ALL = {"old": torch.ones(1)}, {7: "seven"}, []
    module.NESTED, module.WORKSPACE, module.VERSION = {}, None, "1"
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def build(engine: Any, owner: Any) -> torch.nn.Module:
    """Build a model as engines do."""
    model = torch.nn.Linear(2, 2)
    engine.BY_NAME |= {"old": torch.zeros(1), "new": model}
    engine.BY_ADDRESS[id(model)] = ["a layer that another rank has"]
    engine.ALL.append(model)
    engine.NESTED["first"] = {"weight": model.weight}
    engine.WORKSPACE = torch.zeros(8, device="meta")
    engine.VERSION = "2"
    owner.layers["layer"] = model
    owner.ignored = [f"model.{each}" for each in owner.ignored]  # as quantisation maps names
    owner.made = True
    return model


def test_registries_are_as_they_were(engine: Any) -> None:
    owner = SimpleNamespace(layers={}, ignored=["lm_head"])
    old, random = engine.BY_NAME["old"], torch.get_rng_state()
    layers = owner.layers
    with undone_unless_kept("an_engine", owner):
        build(engine, owner)
    assert engine.BY_NAME.keys() == {"old"} and engine.BY_NAME["old"] is old
    assert (engine.BY_ADDRESS, engine.ALL, engine.NESTED) == ({7: "seven"}, [], {})
    assert engine.WORKSPACE is None and engine.VERSION == "2"
    assert vars(owner) == {"layers": {}, "ignored": ["lm_head"]} and owner.layers is layers
    assert torch.equal(torch.get_rng_state(), random)


def test_what_is_kept_stays(engine: Any) -> None:
    owner = SimpleNamespace(layers={}, ignored=["lm_head"])
    with undone_unless_kept("an_engine", owner) as keep:
        model = build(engine, owner)
        keep()
    assert engine.BY_NAME["new"] is model is engine.ALL[0] is owner.layers["layer"]
    assert owner.ignored == ["model.lm_head"] and engine.WORKSPACE is not None


def test_constants_of_modules_that_are_imported_meanwhile_stay(engine: Any) -> None:
    late: Any = types.ModuleType("an_engine.late")
    try:
        with undone_unless_kept("an_engine"):
            late.EPS, late.MADE = torch.ones(1), {"x": torch.nn.Identity()}
            sys.modules[late.__name__] = late
        assert late.EPS is not None and not late.MADE
    finally:
        del sys.modules[late.__name__]


def test_random_numbers_of_devices(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    state = ["of a device"]
    monkeypatch.setattr(torch_cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch_cuda, "get_rng_state_all", lambda: state)
    monkeypatch.setattr(torch_cuda, "set_rng_state_all", given.append)
    with undone_unless_kept("an_engine"):
        pass
    assert given == [state]
