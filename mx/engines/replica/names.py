"""The name under which mx knows an engine's model."""

from __future__ import annotations

from pathlib import Path

from mx.storage.names import model_name_of


def name_of(model: str) -> str:
    """Return a model's name where the option `model` gives none.

    Args:
        model: What the engine's user calls it.

    Returns:
        The name of its folder, or what it is called if that is no folder.
    """
    path = Path(model)
    return model_name_of(path) if path.exists() else model
