"""What an engine takes from peers beside weights: configuration and tokenizer, and no code."""

from __future__ import annotations

import json
from collections.abc import Mapping

from mx.core.json_bounds import check_json
from mx.core.types import ManifestRef
from mx.errors import ConfigError, ManifestError
from mx.text import shown

#: The fields by which a configuration names code of its own.
_CODE = ("auto_map", "custom_pipelines")
#: Texts in JSON may spell any letter so.
_MAYBE_CODE = (*(each.encode() for each in _CODE), b"\\u")


def check_code(name: str, files: Mapping[str, bytes]) -> None:
    """Refuse side files of a peer that name code to run.

    Args:
        name: The model's name, for errors.
        files: The side files by path.

    Raises:
        ConfigError: One names code; it is named.
        ManifestError: One is not a valid JSON.
    """
    for path, data in files.items():
        if not path.lower().endswith(".json") or not any(each in data for each in _MAYBE_CODE):
            continue
        try:
            check_json(data)
            found = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"the {path} of {name} is not valid JSON: {error}") from None
        if field := _names_code(found):
            raise ConfigError(
                f"the {shown(path)} of {name} names code of its own ({field}), which is never "
                "taken from a peer",
                hint="load the model from a folder of yours that has its files",
            )


def _names_code(found: object) -> str:
    """Return a field that names code, or ""."""
    waiting = [found]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            # In a vocabulary it is a word with a number.
            for field in _CODE:
                if isinstance(each.get(field), dict | list | str):
                    return field
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
    return ""


def check_covered(model: str, pin: str, ref: ManifestRef, do_this: str) -> None:
    """Refuse side files that a pin does not cover: any process may have written them.

    Args:
        model: The model as the user wrote it.
        pin: Its pin; "" if none was given.
        ref: The manifest that the pin stands for.
        do_this: What else the user can do.

    Raises:
        ConfigError: The pin is one of the weights alone.
    """
    if not pin or not ref.weights_alone(pin):
        return
    raise ConfigError(
        f"{model} pins weights alone: its configuration and tokenizer could come from any process",
        hint="write NAME@PIN with the pin that covers the files (`mx serve` prints it), "
        f"or {do_this}",
    )
