"""Tensors of several libraries as their form and place: what is understood, what is refused."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

import mx.memory.torch_source  # noqa: F401  # torch's tensors are understood once it is imported
from mx.buffers import address_of
from mx.errors import ConfigError
from mx.memory.arrays import BATCH, Array, all_are_now, array_of, arrays_of
from mx.memory.tensors import TORCH_DTYPES


class OnlyDlpack:
    """An object that has nothing but DLPack."""

    def __init__(self, tensor: Any, device: tuple[int, int] | None = None) -> None:
        self._tensor, self._device = tensor, device

    def __dlpack__(self) -> Any:
        return self._tensor.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device or self._tensor.__dlpack_device__()


class OnlyInterface:
    """An object that has nothing but numpy's array interface."""

    def __init__(self, **fields: Any) -> None:
        self.__array_interface__ = fields


def form(array: Array) -> tuple[Any, ...]:
    return array.dtype, array.shape, array.stride, array.device, array.address


@pytest.mark.parametrize("name", sorted(TORCH_DTYPES))
def test_every_dtype_of_torch(name: str) -> None:
    tensor = torch.zeros(3, 4, dtype=torch.uint8).to(TORCH_DTYPES[name])
    array = array_of("w", tensor.t())
    assert form(array) == (name, (4, 3), (1, 4), "cpu", tensor.data_ptr())
    assert array.span_nbytes == tensor.nbytes == array.item_nbytes * 12
    assert array.order == (1, 4)
    assert array.writable


def test_a_view_of_torch_has_its_storage_and_its_own_place() -> None:
    whole = torch.arange(40, dtype=torch.int32)
    part = whole[8:32].view(4, 6)[:, 1:5]
    array = array_of("w", part)
    assert form(array) == ("I32", (4, 4), (6, 1), "cpu", whole.data_ptr() + 36)
    assert array.span_nbytes == 4 * (3 * 6 + 3 + 1)
    assert array.order is None
    dense = array_of("w", whole[8:16])
    assert bytes(dense.view()) == whole[8:16].numpy().tobytes()  # type: ignore[arg-type]


def test_views_keep_the_memory_of_what_they_view() -> None:
    class Owned(np.ndarray):
        pass

    tensor = np.arange(1000, dtype=np.int64).view(Owned)
    left = weakref.ref(tensor)
    view = array_of("w", tensor).view()[8:16]
    del tensor
    gc.collect()
    assert left() is not None
    assert bytes(view) == (1).to_bytes(8, "little")  # type: ignore[arg-type]
    del view
    gc.collect()
    assert left() is None


def test_torch_keeps_a_storage_that_is_lent() -> None:
    tensor = torch.arange(1 << 16, dtype=torch.uint8)
    array = array_of("w", tensor)
    expected = tensor.numpy().tobytes()
    view = array.view()
    del tensor, array
    gc.collect()
    noise = [torch.full((1 << 16,), 0xEE, dtype=torch.uint8) for _ in range(8)]
    assert bytes(view) == expected  # type: ignore[arg-type]
    del noise


@pytest.mark.parametrize("dtype", ["b1", "u1", "i2", "u2", "f2", "i4", "f4", "c8", "f8", "i8"])
def test_arrays_of_numpy(dtype: str) -> None:
    tensor = np.zeros((5, 3), dtype)
    here = tensor.__array_interface__["data"][0]
    names = {"b1": "BOOL", "u1": "U8", "i2": "I16", "u2": "U16", "f2": "F16", "i4": "I32"}
    names |= {"f4": "F32", "c8": "C64", "f8": "F64", "i8": "I64"}
    assert form(array_of("w", tensor)) == (names[dtype], (5, 3), (3, 1), "cpu", here)
    assert form(array_of("w", tensor.T)) == (names[dtype], (3, 5), (1, 3), "cpu", here)
    part = array_of("w", tensor[::2])
    assert part.stride == (6, 1) and part.order is None
    assert array_of("w", tensor[0, 1, ...]).shape == ()


def test_numpy_says_what_may_not_be_written() -> None:
    tensor = np.zeros(4)
    assert array_of("w", tensor).writable
    tensor.flags.writeable = False
    assert not array_of("w", tensor).writable
    assert not array_of("w", np.frombuffer(b"12345678", np.int64)).writable


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(12, dtype=torch.bfloat16).view(3, 4).t(), np.arange(12.0).reshape(3, 4)[1:]],
)
def test_dlpack_alone_is_enough(tensor: Any) -> None:
    array, plain = array_of("w", OnlyDlpack(tensor)), array_of("w", tensor)
    assert form(array) == form(plain)
    assert address_of(array.view()) == plain.address  # type: ignore[arg-type]
    assert array_of("w", OnlyDlpack(tensor[:0])).span_nbytes == 0


def test_an_interface_without_a_dtype_yields_to_dlpack() -> None:
    """torch says "<V2" of bfloat16 in GPU memory."""
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    both = OnlyDlpack(tensor)
    fields = {"typestr": "<V2", "shape": (2, 3), "data": (tensor.data_ptr(), False), "version": 3}
    both.__cuda_array_interface__ = fields  # type: ignore[attr-defined]
    found = array_of("w", both)
    assert (found.dtype, found.shape, found.address) == ("BF16", (2, 3), tensor.data_ptr())


