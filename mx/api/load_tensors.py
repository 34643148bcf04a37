"""Loads a model's tensors in one call: `load`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from mx.api.arguments import PullArguments, takes
from mx.api.common import check_type
from mx.api.pulling import pull
from mx.errors import ConfigError

if TYPE_CHECKING:
    import torch


@takes(PullArguments)
def load(model: str, **arguments: Unpack[PullArguments]) -> dict[str, torch.Tensor]:
    """Pull a model and return its tensors by name, in execution order.

    One line in place of `safetensors.torch.load_file`. Blocks until every layer is verified; a
    notebook shows a bar.

    Args:
        model: NAME, NAME:REVISION or NAME@PIN.
        arguments: Those of `pull`, except `hold`, which needs the `Pull` itself, and
            `files_only`.

    Returns:
        Views that keep their memory alive: the source's memory, mapped privately, where it could
        be attached, else this process's own. Writing to them changes no other process's bytes.

    Raises:
        ConfigError: An argument is wrong, or torch is not installed.
        MxError: The error that ended the pull, see `pull`.
    """
    check_type("model", model, str, "it is NAME, NAME:REVISION or NAME@PIN")
    if arguments.get("hold"):
        raise ConfigError("`load` can't serve the model", hint="call mx.pull with `hold=True`")
    if arguments.get("files_only"):
        raise ConfigError(
            "`files_only` pulls no tensors", hint="mx.pull(...).files() has the files"
        )
    import mx.memory.tensors  # noqa: F401  # fails before the pull if torch is missing

    with pull(model, **arguments) as running:
        running.wait()
        return running.state_dict()
