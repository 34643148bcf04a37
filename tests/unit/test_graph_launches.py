"""The parameters of a launch that are packed, as cuBLAS packs them."""

import ctypes

import pytest

from mx.graphs.calls import _packed

POINTER, SIZE, END = 1, 2, 0


@pytest.mark.parametrize("order", [(POINTER, SIZE), (SIZE, POINTER)])
def test_packed_parameters_are_read_in_either_order(order: tuple[int, int]) -> None:
    values = ctypes.create_string_buffer(bytes(range(40)), 40)
    size = ctypes.c_size_t(37)
    found = {POINTER: ctypes.addressof(values), SIZE: ctypes.addressof(size)}
    words = [word for name in order for word in (name, found[name])]
    extra = (ctypes.c_uint64 * 5)(*words, END)
    assert _packed(ctypes.addressof(extra)) == bytes(range(37))


@pytest.mark.parametrize("name", [POINTER, SIZE])
def test_what_is_not_packed_is_empty(name: int) -> None:
    assert _packed(0) == b""
    size = ctypes.c_size_t(8)
    extra = (ctypes.c_uint64 * 5)(name, ctypes.addressof(size), END, 0, 0)
    assert _packed(ctypes.addressof(extra)) == b""