def test_dlpack_keeps_the_memory_until_the_array_goes() -> None:
    class Owned(np.ndarray):
        pass

    memory = np.arange(8, dtype=np.uint8).view(Owned)
    left = weakref.ref(memory)
    array = array_of("w", OnlyDlpack(memory))
    del memory
    gc.collect()
    assert bytes(array.view()) == bytes(range(8))  # type: ignore[arg-type]
    del array
    gc.collect()
    assert left() is None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, dtype=torch.complex128),
        np.zeros(2, "c16"),
        np.zeros(2, ">f4"),
        np.zeros(2, "M8[s]"),
        np.zeros(2, [("a", "f4"), ("b", "i4")]),
        OnlyDlpack(torch.zeros(2, dtype=torch.complex128)),
        np.zeros(2, object),
    ],
    ids=lambda each: f"{type(each).__name__} {getattr(each, 'dtype', '')}",
)
def test_dtypes_that_no_checkpoint_has(tensor: Any) -> None:
    with pytest.raises(ConfigError, match=r"^w (is|has).*no checkpoint has"):
        array_of("w", tensor)


def quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


class Computed(torch.Tensor):
    """As DTensor and others: its values are not where its memory is."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.zeros(2, device="meta"), "to_empty"),
        (lambda: torch.zeros(2, 2).to_sparse(), "sparse"),
        (lambda: torch.zeros(2, dtype=torch.complex64).conj(), "resolve_conj"),
        (lambda: torch.zeros(2, dtype=torch.complex64).conj().imag, "resolve_neg"),
        (lambda: torch.zeros(2).as_subclass(Computed), "Computed"),
        (quantised, "qint8"),
        (torch.nn.parameter.UninitializedParameter, "UninitializedParameter"),
        (lambda: [1.0, 2.0], "not a tensor"),
        (lambda: None, "not a tensor"),
        (lambda: np.float32(1.0), "not a tensor"),  # its address is that of a temporary copy
        (lambda: np.zeros(4)[::-1], "strides"),
        (lambda: np.zeros((2, 3, 2), "i4")[:, ::-1], "strides"),
        (lambda: np.zeros(2, [("a", "f4"), ("b", "i1")])["a"], "strides"),
        (lambda: OnlyDlpack(np.zeros(4)[::-1]), "strides"),
        (lambda: OnlyDlpack(np.frombuffer(b"12345678", np.int64)), "readonly"),
        (lambda: OnlyDlpack(np.zeros(4), (12, 0)), "device"),
        (lambda: OnlyInterface(shape=(2,), typestr="<f4", version=3), "its memory"),
    ],
)
def test_what_is_no_plain_memory_is_refused_by_name(make: Any, why: str) -> None:
    with pytest.warns(UserWarning) if make is quantised else contextlib.nullcontext():
        tensor = make()
    with pytest.raises(ConfigError, match="^layer.w ") as caught:
        arrays_of({"layer.w": tensor})
    error = caught.value
    assert why in f"{error.message} {error.hint}"


def test_parameters_and_plain_subclasses_are_tensors() -> None:
    class Named(torch.Tensor):
        pass

    plain = torch.zeros(3)
    for tensor in (torch.nn.Parameter(plain), plain.as_subclass(Named)):
        assert array_of("w", tensor).address == plain.data_ptr()


def test_empty_tensors_have_no_span() -> None:
    for tensor in (torch.zeros(0, 3), np.zeros((3, 0)), torch.zeros(4)[4:]):
        array = array_of("w", tensor)
        assert array.span_nbytes == 0 and len(array.view()) == 0


def test_is_now_tells_whether_a_tensor_is_where_it_was() -> None:
    tensor = torch.zeros(4, 4)
    array = array_of("w", tensor)
    assert array.is_now("w", tensor)
    for other in (tensor.t(), tensor.view(2, 8), tensor.clone(), tensor.view(torch.int32)):
        assert not array.is_now("w", other)
    tensor.untyped_storage().resize_(8)
    assert not array.is_now("w", tensor)


def test_many_tensors_are_looked_at_as_each_by_itself() -> None:
    tensors: dict[str, Any] = {
        f"{i}": torch.zeros(1 + i % 7, 3, dtype=(torch.float32, torch.bfloat16)[i % 2])
        for i in range(2 * BATCH + 5)
    }
    tensors["numpy"] = np.zeros((2, 2), np.int8)
    tensors["complex"] = torch.zeros(2, dtype=torch.complex64)
    tensors["turned"] = tensors["3"].t()
    found = arrays_of(tensors)
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        one = array_of(name, tensor)
        assert found[name]._replace(owner=None) == one._replace(owner=None)
    assert not all_are_now(found, tensors)  # numpy's have to be compared one by one
    del tensors["numpy"], found["numpy"]
    assert all_are_now(found, tensors)
    assert not all_are_now(found, {name: tensors[name] for name in list(tensors)[1:]})
    for changed in (tensors["3"].clone(), tensors["3"].t(), np.zeros(2), None):
        assert not all_are_now(found, {**tensors, "3": changed})
    tensors["300"].untyped_storage().resize_(0)
    assert not all_are_now(found, tensors)
    assert all_are_now({}, tensors)


def test_the_error_of_one_of_many_tensors_names_it() -> None:
    tensors = {f"{i}": torch.zeros(2) for i in range(BATCH + 3)}
    tensors["meta"] = torch.zeros(2, device="meta")
    with pytest.raises(ConfigError, match="^meta is on the meta device"):
        arrays_of(tensors)
