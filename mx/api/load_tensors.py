"""A model's tensors in one call: `load`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mx.api.common import check_type
from mx.api.target import pull
from mx.errors import ConfigError

if TYPE_CHECKING:
    import torch


def load(model: str, **options: Any) -> dict[str, torch.Tensor]:
    """Pull a model and return its tensors by name, in execution order.

    One line in place of `safetensors.torch.load_file`. Blocks until every layer is verified.

    Args:
        model: NAME, NAME:REVISION or NAME@PIN.
        options: Those of `pull`, but for `hold`, which needs the pull itself.

    Returns:
        Views of memory that they keep alive: the source's own, mapped privately, where it could
        be attached, else this process's. Writing to them reaches no other process.

    Raises:
        ConfigError: An argument is wrong, or torch is not installed.
        MxError: What a pull fails with, see `pull`.
    """
    check_type("model", model, str, "it is NAME, NAME:REVISION or NAME@PIN")
    if options.get("hold"):
        raise ConfigError("`load` keeps no pull that could give to others", hint="use pull()")
    import mx.memory.tensors  # noqa: F401  # says at once if torch is missing

    with pull(model, **options) as running:
        return running.state_dict()
