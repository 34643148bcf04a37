"""Which calls of `generate` are a captured step. The graph is stood in for by the step itself, run
over the places that a graph has: no GPU is needed to see what it would be given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import StaticCache

from mx.engines.transformers import Decode, decoding, graphs
from mx.engines.transformers.graphs import DecodeStep, Decoding
from mx.errors import ConfigError
from tests.support import families

pytestmark = pytest.mark.usefixtures("one_thread")

STEP = Decode(batch=2, positions=32)
IDS = torch.tensor([[5, 6, 7], [0, 8, 9]])
#: The second sequence is shorter, or both are as long.
MASKS = {"padded": torch.tensor([[1, 1, 1], [0, 1, 1]]), "whole": None}


class Places:
    """Stands for a graph: a launch computes from the places of inputs, and writes the logits'."""

    reason = None

    def __init__(self, made: Decoding, model: Any) -> None:
        self.launches = 0
        self._step = DecodeStep(model, STEP)
        with torch.no_grad():
            logits = self._step.run(self._step.example(0, 0))
            self._inputs = self._step.example(0, 0)
        self._views = self._inputs | {"logits": logits}
        state: Any = self._step.state(results=False)
        made._step, made._graph, made._views = self._step, self, self._views | state  # type: ignore[assignment]

    def inputs(self) -> dict[str, torch.Tensor]:
        return self._inputs

    def launch(self, _: int) -> bool:
        self.launches += 1
        self._views["logits"].copy_(self._step.run(self._inputs))
        return True

    def cache(self) -> Any:
        self._step.cache.reset()
        return self._step.cache


def generated(model: Any, cache: Any, mask: torch.Tensor | None, **more: Any) -> list[torch.Tensor]:
    given = {graphs._CACHE: cache, "attention_mask": mask, "max_new_tokens": 9, **more}
    found = model.generate(
        IDS, do_sample=False, return_dict_in_generate=True, output_logits=True, **given
    )
    return [found.sequences, *found.logits]


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2", "qwen3", "phi3"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_each_token_after_the_first_is_a_step(
    family: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(graphs, "_cuda", SimpleNamespace(current_stream=lambda _: stream))
    torch.manual_seed(1)
    model = families.FAMILIES[family]().eval()
    model.set_attn_implementation(attention)
    for mask in MASKS.values():
        plain = generated(model, StaticCache(config=model.config, max_cache_len=32), mask)
        places = Places(STEP.begin(model), model)
        found = generated(model, places.cache(), mask)
        assert all(map(torch.equal, found, plain)) and places.launches == 8
        generated(model, StaticCache(config=model.config, max_cache_len=32), mask)  # another cache
        generated(model, places.cache(), mask, output_hidden_states=True)  # more than logits
        model(IDS[:, :1], **{graphs._CACHE: places.cache()})  # with gradients
        assert places.launches == 8
        model.forward = type(model).forward.__get__(model)


def test_a_cache_that_counts_in_python_is_refused() -> None:
    model = families.FAMILIES["mistral"]().eval()
    with pytest.raises(ConfigError, match="only layers that attend to all tokens"):
        DecodeStep(model, STEP).example(0, 0)
    with pytest.raises(ConfigError, match="was loaded without `graphs`"):
        decoding(model)
