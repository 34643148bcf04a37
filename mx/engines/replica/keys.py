"""The fields of processing keys that engines have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from mx.core.digest import document_digest

#: Fields of a model's configuration that say nothing about its weights.
_IGNORED = ("_name_or_path", "transformers_version", "_attn_implementation_autoset")


def fields_of(
    engine: str,
    release: str,
    model_config: Any,
    ranks: Mapping[str, tuple[int, int]],
    state: str,
) -> dict[str, object]:
    """Return the fields of the key of one rank's tensors.

    Args:
        engine: The engine's name.
        release: Its version.
        model_config: The engine's configuration of the model, of vLLM or SGLang.
        ranks: By axis ("tp", "pp") the rank and the size.
        state: "loaded" for the tensors before the engine processes them, "processed" after.
    """
    hf = model_config.hf_config
    found: dict[str, object] = {
        "engine": engine,
        "version": release.partition("+")[0],  # without the part that names a build
        "tp": ranks["tp"],
        "pp": ranks["pp"] if ranks["pp"][1] > 1 else None,
        "quantization": model_config.quantization or "",
        "dtype": model_config.dtype,
        "transformers": version("transformers"),
        "arch": "+".join(getattr(hf, "architectures", None) or []),
        "config": short(_without(dict(hf.to_dict()))),
        "state": state,
    }
    quantized = [
        getattr(hf, "quantization_config", None),
        getattr(model_config, "quantization_config", None),
    ]
    if any(quantized):
        found["quant_config"] = short(quantized)
    return found


def short(what: Any) -> str:
    """Return a short digest of a configuration."""
    text = json.dumps(what, sort_keys=True, default=str)
    return document_digest(text.encode()).hex()[:8]


def _without(what: Any) -> Any:
    """Return a configuration without the fields that say nothing about weights, at any depth."""
    if isinstance(what, Mapping):
        return {str(name): _without(each) for name, each in what.items() if name not in _IGNORED}
    return [_without(each) for each in what] if isinstance(what, list | tuple) else what
