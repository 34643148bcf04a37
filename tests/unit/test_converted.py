"""Which calls of `from_pretrained` share what they convert: those that name the same result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralForCausalLM

from mx.core.types import ModelKey
from mx.core.variant import ProcessingKey
from mx.engines.transformers.converted import key_of
from mx.engines.transformers.lookup import ServedModel

SERVED = ServedModel(ModelKey("org/m", "main"), f"org/m@{'ab' * 32}", "ab" * 32, Path("/nowhere"))


def key(
    *args: Any,
    cls: Any = LlamaForCausalLM,
    served: ServedModel = SERVED,
    version: str = "5.23.0",
    **kwargs: Any,
) -> ProcessingKey | None:
    return key_of(cls, served, args, kwargs, version)


def test_what_changes_the_weights_changes_the_key() -> None:
    other = ServedModel(SERVED.key, f"org/m@{'cd' * 32}", "cd" * 32, SERVED.folder)
    keys = [
        key(),
        key(dtype=torch.float32),
        key(dtype="bfloat16"),
        key(cls=MixtralForCausalLM),
        key(served=other),
        key(version="5.19.0"),
        key(config=LlamaConfig(hidden_size=64)),
        key(config=LlamaConfig(hidden_size=128)),
    ]
    assert None not in keys
    assert len({str(each) for each in keys}) == len(keys)


def test_what_changes_no_weights_changes_no_key() -> None:
    assert key(dtype="float32") == key(dtype=torch.float32) == key(torch_dtype="float32")
    assert key(dtype="auto") == key(revision="main", local_files_only=True, token="x") == key()
    config: Any = LlamaConfig(hidden_size=64)
    named: Any = LlamaConfig(hidden_size=64, use_cache=False)
    named.name_or_path = "elsewhere"
    assert key(config=config) == key(config=named)


def test_what_has_no_name_of_its_own_is_not_shared() -> None:
    assert key("positional") is None
    assert key(device_map="auto") is None
    assert key(quantization_config={"load_in_8bit": True}) is None
    assert key(adapter_kwargs={"subfolder": "lora"}) is None
    assert key(dtype={"": torch.float32}) is None
    assert key(dtype="no dtype at all, this") is None
    assert key(cls=type("LlamaForCausalLM", (LlamaForCausalLM,), {"__module__": "mine"})) is None
    # Two files may be behind one path, and two paths may differ.
    assert key(config="/some/config.json") is None
    assert key(config=Path("/some/folder")) is None
