"""Compares the engine's configuration of a model with a source's: engines silently cut off weights
that are larger than their configuration says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from mx.errors import ConfigError

#: Numbers with these in their names say nothing about the shapes of weights.
_OTHER = ("token_id", "token_index", "max_", "_length", "window", "version", "eos_", "bos_", "pad_")
#: Texts that say what the weights mean.
_TEXTS = ("architectures", "model_type")
_MAX_DEPTH = 8


def check_configuration(here: Mapping[str, Any], there: bytes) -> None:
    """Compare the fields that determine the shapes of weights.

    Args:
        here: The engine's configuration of the model.
        there: The source's `config.json`.

    Raises:
        ConfigError: They differ, or the source's is not JSON. All differences are named.
    """
    try:
        theirs = json.loads(there)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the source's config.json is malformed: {error}") from None
    if not isinstance(theirs, dict):
        raise ConfigError("the source's config.json is malformed: it is not an object")
    found = list(_differences(here, theirs, ""))
    if found:
        more = f"; and {len(found) - 8} more" if len(found) > 8 else ""
        raise ConfigError(
            f"the source has a model of another configuration: {'; '.join(found[:8])}{more}"
        )


def _differences(
    here: Mapping[str, Any], there: Mapping[str, Any], prefix: str, depth: int = 0
) -> Iterator[str]:
    for name, value in sorted(there.items()):
        if name not in here:
            continue
        ours, field = here[name], f"{prefix}{name}"
        if isinstance(value, dict) and isinstance(ours, Mapping) and depth < _MAX_DEPTH:
            yield from _differences(ours, value, f"{field}.", depth + 1)
        elif (name in _TEXTS or _counts(name, value, ours)) and value != ours:
            yield f"{field}: {str(value)[:40]} there, {str(ours)[:40]} here"


def _counts(name: str, *values: object) -> bool:
    numbers = all(type(each) is int for each in values)
    return numbers and not any(part in name for part in _OTHER)
