"""Imports transformers when it is needed."""

from __future__ import annotations

import importlib
from typing import Any

from mx.errors import ConfigError, install_hint


def transformers() -> Any:
    """Return the module `transformers`.

    Raises:
        ConfigError: It, or torch, is not installed.
    """
    try:
        importlib.import_module("torch")
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):
            raise
        raise ConfigError(
            f"models of transformers need {error.name}, and it is not installed",
            hint=install_hint("transformers"),
        ) from None
