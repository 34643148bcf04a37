"""What is said where a library is missing that mx does not bring along."""

from __future__ import annotations

from mx.errors import ConfigError


def torch_missing(error: ModuleNotFoundError) -> ConfigError:
    """Return what to raise in place of `error`, the failed import of torch."""
    if error.name != "torch":
        raise error
    return ConfigError(
        "tensors are torch's, and torch is not installed",
        hint="pip install torch, or mx with its extra: from a clone, pip install '.[torch]'",
    )
