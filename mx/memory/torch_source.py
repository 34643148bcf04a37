"""Reads a state dict or a module: its tensors, which of them share memory, and their bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mx.core.manifest import TensorSpec
from mx.core.types import Alias
from mx.errors import ConfigError
from mx.memory.extras import torch_missing
from mx.memory.tensors import TORCH_DTYPES

try:
    import torch
    from torch.nn.parameter import is_lazy
except ModuleNotFoundError as error:
    raise torch_missing(error) from None

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def _span_nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the start of the first to the end of the last element."""
    if tensor.numel() == 0:
        return 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return int((last + 1) * tensor.element_size())


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as a view of memory that holds its values as they are.

    A conjugated or negated view is copied, since its memory holds other values. A subclass that
    computes its values or keeps them elsewhere is refused with ConfigError.
    """
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or is_lazy(tensor):
        raise ConfigError(
            f"{name} is a {type(tensor).__name__}, whose values are not in its own memory",
            hint="make a plain tensor of it, or serve the checkpoint's folder",
        )
    _dtype_name(name, tensor)
    return tensor.detach().resolve_conj().resolve_neg()


def _dtype_name(name: str, tensor: torch.Tensor) -> str:
    if tensor.device.type != "cpu":
        raise ConfigError(
            f"{name} is on {tensor.device}; this version serves CPU tensors",
            hint="move it with .cpu(), or serve the checkpoint's folder",
        )
    if tensor.layout is not torch.strided or tensor.dtype not in _NAMES:
        raise ConfigError(f"{name} is {tensor.dtype}, {tensor.layout}: it cannot be served")
    return _NAMES[tensor.dtype]


def describe(
    what: Any,
) -> tuple[list[TensorSpec], list[Alias], dict[str, memoryview]]:
    """Describe the tensors of a mapping of CPU tensors or a `torch.nn.Module`.

    A tensor that lies within a contiguous tensor's memory and has its dtype becomes an alias.

    Args:
        what: The mapping or the module.

    Returns:
        The specs, the aliases, and the bytes by name. The byte views refer to the tensors' own
        memory and keep it alive; only a tensor that is not contiguous, or is a conjugated or
        negated view, is copied.

    Raises:
        ConfigError: `what` is of another type, or a tensor can't be served.
    """
    if isinstance(what, torch.nn.Module):
        what = what.state_dict()
    if not isinstance(what, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in what.items()
    ):
        raise ConfigError(
            f"cannot serve a {type(what).__name__}",
            hint="give a path, a state dict of tensors, or a torch.nn.Module",
        )
    tensors: dict[str, torch.Tensor] = {name: _plain(name, t) for name, t in what.items()}
    specs: list[TensorSpec] = []
    aliases: list[Alias] = []
    views: dict[str, memoryview] = {}
    owners: dict[int, list[tuple[int, int, str, torch.Tensor]]] = {}
    # Contiguous before strided and large before small, so that an alias always comes after its
    # owner; then by name, so that one model always gives one identity.
    order = sorted(
        tensors, key=lambda n: (not tensors[n].is_contiguous(), -_span_nbytes(tensors[n]), n)
    )
    for name in order:
        tensor = tensors[name]
        dtype = _dtype_name(name, tensor)
        start, nbytes = tensor.data_ptr(), _span_nbytes(tensor)
        storage = tensor.untyped_storage().data_ptr()
        owner = next(
            (
                (o_start, o_name)
                for o_start, o_end, o_name, o_tensor in owners.get(storage, ())
                if nbytes
                and o_tensor.dtype == tensor.dtype
                and o_start <= start
                and start + nbytes <= o_end
                and (start - o_start) % tensor.element_size() == 0
            ),
            None,
        )
        if owner is not None:
            aliases.append(
                Alias(
                    name,
                    owner[1],
                    dtype,
                    tuple(tensor.shape),
                    start - owner[0],
                    tuple(tensor.stride()),
                )
            )
            continue
        if tensor.is_contiguous() and nbytes:
            owners.setdefault(storage, []).append((start, start + nbytes, name, tensor))
        specs.append(TensorSpec(name, dtype, tuple(tensor.shape)))
        flat = tensor.contiguous().reshape(-1)
        data = flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
        views[name] = memoryview(data.numpy().data)
    return specs, aliases, views
