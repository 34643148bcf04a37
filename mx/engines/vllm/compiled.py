"""What vLLM's compiled code depends on: not on where a model's files are."""

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
    """Return what of the engine's configuration shapes its compiled code, as words "part=hash" and
    "VARIABLE=value", so that two can be compared word by word.

    Args:
        vllm_config: The engine's configuration.

    Raises:
        Exception: Of a version of vLLM that has no such hashes.
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
    """Have vLLM's caches of what it compiles not depend on where the model's files are, where mx
    loads it: by name they are in another folder each time. What they say is in the key as well.
    Idempotent."""
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
