"""The error for a missing optional library."""

from __future__ import annotations

from mx.errors import ConfigError, install_hint


def torch_missing(error: ModuleNotFoundError) -> ConfigError:
    """Return the error to raise in place of `error`, the failed import of torch.

    Raises:
        ModuleNotFoundError: `error` itself, if it names another module.
    """
    if error.name != "torch":
        raise error
    return ConfigError(
        "tensors need torch, and torch is not installed",
        hint=install_hint("torch"),
    )
