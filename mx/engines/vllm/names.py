"""The name under which mx knows an engine's model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mx.storage.names import model_name_of


def mx_name(model_config: Any) -> str:
    """Return a model's name where the option `model` gives none.

    Args:
        model_config: vLLM's.

    Returns:
        The name of its folder, or what the engine's user wrote if that is no folder.
    """
    return name_of(str(model_config.model))


def name_of(model: str) -> str:
    """Return the name of a folder, or of what is no folder as it is."""
    path = Path(model)
    return model_name_of(path) if path.exists() else model
