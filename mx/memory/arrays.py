"""Tensors of any library as their form and their place in memory.

torch's tensors are understood, and objects that have `__cuda_array_interface__`,
`__array_interface__` or DLPack (numpy, CuPy, JAX and others): none of these libraries is imported.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

from mx.buffers import memory_at
from mx.core.layout import contiguous_strides, permuted_stride
from mx.core.types import DTYPE_BITS, Layout
from mx.errors import ConfigError
from mx.memory.allocations import LEGACY_STREAM, Allocations, device_of_ordinal, wait_for_owner
from mx.memory.collector import paused
from mx.views import DeviceView, Span, TensorView, View, contiguous

#: What numpy's array interface calls the dtypes of safetensors.
TYPESTRS = {
    "|b1": "BOOL",
    "|u1": "U8",
    "|i1": "I8",
    "<i2": "I16",
    "<u2": "U16",
    "<f2": "F16",
    "<i4": "I32",
    "<u4": "U32",
    "<f4": "F32",
    "<c8": "C64",
    "<f8": "F64",
    "<i8": "I64",
    "<u8": "U64",
}
#: DLPack's (type code, bits): int, uint, float, bfloat, complex, bool, and floats of 8 bits.
DLPACK_TYPES = {
    (0, 8): "I8",
    (0, 16): "I16",
    (0, 32): "I32",
    (0, 64): "I64",
    (1, 8): "U8",
    (1, 16): "U16",
    (1, 32): "U32",
    (1, 64): "U64",
    (2, 16): "F16",
    (2, 32): "F32",
    (2, 64): "F64",
    (4, 16): "BF16",
    (5, 64): "C64",
    (6, 8): "BOOL",
    (10, 8): "F8_E4M3",
    (12, 8): "F8_E5M2",
    (14, 8): "F8_E8M0",
}
_DLPACK_CPU, _DLPACK_CUDA = 1, 2


#: Understand the tensors of a library, and return None for others. `mx.memory.torch_source` adds
#: torch's, so that this module need not import it.
adapters: list[Callable[[str, object], Array | None]] = []
#: The same for many tensors at once, in columns, which takes less time for each. A function returns
#: None where some are none of its library, or are refused: `array_of` each one says why.
batch_adapters: list[Callable[[Sequence[Any]], list[Array] | None]] = []
#: How many are looked at at once: few enough that they stay in the processor's cache.
BATCH = 256


class Array(NamedTuple):
    """A tensor's form, and where its elements are.

    `dtype` is as safetensors spells it, `stride` in elements, `device` "cpu" or "cuda:UUID".
    `address` is that of the first element. `owner` keeps the memory.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str
    address: int
    owner: object
    #: Returns whether tensors have the forms and the memory of arrays; None: each is compared.
    holds: Callable[[Sequence[Any], Sequence[Array]], bool] | None = None
    writable: bool = True
    #: The size of `owner` where that is a storage, which may be resized.
    owner_nbytes: int = 0

    @property
    def item_nbytes(self) -> int:
        return max(1, DTYPE_BITS[self.dtype] // 8)

    @property
    def span_nbytes(self) -> int:
        """The bytes from the start of the first to the end of the last element."""
        return span_nbytes(self.dtype, self.shape, self.stride)

    @property
    def order(self) -> tuple[int, ...] | None:
        """The strides as a `TensorSpec` has them: () for row-major, None if not dense."""
        return _order(self.shape, self.stride)

    def view(self) -> Span:
        """Return the memory from the first to the last element: for a dense tensor, its bytes in
        storage order. The view keeps `owner`."""
        if self.device != "cpu":
            return DeviceView(self.device, self.address, self.span_nbytes, self.owner)
        return memory_at(self.address, self.span_nbytes, self.owner)

    def is_now(self, name: str, tensor: object, places: Allocations | None = None) -> bool:
        """Return True if a tensor has this form and this memory, all of which is still there.

        Args:
            name: What errors call the tensor.
            tensor: As for `array_of`, which raises what this raises.
            places: As for `array_of`.
        """
        if self.holds is not None:
            return self.holds((tensor,), (self,))
        now = array_of(name, tensor, places)
        return (self.address, self.shape, self.stride, self.dtype, self.device) == (
            (now.address, now.shape, now.stride, now.dtype, now.device)
        )


# Models have many tensors and few forms.
_order = lru_cache(4096)(permuted_stride)


@lru_cache(4096)
def span_nbytes(dtype: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return the bytes from the start of the first to the end of the last element."""
    if 0 in shape:
        return 0
    last = sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    return (last + 1) * DTYPE_BITS[dtype] // 8


def layer_views(layer: int, layout: Layout, arena: View) -> dict[str, TensorView]:
    """Return a layer's tensors by name, and those that are tied to them, as views of an arena that
    is laid out so. They keep it."""
    memory, found = arena if isinstance(arena, DeviceView) else arena.toreadonly(), {}
    where = layout.layers[layer]
    for each in layout.tensors[where.first_tensor :][: len(where.extents)]:
        begin = where.arena_offset + each.offset
        view = contiguous(memory[begin : begin + each.nbytes])
        stride = each.stride or contiguous_strides(each.shape)
        found[each.name] = TensorView(each.dtype, each.shape, stride, view)
    for tied in layout.aliases:
        if tied.target in found:
            end = tied.offset_bytes + span_nbytes(tied.dtype, tied.shape, tied.stride)
            view = found[tied.target].view[tied.offset_bytes : end]
            found[tied.name] = TensorView(tied.dtype, tied.shape, tied.stride, view)
    return found


def array_of(name: str, tensor: object, places: Allocations | None = None) -> Array:
    """Return the form and the place of a tensor.

    Args:
        name: What errors call it.
        tensor: A torch tensor, or an object with one of the interfaces above.
        places: Finds GPUs; None: one for this tensor alone.

    Raises:
        ConfigError: It is none of these, has a dtype that no checkpoint has, or is a tensor whose
            values are not in memory of its own.
    """
    for library in adapters:
        found = library(name, tensor)
        if found is not None:
            return found
    for attribute, adapt in (
        ("__cuda_array_interface__", _of_interface),
        ("__array_interface__", _of_interface),
        ("__dlpack__", _of_dlpack),
    ):
        if not hasattr(tensor, attribute) or _is_numpy_scalar(tensor):
            continue
        if attribute == "__cuda_array_interface__" and _is_opaque(tensor):
            continue
        if places is not None:
            return adapt(name, tensor, attribute, places)
        with Allocations() as places:
            return adapt(name, tensor, attribute, places)
    raise ConfigError(
        f"{name} is a {type(tensor).__name__}, not a tensor",
        hint="give tensors of torch or numpy, or others with DLPack",
    )


def arrays_of(tensors: Mapping[str, object]) -> dict[str, Array]:
    """Return `array_of` each tensor, by name. Raises ConfigError."""
    found, errors = arrays_and_errors(tensors)
    for error in errors.values():
        raise error
    return found


@paused()
def arrays_and_errors(
    tensors: Mapping[str, object],
) -> tuple[dict[str, Array], dict[str, ConfigError]]:
    """Return `array_of` each tensor, by name, and the errors of those that have none."""
    found: dict[str, Array] = {}
    errors: dict[str, ConfigError] = {}
    names, every = list(tensors), list(tensors.values())
    with Allocations() as places:
        for at in range(0, len(names), BATCH):
            some, values = names[at : at + BATCH], every[at : at + BATCH]
            for library in batch_adapters:
                arrays = library(values)
                if arrays is not None:
                    found.update(zip(some, arrays, strict=True))
                    break
            else:
                for name, tensor in zip(some, values, strict=True):
                    try:
                        found[name] = array_of(name, tensor, places)
                    except ConfigError as error:
                        errors[name] = error.with_traceback(None)  # it would refer to the tensors
    return found, errors


def all_are_now(arrays: Mapping[str, Array], tensors: Mapping[str, object]) -> bool:
    """Return True if `Array.is_now` is surely true of each tensor; False if it may not be."""
    names, every = list(arrays), list(arrays.values())
    holds = set(map(attrgetter("holds"), every))
    check = holds.pop() if len(holds) == 1 else None
    if check is None:
        return not every
    try:
        # To look each name up takes a tenth of the time that the tensors do.
        same = list(tensors) == names
        now = list(tensors.values()) if same else list(map(tensors.__getitem__, names))
        for at in range(0, len(names), BATCH):
            if not check(now[at : at + BATCH], every[at : at + BATCH]):
                return False
    except (KeyError, RuntimeError):  # torch's, of a tensor that has no memory any more
        return False
    return True


def _is_numpy_scalar(tensor: object) -> bool:
    """Return True for a scalar such as `numpy.float32(1)`: the address that its array interface
    gives is that of a temporary copy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(tensor, numpy.generic)


def _is_opaque(tensor: Any) -> bool:
    """Return True if DLPack says more of a tensor: bfloat16 and float8 have no typestr, and torch's
    interface says "<V2" of them."""
    return hasattr(tensor, "__dlpack__") and tensor.__cuda_array_interface__["typestr"][1:2] == "V"


def _of_interface(name: str, tensor: Any, attribute: str, places: Allocations) -> Array:
    fields = getattr(tensor, attribute)
    dtype = TYPESTRS.get(fields["typestr"].replace("=", "<"))
    if dtype is None or fields.get("mask") is not None:
        raise ConfigError(f"{name} has the type {fields['typestr']}, which no checkpoint has")
    if not isinstance(fields.get("data"), tuple):
        raise ConfigError(f"{name} does not say where its memory is")
    shape, (address, read_only) = tuple(fields["shape"]), fields["data"]
    item_nbytes = DTYPE_BITS[dtype] // 8
    strides = fields.get("strides")
    if strides is None:
        stride = contiguous_strides(shape)
    elif any(s % item_nbytes for s in strides):
        raise ConfigError(f"{name} has strides that are not whole elements")
    else:
        stride = tuple(s // item_nbytes for s in strides)
    if attribute == "__array_interface__" or 0 in shape:  # an empty one has no address
        return _made(name, dtype, shape, stride, "cpu", address, tensor, writable=not read_only)
    device = places.device_at(name, address)
    return _made(name, dtype, shape, stride, device, address, tensor, writable=not read_only)


def _made(
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    device: str,
    address: int,
    owner: object,
    *,
    writable: bool = True,
) -> Array:
    if any(s < 0 for s in stride):
        raise ConfigError(f"{name} has negative strides", hint="give a contiguous copy")
    return Array(dtype, shape, stride, device, address, owner, None, writable)


class DLTensor(ctypes.Structure):
    """DLTensor of dlpack.h, unchanged since version 0.2."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_capsule_pointer.restype = ctypes.c_void_p


def _of_dlpack(name: str, tensor: Any, attribute: str, places: Allocations) -> Array:
    kind, ordinal = tensor.__dlpack_device__()
    if kind not in (_DLPACK_CPU, _DLPACK_CUDA):
        raise ConfigError(f"{name} is on a device of DLPack's type {kind}: only CPUs and CUDA are")
    # The capsule stays unconsumed: it keeps the tensor's memory, and frees it when it goes.
    try:
        # -1: no stream is to wait for the tensor's; `wait_for_owners` does, before bytes are read.
        capsule = tensor.__dlpack__() if kind == _DLPACK_CPU else tensor.__dlpack__(stream=-1)
    except BufferError as error:  # as of a read-only array
        raise ConfigError(f"{name} is not given by its library: {error}") from error
    found = DLTensor.from_address(_capsule_pointer(capsule, b"dltensor") or 0)
    dtype = DLPACK_TYPES.get((found.code, found.bits)) if found.lanes == 1 else None
    if dtype is None:
        raise ConfigError(f"{name} has a type that no checkpoint has")
    shape = tuple(found.shape[i] for i in range(found.ndim))
    stride = (
        tuple(found.strides[i] for i in range(found.ndim))
        if found.strides
        else contiguous_strides(shape)
    )
    address = (found.data or 0) + found.byte_offset
    device = "cpu" if kind == _DLPACK_CPU else device_of_ordinal(ordinal)
    return _made(name, dtype, shape, stride, device, address, (tensor, capsule))


def wait_for_owners(arrays: Mapping[str, Array], tensors: Mapping[str, object]) -> None:
    """Wait until what was queued for tensors in GPU memory by their owner is done. Blocks.

    That is work on default streams, on other streams that are not non-blocking, and on those that
    the tensors' interfaces name or, with DLPack, wait for. For other work the owner has to wait.

    Args:
        arrays: The tensors, as they were described.
        tensors: The same, as they are now.

    Raises:
        CudaError: That work has failed.
    """
    streams: dict[str, set[int]] = {}
    for name, array in arrays.items():
        if array.device == "cpu" or 0 in array.shape:
            continue
        named = streams.setdefault(array.device, set())
        tensor: Any = tensors.get(name)
        if _is_torch(tensor):  # even to ask for its interface raises, as where it requires grad
            continue
        if hasattr(tensor, "__cuda_array_interface__"):
            named.update({tensor.__cuda_array_interface__.get("stream")} - {None})
        elif hasattr(tensor, "__dlpack__"):
            tensor.__dlpack__(stream=LEGACY_STREAM)  # which waits for the tensor's from now on
    for device, named in streams.items():
        wait_for_owner(device, named)


def _is_torch(tensor: object) -> bool:
    """Return True for torch's tensors, whose interface names no stream, takes long to make, and
    exists neither for those that require grad nor for those of float8."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)
