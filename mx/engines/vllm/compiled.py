"""What vLLM's compiled code depends on, without the path of the model's files."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from typing import Any

from mx import config
from mx.engines.replica.keys import short

_CONFIGURATION_CHARS = 500
_PLAIN = re.compile(r"[\w.:,|-]{1,24}", re.ASCII)


def configuration_of(vllm_config: Any) -> str:
    """Return the configuration that the engine's compiled code depends on, as words "part=hash" and
    "VARIABLE=value", so that two can be compared word by word.

    Args:
        vllm_config: The engine's configuration.

    Raises:
        Exception: This version of vLLM has no such hashes.
    """
    from vllm import envs

    words = []
    for each in dataclasses.fields(vllm_config):
        part = getattr(vllm_config, each.name)
        if hasattr(part, "compute_hash"):
            part = _anywhere(part) if each.name == "model_config" else part
            words.append(f"{each.name.removesuffix('_config')}={short(part.compute_hash())}")
    factors = envs.compile_factors()
    for name in sorted(factors.keys() & config.inherited("").keys()):
        value = str(factors[name])
        words.append(f"{name}={value if _PLAIN.fullmatch(value) else short(value)}")
    text = " ".join(words)
    return text if len(text) <= _CONFIGURATION_CHARS else short(text)


def _anywhere(model_config: Any) -> Any:
    """Return a model's configuration without the path or name by which its files were found."""
    found = copy.copy(model_config)
    found.__dict__["model"] = ""
    return found


def forget_places() -> None:
    """Leave the path of the model's files out of the keys of vLLM's compile caches, where mx loads
    the model: loaded by name, its files are in another folder each time. What the files say is in
    the key as well. Idempotent."""
    from vllm.config import VllmConfig

    original = VllmConfig.compute_hash
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def compute_hash(self: Any, *given: Any, **named: Any) -> str:
        if self.model_config is not None and self.load_config.load_format == "mx-peer":
            self, model_config = copy.copy(self), self.model_config
            self.__dict__["model_config"] = _anywhere(model_config)
        return str(original(self, *given, **named))

    VllmConfig.compute_hash = compute_hash
