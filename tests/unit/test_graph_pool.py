"""torch's pool in a region, as far as it can be tried without torch for CUDA."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mx.errors import CapacityError, LocalError
from mx.graphs.pool import make_pool


class Given:
    """Stands for a region of three pieces."""

    device = SimpleNamespace(ordinal=1)

    def __init__(self) -> None:
        self.left = [0x6000_0000_0000 + n for n in range(3)]

    def allocate(self, nbytes: int) -> int:
        if not self.left:
            raise CapacityError(f"no {nbytes} bytes are left")
        return self.left.pop(0)


def test_torch_without_cuda_is_told_so() -> None:
    if hasattr(torch._C, "_cuda_customAllocator"):
        pytest.skip("torch is built for CUDA")
    with pytest.raises(LocalError, match="has no memory pools of CUDA"):
        make_pool(Given())  # type: ignore[arg-type]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """What torch would be given: the addresses of both functions."""
    found: list[int] = []

    def allocator(*pointers: int) -> Any:
        found.extend(pointers)
        return "allocator"

    monkeypatch.setattr(torch._C, "_cuda_customAllocator", allocator, raising=False)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda given: (given, "pool"), raising=False)
    yield found


def test_torch_gets_the_regions_memory_and_null_when_it_is_full(taken: list[int]) -> None:
    region = Given()
    assert make_pool(region) == ("allocator", "pool")  # type: ignore[arg-type]
    size, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    allocate = ctypes.CFUNCTYPE(pointer, size, number, pointer)(taken[0])
    free = ctypes.CFUNCTYPE(None, pointer, size, number, pointer)(taken[1])
    assert allocate(2 << 20, 0, None) is None  # another GPU
    addresses = [allocate(2 << 20, 1, 7) for _ in range(4)]
    assert addresses == [0x6000_0000_0000, 0x6000_0000_0001, 0x6000_0000_0002, None]
    free(addresses[0], 2 << 20, 1, None)
    assert allocate(2 << 20, 1, 7) is None  # an address is given once
