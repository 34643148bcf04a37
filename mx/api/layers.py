"""The tensors of one layer of a pull."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Protocol

from mx.core.types import Layout
from mx.target.report import TensorsOf, no_tensors
from mx.transport import Span

if TYPE_CHECKING:
    import torch


class _Pull(Protocol):
    def layer_state_dict(self, layer: int) -> dict[str, torch.Tensor]: ...


def layer_tensors(view: Span, layout: Layout, layer: int) -> dict[str, torch.Tensor]:
    """Return a layer's tensors, and the tensors tied to them, as views of an arena.

    Args:
        view: The arena's memory; the tensors keep it alive.
        layout: Where the tensors are in it.
        layer: The layer's index.

    Raises:
        ConfigError: torch is not installed.
    """
    from mx.memory.tensors import state_dict

    names = {tensor.name for tensor in layout.tensors if tensor.layer == layer}
    ties = {alias.name for alias in layout.aliases if alias.target in names}
    return state_dict(view, layout, names | ties)


def tensors_of(pull: weakref.ref[_Pull]) -> TensorsOf:
    """Return the function by which a layer's event finds its tensors.

    It refers to the pull weakly, so that an event does not keep the pull's memory.
    """

    def of_layer(layer: int) -> dict[str, torch.Tensor]:
        found = pull()
        return no_tensors(layer) if found is None else found.layer_state_dict(layer)

    return of_layer
