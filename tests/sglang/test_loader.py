"""SGLang's real loader and hooks, around a model of plain layers: its own need a GPU."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_loader import loader as loaders
from sglang.srt.plugins.hook_registry import HookRegistry

import mx
from mx.engines.sglang import loader as ours
from mx.engines.sglang.plugin import before_update, register
from tests.support.daemon import daemon

CONFIG = {"architectures": ["Plain"], "model_type": "plain", "hidden_size": 8}


class Plain(torch.nn.Module):
    """Two layers, and the method by which SGLang fills a model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)


@pytest.fixture(scope="module")
def coordinator() -> Iterator[str]:
    with daemon(lease_s=2.0) as (_, address):
        yield address


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's loader as it is, without its models and its process groups."""
    register()
    HookRegistry.apply_hooks()
    group = SimpleNamespace(rank_in_group=0, world_size=1)
    from sglang.srt.distributed import parallel_state

    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: group)
    monkeypatch.setattr(parallel_state, "get_pp_group", lambda: group)
    monkeypatch.setattr(loaders, "_initialize_model", lambda *_, **__: Plain())
    monkeypatch.setattr(loaders, "_get_quantization_config", lambda *_, **__: None)
    monkeypatch.setattr(ours, "_loadings", [])


def load(folder: Path, coordinator: str, **options: object) -> torch.nn.Module:
    """Load a model as SGLang's model runner does."""
    extra = {"mx_peer": {"model": "plain", "coordinator": coordinator, **options}}
    config: Any = SimpleNamespace(
        model_path=str(folder), revision=None, dtype=torch.float32, quantization=None,
        hf_config=SimpleNamespace(architectures=["Plain"], to_dict=lambda: dict(CONFIG)),
        is_draft_model=False, modelopt_quant=None,
    )  # fmt: skip
    loader = loaders.get_model_loader(loaders.LoadConfig(model_loader_extra_config=extra), config)
    assert isinstance(loader, ours.MxPeerLoader)
    model: torch.nn.Module = loader.load_model(
        model_config=config, device_config=SimpleNamespace(device="cpu")
    )
    return model


def bare(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_checkpoint_then_a_replica_then_an_update(
    engine: None, coordinator: str, tmp_path: Path
) -> None:
    weights = Plain().state_dict()
    folder = bare(tmp_path / "bare")
    with mx.serve(weights, model="plain", coordinator=coordinator, files=folder):
        one = load(folder, coordinator)
    first = ours._loadings[-1]
    two = load(folder, coordinator)
    second = ours._loadings[-1]
    assert (first.loads, second.loads) == ({"checkpoint": 1}, {"loaded": 1})
    for model in (one, two):
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, weights[name])
    before_update()
    states = [each.lender and each.lender.state for each in (first, second)]
    assert states == ["withdrawn", "withdrawn"]


