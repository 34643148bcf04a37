"""The tensors of a caller's module or state dict, as they are at any moment."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

from mx.errors import ConfigError
from mx.memory.in_place import InPlace
from mx.memory.live import Tensors


def is_module(what: object) -> bool:
    """Return True for a `torch.nn.Module`. Does not import torch: who has one has imported it."""
    nn: Any = getattr(sys.modules.get("torch"), "nn", None)  # another thread may import torch
    module: Any = getattr(nn, "Module", None)
    return module is not None and isinstance(what, module)


def live_tensors(what: Any, *, non_persistent: bool = False) -> Tensors:
    """Return a function that returns the tensors of a module or a mapping as they are then.

    Args:
        what: A `torch.nn.Module`, or a mapping of names to tensors. The function refers to it.
        non_persistent: Whether to return the buffers that a module's state dict leaves out, too.

    Raises:
        ConfigError: It is something else.
    """
    if "torch" in sys.modules:  # else no tensor is torch's
        from mx.memory.torch_source import tensors_in

        if is_module(what):
            return lambda: tensors_in(what, non_persistent=non_persistent)
    if isinstance(what, Mapping) and all(issubclass(kind, str) for kind in set(map(type, what))):
        return lambda: what
    raise ConfigError(
        f"cannot take tensors from a {type(what).__name__}",
        hint="give a path, a state dict of tensors, or a torch.nn.Module",
    )


def in_place(what: Any) -> InPlace:
    """Return the tensors of a module or a mapping, to be filled where they are.

    A model may lack the buffers that a module's state dict leaves out.

    Raises:
        ConfigError: `what` is something else, or some tensors have no memory of their own.
    """
    tensors = live_tensors(what, non_persistent=True)
    optional: Collection[str] = ()
    if is_module(what):
        optional = tensors().keys() - live_tensors(what)().keys()
    return InPlace(tensors, optional)
