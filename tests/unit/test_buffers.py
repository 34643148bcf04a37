"""Addresses of byte views, and copies between them."""

from __future__ import annotations

import gc
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.buffers import address_of, copy_bytes


def test_address_of_read_only_and_empty_views() -> None:
    data = b"abcdef"
    view = memoryview(data)
    assert address_of(view[2:]) == address_of(view) + 2
    assert address_of(memoryview(b"")) == 0


@given(st.binary(max_size=200), st.integers(0, 200), st.integers(0, 50))
def test_a_copy_writes_its_target_and_no_byte_beside_it(data: bytes, at: int, after: int) -> None:
    whole = bytearray(b"\xa5" * (at + len(data) + after))
    copy_bytes(memoryview(whole)[at : at + len(data)], memoryview(data))
    assert bytes(whole) == b"\xa5" * at + data + b"\xa5" * after


def test_what_does_not_fit_is_refused() -> None:
    target = bytearray(4)
    with pytest.raises(ValueError, match="5 bytes do not fit into 4"):
        copy_bytes(memoryview(target), memoryview(b"abcde"))
    with pytest.raises(BufferError):
        copy_bytes(memoryview(b"1234"), memoryview(b"abcd"))
    with pytest.raises(BufferError):
        copy_bytes(memoryview(target), memoryview(b"abcdefgh")[::2])
    assert target == bytearray(4)


def test_no_reference_is_kept() -> None:
    target, source = bytearray(8), bytearray(b"12345678")
    before = sys.getrefcount(target), sys.getrefcount(source)
    for _ in range(10):
        copy_bytes(memoryview(target), memoryview(source))
        address_of(memoryview(source))
    gc.collect()
    assert (sys.getrefcount(target), sys.getrefcount(source)) == before
    target.append(1)  # a view that was still exported would forbid this