def test_ordinary_loader_takes_over(
    engine: None, coordinator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file, save_file

    weights = Plain().state_dict()
    folder = bare(tmp_path / "whole")
    save_file(weights, str(folder / "model.safetensors"))
    # SGLang's own reader of files asks for a server's arguments.
    monkeypatch.setattr(
        loaders.DefaultModelLoader,
        "_get_weights_iterator",
        lambda _, source: iter(load_file(Path(source.model_or_path, "model.safetensors")).items()),
    )
    model = load(folder, coordinator, model="unknown")
    loading = ours._loadings[-1]
    assert loading.loads == {"ordinary": 1} and loading.lender is not None
    assert torch.equal(model.state_dict()["first.weight"], weights["first.weight"])
    loading.lender.close()


def test_other_configurations_are_left_alone(engine: None) -> None:
    found = loaders.get_model_loader(loaders.LoadConfig())
    assert type(found) is loaders.DefaultModelLoader


def test_after_a_failed_load_sglang_is_as_it_was(
    engine: None, coordinator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source has a tensor that the model can't take, which is seen while the model is filled:
    the ordinary loader's model is the second, and the first is in no registry."""
    from safetensors.torch import load_file, save_file
    from sglang.srt.layers.rotary_embedding import factory

    ropes: dict[Any, Any] = factory._ROPE_DICT
    built: list[Plain] = []
    states: list[torch.Tensor] = []

    def build(*_: object, **__: object) -> Plain:
        states.append(torch.get_rng_state())
        model = Plain()
        model.rope = ropes.setdefault("test", torch.nn.Linear(8, 8))  # as layers share it
        built.append(model)
        return model

    monkeypatch.setattr(loaders, "_initialize_model", build)
    monkeypatch.setattr(
        loaders.DefaultModelLoader,
        "_get_weights_iterator",
        lambda _, source: iter(load_file(Path(source.model_or_path, "model.safetensors")).items()),
    )
    weights = Plain().state_dict()
    folder = bare(tmp_path / "whole")
    save_file(weights, str(folder / "model.safetensors"))
    before = dict(ropes)
    try:
        more = {**weights, "third.weight": torch.zeros(8)}
        with mx.serve(more, model="more", coordinator=coordinator):
            model = load(folder, coordinator, model="more")
        loading = ours._loadings[-1]
        assert loading.loads == {"ordinary": 1} and model is built[1]
        assert built[1].rope is not built[0].rope and ropes["test"] is built[1].rope
        assert {name for name in ropes if name not in before} == {"test"}
        assert torch.equal(states[0], states[1])
        for name, tensor in weights.items():
            assert torch.equal(model.state_dict()[name], tensor)
        assert loading.lender is not None
        loading.lender.close()
    finally:
        ropes.pop("test", None)


def test_weights_that_are_written_past_an_update(
    engine: None, coordinator: str, tmp_path: Path
) -> None:
    """What SGLang's session of updates calls, and `load_weights` itself, end lending."""
    from sglang.srt.managers.scheduler_components import weight_updater as module

    updater: Any = object.__new__(module.SchedulerWeightUpdaterManager)
    updater._session = object()  # one is open already: SGLang itself does nothing
    weights = Plain().state_dict()
    folder = bare(tmp_path / "bare")
    calls: list[Callable[[Any], object]] = [
        lambda model: model.load_weights(weights.items()),
        lambda model: model.first.weight.data.mul_(1.5),
        lambda _: updater.begin_weight_update(SimpleNamespace(selector="all")),
    ]
    for number, call in enumerate(calls):
        name = f"past{number}"
        with mx.serve(weights, model=name, coordinator=coordinator, files=folder):
            model = load(folder, coordinator, model=name)
        lender = ours._loadings[-1].lender
        assert lender is not None and lender.state == "lending"
        call(model)
        until_s = time.monotonic() + 60
        while lender.state == "lending" and time.monotonic() < until_s:
            time.sleep(0.05)
        assert lender.state == "withdrawn" and "has changed it since" in lender.why
        lender.close()


@pytest.mark.parametrize("backup", [True, False])
def test_memory_that_is_released_and_resumed(
    engine: None,
    coordinator: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backup: bool,
) -> None:
    """SGLang's own calls, by which RL frameworks have it sleep: nothing is lent before memory goes,
    and what is brought back is lent again."""
    from sglang.srt.managers.scheduler_components import weight_updater as module

    from mx.engines.replica import lent_tensors

    monkeypatch.setattr(lent_tensors, "common_device", lambda _: "cuda:0")  # as on a GPU
    monkeypatch.setattr(module.torch.distributed, "barrier", lambda *_: None)
    monkeypatch.setattr(module, "get_model", lambda: SimpleNamespace(weight_cache_mode="off"))
    monkeypatch.setattr(
        module.torch, "get_device_module", lambda: SimpleNamespace(synchronize=lambda: None)
    )
    name = f"sleep-{backup}"
    folder = bare(tmp_path / "bare")
    with mx.serve(Plain().state_dict(), model=name, coordinator=coordinator, files=folder):
        model = load(folder, coordinator, model=name)
    lender = ours._loadings[-1].lender
    assert lender is not None
    until_s = time.monotonic() + 60
    while lender.state == "starting" and time.monotonic() < until_s:
        time.sleep(0.05)
    assert lender.state == "lending", lender.why

    class Saver:
        """Frees and brings back memory; without a backup it has other bytes then."""

        def pause(self, tag: str) -> None:
            if tag == "weights":
                assert lender is not None and lender.state == "changing"
                assert not mx.list_sources(name, coordinator=coordinator)
                if not backup:
                    first: Any = model.first
                    first.weight.data.fill_(float("nan"))

        def resume(self, tag: str) -> None: ...

    updater: Any = object.__new__(module.SchedulerWeightUpdaterManager)
    updater.memory_saver_adapter, updater.scheduler = Saver(), None
    updater.is_fully_idle = updater.flush_cache = lambda **_: True
    updater.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    updater.offload_tags, updater.tp_cpu_group = set(), None
    for tags in (["kv_cache"], None):
        updater.release_memory_occupation(SimpleNamespace(tags=tags))
        updater.resume_memory_occupation(SimpleNamespace(tags=tags))
    if backup:
        assert lender.state == "lending"
        found = mx.list_sources(name, coordinator=coordinator)
        assert [each.record.model.revision for each in found] == ["main"]
    else:
        assert lender.state == "withdrawn" and "sleep has changed it since" in lender.why
        assert not mx.list_sources(name, coordinator=coordinator)
    lender.close()
