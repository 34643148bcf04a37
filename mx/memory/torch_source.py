"""torch's tensors and modules, as arrays. The only module, beside `tensors`, that imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from itertools import repeat
from operator import add, attrgetter, ge, is_, mul
from typing import Any

from mx.core.layout import contiguous_strides
from mx.errors import ConfigError
from mx.memory.allocations import device_of_ordinal
from mx.memory.arrays import Array, adapters, array_of, batch_adapters, span_nbytes
from mx.memory.describe import DescribedTensors, describe_arrays
from mx.memory.extras import torch_missing
from mx.memory.tensors import PAIRS, TORCH_DTYPES
from mx.text import listed

try:
    import torch
    from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
except ModuleNotFoundError as error:
    raise torch_missing(error) from None

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
if PAIRS is not None:
    _NAMES[PAIRS] = "F4"


def torch_array(name: str, tensor: object) -> Array | None:
    """Return a torch tensor as an array; None if it is something else.

    Args:
        name: What errors call it.
        tensor: The tensor. The array's owner is its storage, which keeps the memory.

    Raises:
        ConfigError: Its values are not in memory of its own: it is on the meta device, sparse, a
            conjugated or negated view, or of a subclass that computes its values or keeps them
            elsewhere (DTensor, quantised tensors). Or its storage was freed or made smaller.
    """
    if not isinstance(tensor, torch.Tensor):
        return None
    dtype = _NAMES.get(tensor.dtype)
    if not (
        tensor.device.type in _DEVICES
        and _is_plain(type(tensor))
        and dtype is not None
        and tensor.layout is torch.strided
        and not tensor.is_neg()
        and (dtype != "C64" or not tensor.is_conj())
        and (dtype != "F4" or (tensor.dim() and tensor.is_contiguous()))
    ):
        raise _refusal(name, tensor)
    storage = tensor.untyped_storage()
    shape, stride = _in_elements(dtype, tuple(tensor.shape), tensor.stride())
    array = Array(
        dtype,
        shape,
        stride,
        _key(tensor.device),
        tensor.data_ptr(),
        storage,
        _hold,
        True,
        storage.nbytes(),
    )
    if (
        _end(int(tensor.storage_offset()) * tensor.element_size(), array.span_nbytes)
        > array.owner_nbytes
    ):
        raise ConfigError(
            f"{name} has lost its memory: its storage was freed or resized",
            hint="give it memory again first",
        )
    return array


def torch_arrays(tensors: Sequence[Any]) -> list[Array] | None:
    """Return torch tensors as arrays; None if some are something else, or are refused."""
    if not all(map(_is_tensor, set(map(type, tensors)))):
        return None
    # Whether it is on the CPU takes less time to ask than its device.
    devices = {_CPU} if all(map(_is_cpu, tensors)) else set(map(_device, tensors))
    strided = all(map(is_, map(_layout, tensors), repeat(torch.strided)))
    if len(devices) != 1 or not strided or any(map(_is_neg, tensors)):
        return None
    (device,) = devices
    if device.type not in _DEVICES:
        return None
    forms = zip(map(_dtype, tensors), map(_shape, tensors), map(_stride, tensors), strict=True)
    known = _KnownForms()  # tensors of one form share its objects
    found = list(filter(None, map(known.__getitem__, forms)))
    if len(found) < len(tensors):
        return None
    dtypes, shapes, strides, items, spans = zip(*found, strict=True)
    storages = list(map(torch.Tensor.untyped_storage, tensors))
    sizes = list(map(_nbytes, storages))
    ends = map(add, map(mul, map(_offset, tensors), items), spans)
    if not all(map(ge, sizes, ends)):
        return None  # a storage was freed, or made smaller
    fields = (
        dtypes,
        shapes,
        strides,
        repeat(_key(device)),
        map(_data_ptr, tensors),
        storages,
        repeat(_hold),
        repeat(True),
        sizes,
    )
    return list(map(partial(tuple.__new__, Array), zip(*fields, strict=False)))


_Form = tuple[torch.dtype, torch.Size, tuple[int, ...]]
#: A dtype's name, shape and strides, the bytes of an element and of the span.
_KnownForm = tuple[str, tuple[int, ...], tuple[int, ...], int, int]


class _KnownForms(dict[_Form, _KnownForm | None]):
    """`_known` of each form that was asked for."""

    def __missing__(self, form: _Form) -> _KnownForm | None:
        found = self[form] = _known(*form)
        return found


@lru_cache(4096)
def _known(dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]) -> _KnownForm | None:
    """Return a form as arrays have it, with the bytes of an element and of the span; None for one
    that no checkpoint has, for a complex one, which may be a conjugated view, and for F4."""
    name = _NAMES.get(dtype)
    if name is None or name in ("C64", "F4"):
        return None
    return name, tuple(shape), stride, dtype.itemsize, span_nbytes(name, tuple(shape), stride)


def _in_elements(
    dtype: str, shape: tuple[int, ...], stride: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a shape and strides counted in elements: of F4 torch counts pairs of them."""
    if dtype != "F4":
        return shape, stride
    shape = (*shape[:-1], shape[-1] * 2)
    return shape, contiguous_strides(shape)


def _end(begin: int, nbytes: int) -> int:
    """Return where a tensor ends in its storage. An empty one needs none, wherever it begins."""
    return begin + nbytes if nbytes else 0


_dtype, _shape = attrgetter("dtype"), attrgetter("shape")
_is_cpu, _device = attrgetter("is_cpu"), attrgetter("device")
_layout, _is_neg = attrgetter("layout"), torch.Tensor.is_neg
_stride, _data_ptr = torch.Tensor.stride, torch.Tensor.data_ptr
_nbytes, _offset = torch.UntypedStorage.nbytes, torch.Tensor.storage_offset
#: Where tensors may be.
_DEVICES = ("cpu", "cuda")
_CPU = torch.device("cpu")


