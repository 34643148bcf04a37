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
    """Return a layer's tensors and all that are tied to them, as views of an arena.

    Raises:
        ConfigError: torch is not installed.
    """
    from mx.memory.tensors import state_dict

    names = {tensor.name for tensor in layout.tensors if tensor.layer == layer}
    ties = {alias.name for alias in layout.aliases if alias.target in names}
    return state_dict(view, layout, names | ties)


def tensors_of(pull: weakref.ref[_Pull]) -> TensorsOf:
    """Return what a layer's event gives its tensors by. The event does not keep the pull."""

    def of_layer(layer: int) -> dict[str, torch.Tensor]:
        found = pull()
        return no_tensors(layer) if found is None else found.layer_state_dict(layer)

    return of_layer
