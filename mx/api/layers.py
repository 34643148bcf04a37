"""The tensors of one layer of a pull."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Protocol

from mx.core.types import Layout
from mx.memory.in_place import InPlace
from mx.target.report import TensorsOf, no_tensors
from mx.transport import View, contiguous

if TYPE_CHECKING:
    import torch


class _Pull(Protocol):
    def layer_state_dict(self, layer: int) -> dict[str, torch.Tensor]: ...


def tensors_in(
    view: View, layout: Layout, into: object = None, layer: int | None = None
) -> dict[str, torch.Tensor]:
    """Return the tensors of a model, or those of one layer and the tensors tied to them.

    Args:
        view: The arena's memory; the tensors are views of it, and keep it alive.
        layout: Where the tensors are in it.
        into: What the caller gave to be filled: of a module or a state dict the tensors themselves
            are returned.
        layer: The layer's index; None: all.

    Raises:
        ConfigError: torch is not installed.
    """
    names = {t.name for t in layout.tensors if layer is None or t.layer == layer}
    names |= {alias.name for alias in layout.aliases if alias.target in names}
    if isinstance(into, InPlace):
        every = [t.name for t in layout.tensors] + [alias.name for alias in layout.aliases]
        return into.tensors(name for name in every if name in names)
    from mx.memory.tensors import state_dict

    return state_dict(contiguous(view), layout, names)


def tensors_of(pull: weakref.ref[_Pull]) -> TensorsOf:
    """Return the function by which a layer's event finds its tensors.

    It refers to the pull weakly, so that an event does not keep the pull's memory.
    """

    def of_layer(layer: int) -> dict[str, torch.Tensor]:
        found = pull()
        return no_tensors(layer) if found is None else found.layer_state_dict(layer)

    return of_layer
