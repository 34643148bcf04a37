"""Torch tensors as views of an arena, on the host or a GPU: no copy, tied tensors shared."""

from __future__ import annotations

from collections.abc import Iterable

from mx.core.layout import kind_nbytes
from mx.core.types import DTYPE_BITS, Alias, Layout, Tensor
from mx.cuda.device import find_ordinal
from mx.cuda.driver import load
from mx.memory.extras import torch_missing
from mx.transport import DeviceView, View, contiguous
from mx.views import device_of

try:
    import torch
except ModuleNotFoundError as error:
    raise torch_missing(error) from None

#: The safetensors names of dtypes that torch has; other dtypes are returned as bytes. See also
#: `torch_form`.
TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
#: Two elements of F4 in one of torch's, in the last dimension. Older torch has no such dtype.
PAIRS: torch.dtype | None = getattr(torch, "float4_e2m1fn_x2", None)


def torch_form(dtype: str, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and shape that a tensor has in torch, as safetensors.torch gives it; of one
    whose dtype torch lacks uint8, and the number of its packed bytes."""
    if dtype in TORCH_DTYPES:
        return TORCH_DTYPES[dtype], shape
    if dtype == "F4" and PAIRS is not None and shape and shape[-1] % 2 == 0:
        return PAIRS, (*shape[:-1], shape[-1] // 2)
    return torch.uint8, (kind_nbytes((dtype, shape, ())),)


class _CudaArray:
    """Bytes of a GPU under the CUDA array interface (version 3).

    torch takes them without a copy, and keeps this object for as long as it uses the bytes.
    """

    def __init__(self, view: DeviceView) -> None:
        self.view = view
        self.__cuda_array_interface__ = {
            "shape": (len(view),),
            "typestr": "|u1",
            "data": (view.address, False),
            "strides": None,
            "version": 3,
        }


def _on_device(array: _CudaArray, ordinal: int) -> torch.Tensor:
    return torch.as_tensor(array, device=f"cuda:{ordinal}")


def bytes_of(arena: View, offset: int, nbytes: int) -> torch.Tensor:
    """Return `nbytes` (> 0) of `arena` from `offset`, as a uint8 tensor with its own storage."""
    if isinstance(arena, memoryview):
        return torch.frombuffer(arena, dtype=torch.uint8, count=nbytes, offset=offset)
    span = contiguous(arena[offset : offset + nbytes])
    if isinstance(span, memoryview):
        return torch.frombuffer(span, dtype=torch.uint8)
    return _on_device(_CudaArray(span), find_ordinal(load(), span.device))


def _empty(arena: View, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    device = device_of(arena)
    if device != "cpu":
        device = f"cuda:{find_ordinal(load(), device)}"
    return torch.empty(shape, dtype=dtype, device=device)  # whatever the caller's default is


def tensor_view(arena: View, layout: Layout, tensor: Tensor) -> torch.Tensor:
    """Return `tensor` as a view of `arena` (writable host bytes, or a GPU's).

    The view keeps the arena's memory alive, and has the strides that the layout says. Dtypes that
    torch lacks (F6_*) are returned as a 1-D uint8 tensor of their packed bytes.
    """
    offset = layout.layers[tensor.layer].arena_offset + tensor.offset
    dtype, shape = torch_form(tensor.dtype, tensor.shape)
    if tensor.nbytes == 0:
        return _empty(arena, shape, dtype)
    flat = bytes_of(arena, offset, tensor.nbytes).view(dtype)
    return flat.as_strided(shape, tensor.stride) if tensor.stride else flat.view(shape)


def alias_view(target: torch.Tensor, alias: Alias) -> torch.Tensor:
    """Return a tied tensor: the target's memory with the alias's shape, stride and offset."""
    if DTYPE_BITS[alias.dtype] < 8:  # in row-major order
        end = alias.offset_bytes + kind_nbytes((alias.dtype, alias.shape, ()))
        dtype, shape = torch_form(alias.dtype, alias.shape)
        return target.view(torch.uint8).view(-1)[alias.offset_bytes : end].view(dtype).view(shape)
    element_nbytes = target.element_size()
    return target.as_strided(
        alias.shape, alias.stride, target.storage_offset() + alias.offset_bytes // element_nbytes
    )


def state_dict(
    arena: View, layout: Layout, names: Iterable[str] | None = None
) -> dict[str, torch.Tensor]:
    """Return tensors by name, aliases included, in execution order.

    Args:
        arena: Writable bytes in the host, or a GPU's; the tensors keep them alive.
        layout: Where the tensors are in the arena.
        names: The names of the tensors to return; None returns all.
    """
    wanted = None if names is None else set(names)
    aliases = [a for a in layout.aliases if wanted is None or a.name in wanted]
    needed = None if wanted is None else wanted | {a.target for a in aliases}
    found = {
        tensor.name: tensor_view(arena, layout, tensor)
        for tensor in layout.tensors
        if needed is None or tensor.name in needed
    }
    for alias in aliases:
        found[alias.name] = alias_view(found[alias.target], alias)
    return found if wanted is None else {n: t for n, t in found.items() if n in wanted}