@lru_cache(64)
def _key(device: torch.device) -> str:
    """Return "cpu", or "cuda:UUID" of torch's "cuda:N"."""
    return "cpu" if device.type == "cpu" else device_of_ordinal(device.index)


def _hold(tensors: Sequence[Any], arrays: Sequence[Array]) -> bool:
    """See `Array.holds`. Lenders ask this of all their tensors once a second.

    A storage that was resized has another address or another size than the tensor had.
    """
    if not all(map(_is_tensor, set(map(type, tensors)))):
        return False
    dtypes, shapes, strides, _, addresses, storages, _, _, sizes = zip(*arrays, strict=True)
    if not (
        tuple(map(_data_ptr, tensors)) == addresses
        and tuple(map(_nbytes, storages)) == sizes
        and tuple(map(_NAMES.get, map(_dtype, tensors))) == dtypes
    ):
        return False
    if "F4" in dtypes:
        counted = map(_in_elements, dtypes, map(_shape, tensors), map(_stride, tensors))
        return tuple(zip(*counted, strict=True)) == (shapes, strides)
    return (tuple(map(_shape, tensors)), tuple(map(_stride, tensors))) == (shapes, strides)


def _refusal(name: str, tensor: torch.Tensor) -> ConfigError:
    """Return the error for a tensor whose values are not in memory of its own."""
    if not _is_plain(type(tensor)):
        return ConfigError(
            f"{name} is a {type(tensor).__name__}, whose values are not in its own memory",
            hint="give its plain local tensor, or use the checkpoint's folder",
        )
    if tensor.is_meta:
        return ConfigError(
            f"{name} is on the meta device, without memory",
            hint="module.to_empty(device='cpu') allocates it, or the engine's own loader does",
        )
    if tensor.device.type not in _DEVICES:
        return ConfigError(
            f"{name} is on {tensor.device}; this version works with CPU and CUDA tensors",
            hint="move it with .cpu(), or use the checkpoint's folder",
        )
    if tensor.dtype == PAIRS:
        return ConfigError(
            f"{name} is {tensor.dtype}, and its pairs are not in row-major order",
            hint="use .contiguous()",
        )
    if tensor.layout is not torch.strided or tensor.dtype not in _NAMES:
        return ConfigError(f"{name} is {tensor.dtype}, {tensor.layout}: no checkpoint has that")
    return ConfigError(
        f"{name} is a conjugated or negated view: its memory holds other values",
        hint="use .resolve_conj() or .resolve_neg()",
    )


adapters.append(torch_array)
batch_adapters.append(torch_arrays)


def tensors_in(module: torch.nn.Module, *, non_persistent: bool = False) -> dict[str, Any]:
    """Return the parameters and buffers of a module by the names that its state dict has.

    These are the tensors themselves: unlike `state_dict` this runs no hooks, which may copy.

    Args:
        module: The module.
        non_persistent: Whether to return the buffers that a state dict leaves out, too.
    """
    found: dict[str, Any] = {}
    for path, each in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        left_out = () if non_persistent else each._non_persistent_buffers_set
        for name, tensor in (*each._parameters.items(), *each._buffers.items()):
            if tensor is not None and name not in left_out:
                found[prefix + name] = tensor
    return found


def describe(what: Any) -> DescribedTensors:
    """Describe the tensors of a mapping of CPU tensors or a `torch.nn.Module`, to copy them.

    What is not dense, and not within a dense tensor, is copied to row-major order, and so is what
    a conjugated or negated view shows. See `describe_arrays`.

    Args:
        what: The mapping or the module, whose state dict is taken.

    Returns:
        The description. Its arrays keep the tensors' own memory alive.

    Raises:
        ConfigError: `what` is of another type, or a tensor can't be served.
    """
    tensors = what.state_dict() if isinstance(what, torch.nn.Module) else what
    if not isinstance(tensors, Mapping) or not all(isinstance(name, str) for name in tensors):
        raise ConfigError(
            f"cannot serve a {type(what).__name__}",
            hint="give a path, a state dict of tensors, or a torch.nn.Module",
        )
    plain = {name: _resolved(tensor) for name, tensor in tensors.items()}

    def dense(name: str) -> Array:
        tensor = plain[name]
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"{name} has gaps or overlaps", hint="make it contiguous")
        return array_of(name, tensor.detach().contiguous())

    arrays = {name: array_of(name, each) for name, each in plain.items()}
    if there := [name for name, array in arrays.items() if array.device != "cpu"]:
        raise ConfigError(
            f"{listed(there)}: in a GPU's memory, which is not copied",
            hint="lend tensors where they are: `copy=False`",
        )
    return describe_arrays(arrays, dense)


@lru_cache(64)
def _is_plain(kind: type[torch.Tensor]) -> bool:
    """Return True if a class of tensors does not compute their values or keep them elsewhere."""
    own = kind.__torch_dispatch__
    lazy = issubclass(kind, UninitializedParameter | UninitializedBuffer)
    return own is torch.Tensor.__torch_dispatch__ and not lazy


def _is_tensor(kind: type) -> bool:
    """Return True for a class of torch's tensors whose values are in their own memory."""
    return issubclass(kind, torch.Tensor) and _is_plain(kind)


def _resolved(tensor: object) -> object:
    """Return a tensor whose memory holds its values: a copy of a conjugated or negated view."""
    if isinstance(tensor, torch.Tensor) and _is_plain(type(tensor)):
        return tensor.detach().resolve_conj().resolve_neg()
    return tensor
