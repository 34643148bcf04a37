"""Reads a state dict or a module: its tensors, which of them share memory, and their bytes."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from typing import Any

from mx.core.layout import TensorSpec, contiguous_strides, permuted_stride
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

#: The first byte, the end and the name of each tensor with bytes of its own, ascending. None lies
#: within another one, so the ends ascend too.
_Owners = list[tuple[int, int, str]]


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


def _stride(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return a dense tensor's strides as its spec has them, () for row-major; None for others."""
    return permuted_stride(tensor.shape, tensor.stride())


def _span_nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the start of the first to the end of the last element."""
    if tensor.numel() == 0:
        return 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return int((last + 1) * tensor.element_size())


def _alias_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return a view's strides with one spelling for all that view the same elements.

    The stride of a dimension with one element means nothing, and differs with how torch made it.
    """
    dense = permuted_stride(shape, stride)
    if dense is not None:
        return dense or contiguous_strides(shape)
    return tuple(s if n > 1 else 1 for n, s in zip(shape, stride, strict=True))


def _owner(owners: _Owners, start: int, end: int) -> tuple[int, int, str] | None:
    """Return the owner that bytes [start, end) lie within."""
    # The last to begin by `start` is the last to end, too: if it does not hold them, none does.
    at = bisect_right(owners, start, key=lambda owner: owner[0])
    return owners[at - 1] if at and owners[at - 1][1] >= end else None


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a dense tensor's memory, in storage order."""
    if tensor.numel() == 0:
        return memoryview(b"")
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy().data)


def describe(
    what: Any,
) -> tuple[list[TensorSpec], list[Alias], dict[str, memoryview]]:
    """Describe the tensors of a mapping of CPU tensors or a `torch.nn.Module`.

    A dense tensor, whatever the order of its dimensions (a transposed weight, channels last), is
    described in storage order: its bytes are its memory, its strides are in its spec. Any view that
    lies within the memory of a dense tensor and has its dtype is an alias of that one, be it a
    slice, a transpose or an expanded view. What is neither (a slice with gaps, or an expanded view,
    of memory that no dense tensor here covers) is copied to row-major order: its source copies all
    tensors anyway. One that lends its memory where it is has to refuse such a tensor instead.

    The same tensors, sharing memory in the same way, have the same description whatever their order
    in the mapping.

    Args:
        what: The mapping or the module.

    Returns:
        The specs, the aliases, and the bytes by name. The byte views refer to the tensors' own
        memory and keep it alive; only a tensor with gaps or overlaps that is no alias, or a
        conjugated or negated view, is copied.

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
    strides = {name: _stride(tensor) for name, tensor in tensors.items()}
    specs: list[TensorSpec] = []
    aliases: list[Alias] = []
    views: dict[str, memoryview] = {}
    # By storage, dtype, and the place of elements in memory.
    owners_of: dict[tuple[int, torch.dtype, int], _Owners] = {}
    # Dense before others and large before small, so that an alias always comes after its owner. Of
    # dense ones that share all their memory a row-major one is the owner, since checkpoints hold
    # that order. Then by name, so that one model always gives one identity.
    order = sorted(
        tensors,
        key=lambda n: (strides[n] is None, -_span_nbytes(tensors[n]), bool(strides[n]), n),
    )
    for name in order:
        tensor, stride = tensors[name], strides[name]
        dtype, shape = _dtype_name(name, tensor), tuple(tensor.shape)
        start, nbytes = tensor.data_ptr(), _span_nbytes(tensor)
        storage = tensor.untyped_storage().data_ptr()
        key = (storage, tensor.dtype, start % tensor.element_size())
        owners = owners_of.setdefault(key, [])
        owner = _owner(owners, start, start + nbytes) if nbytes else None
        if owner is not None:
            view_stride = _alias_stride(shape, tensor.stride())
            aliases.append(Alias(name, owner[2], dtype, shape, start - owner[0], view_stride))
            continue
        if stride is None:
            tensor, stride = tensor.contiguous(), ()
        elif nbytes:
            insort(owners, (start, start + nbytes, name))
        specs.append(TensorSpec(name, dtype, shape, stride))
        views[name] = _bytes_of(tensor)
    return specs, aliases, views
