"""Loads random models and adapters from disk and from peers, and compares them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

from mx.engines import transformers as engine
from tests.folders.made import Tensors

_TEXT: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 16,
    "max_position_embeddings": 16,
}
_CLASSES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {**_TEXT, "num_key_value_heads": 2},
    "Qwen2ForCausalLM": {**_TEXT, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "BertForMaskedLM": _TEXT,
    "GPT2LMHeadModel": {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 16, "n_positions": 8},
}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BASE = "org/base"


class Models:
    """Small models: their configurations, the shapes of their tensors, and a base of adapters."""

    def __init__(self, place: Path) -> None:
        """
        Args:
            place: A folder for what is made.
        """
        self.base = place / "LlamaForCausalLM"
        self._saved: dict[str, tuple[str, Tensors]] = {}
        for name, fields in _CLASSES.items():
            of = getattr(transformers, name)
            of(of.config_class(**fields)).save_pretrained(place / name)
            config = (place / name / "config.json").read_text()
            self._saved[name] = config, load_file(place / name / "model.safetensors")

    def random_model(self, folder: Path, choose: random.Random) -> Tensors:
        """Write the configuration of one, and return weights for it."""
        config, shapes = self._saved[choose.choice(list(self._saved))]
        dtype = choose.choice(_DTYPES)
        fields = {**json.loads(config), "dtype": str(dtype).removeprefix("torch.")}
        (folder / "config.json").write_text(json.dumps(fields))
        return {name: torch.randn(tensor.shape).to(dtype) for name, tensor in shapes.items()}

    def random_adapter(self, folder: Path, choose: random.Random) -> None:
        """Write an adapter of the base."""
        modules = choose.sample(("q_proj", "k_proj", "v_proj", "o_proj", "up_proj"), 2)
        wanted = peft.LoraConfig(r=choose.randint(1, 4), target_modules=modules)
        peft.get_peft_model(self._loaded_base(str(self.base)), wanted).save_pretrained(str(folder))
        weights = load_file(folder / "adapter_model.safetensors")
        dtype = choose.choice(_DTYPES)
        drawn = {name: torch.randn(tensor.shape).to(dtype) for name, tensor in weights.items()}
        save_file(drawn, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config = folder / "adapter_config.json"
        config.write_text(config.read_text().replace(str(self.base), BASE))

    def _loaded_base(self, name: str) -> Any:
        return transformers.LlamaForCausalLM.from_pretrained(name)

    def check_model(self, folder: Path, name: str, coordinator: str, choose: random.Random) -> str:
        """Load a model from its folder, and from peers by its name.

        Returns:
            "loaded", or "refused" if transformers loads it neither way.

        Raises:
            AssertionError: The results differ.
        """
        of = json.loads((folder / "config.json").read_text())["architectures"][0]
        classes = (of, of, "AutoModel")
        used = getattr(transformers, choose.choice(classes))
        options: dict[str, Any] = choose.choice(({}, {}, {"dtype": torch.float32}))

        def load(what: str) -> tuple[Any, Any]:
            found = used.from_pretrained(what, output_loading_info=True, **options)
            return found[0].state_dict(), found[1]

        disk = _outcome(load, str(folder))
        before = engine.counts()
        with engine.patch(coordinator=coordinator):
            peers = _outcome(load, name)
            after = engine.counts()
        if isinstance(disk, Exception):
            assert isinstance(peers, Exception), f"from disk {disk!r}; from peers it loads"
            return "refused"
        assert not isinstance(peers, Exception), f"from disk it loads; from peers {peers!r}"
        taken = {source: after[source] - before[source] for source in after}
        assert taken["disk"] == 0, "it did not come from peers"
        assert sum(taken.values()) == 1, taken
        (expected, said), (found, told) = disk, peers
        assert {each: set(said[each]) for each in said} == {each: set(told[each]) for each in told}
        # transformers draws what no file holds.
        drawn = {name for name in expected if name in said["missing_keys"]}
        same(found, expected, but=drawn)
        return "loaded"

    def check_adapter(self, folder: Path, name: str, coordinator: str) -> None:
        """Load an adapter from its folder, and from peers by its name, in three ways.

        Raises:
            AssertionError: The results differ.
        """

        def of_peft(base: str, adapter: str) -> Any:
            return peft.PeftModel.from_pretrained(self._loaded_base(base), adapter)

        def of_transformers(base: str, adapter: str) -> Any:
            model = self._loaded_base(base)
            model.load_adapter(adapter)
            return model

        expected = [load(str(self.base), str(folder)) for load in (of_peft, of_transformers)]
        with engine.patch(coordinator=coordinator):
            found = [load(BASE, name) for load in (of_peft, of_transformers)]
            found.append(transformers.AutoModelForCausalLM.from_pretrained(name))
        for one, other in zip(found, [*expected, expected[1]], strict=True):
            assert any("lora" in each for each in one.state_dict())
            same(one.state_dict(), other.state_dict())


def _outcome(load: Any, what: str) -> Any:
    try:
        return load(what)
    except (OSError, ValueError, RuntimeError, KeyError, AttributeError, TypeError) as error:
        return error


def same(found: Tensors, expected: Tensors, but: frozenset[str] | set[str] = frozenset()) -> None:
    """Raise AssertionError unless names, dtypes, shapes and bytes are the same.

    Args:
        found: Some tensors.
        expected: Others.
        but: The names of tensors whose bytes may differ.
    """
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, tensor in expected.items():
        other = found[name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), name
        assert name in but or torch.equal(_bytes(other), _bytes(tensor)), name


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
