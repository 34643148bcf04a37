"""What vLLM's allocator of sleep mode is made of, over the stand-in driver.

`vllm/device_allocator/cumem.py` is a Python class over two things that a CPU's build lacks: an
extension in C, which maps and unmaps device memory and calls back for each allocation, and torch's
memory pools for GPUs, which take their segments from it. Both are stood in for here by their
contract. Memory is the stand-in driver's (cuMemCreate without an export, at an address that stays):
what is unmapped is a fault to touch, and counts as free.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mx.cuda.device import Device
from mx.units import MIB, align_up
from tests.support.driver.torch_gpu import DEVICE, Gpu, Owner

#: Tensors below this share segments of `_SEGMENT_BYTES`, each at a multiple of `_ALIGNED_BYTES`.
_SMALL_BYTES, _SEGMENT_BYTES, _ALIGNED_BYTES = MIB, 2 * MIB, 512

#: Device, bytes, address, and a number for what is mapped there.
Handle = tuple[int, int, int, int]


class Extension:
    """The functions of `vllm.cumem_allocator`, and the two that torch calls."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._mapped: dict[int, int] = {}  # by address, the driver's handle
        self._malloc: Callable[[Handle], None] = lambda _: None
        self._free: Callable[[int], Handle]

    def init_module(self, malloc: Callable[[Handle], None], free: Callable[[int], Handle]) -> None:
        """Have these called for each allocation, and before each is freed."""
        self._malloc, self._free = malloc, free

    def python_create_and_map(self, _: int, nbytes: int, address: int, __: int) -> None:
        """Map new memory at an address."""
        driver: Any = self._device.driver
        with self._device.current():
            properties = driver._properties(self._device.ordinal, False)
            properties.requestedHandleTypes = (
                driver._d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
            )
            handle = int(driver._call("cuMemCreate", nbytes, properties, 0, detail=""))
            driver.vmm_map(address, nbytes, handle)
            driver.vmm_set_access(address, nbytes, self._device.ordinal)
        self._mapped[address] = handle

    def python_unmap_and_release(self, _: int, nbytes: int, address: int, __: int) -> None:
        """Unmap memory, and give it back to the device; the address stays reserved."""
        with self._device.current():
            self._device.driver.vmm_unmap(address, nbytes)
            self._device.driver.vmm_release(self._mapped.pop(address))

    def my_malloc(self, nbytes: int) -> tuple[int, int]:
        """Return the address and the size of a new segment."""
        driver, ordinal = self._device.driver, self._device.ordinal
        with self._device.current():
            size = align_up(nbytes, driver.vmm_granularity(ordinal))
            address = driver.vmm_reserve(size)
        self.python_create_and_map(ordinal, size, address, 0)
        self._malloc((ordinal, size, address, 0))
        return address, size

    def my_free(self, address: int) -> None:
        """Free a segment."""
        _, nbytes, _, _ = handle = self._free(address)
        if address in self._mapped:
            self.python_unmap_and_release(*handle)
        with self._device.current():
            self._device.driver.vmm_unreserve(address, nbytes)


class _Segment:
    def __init__(self, address: int, nbytes: int, *, small: bool) -> None:
        self.address, self.nbytes, self.small = address, nbytes, small
        self.filled = self.used = 0  # where the next small tensor begins, and what tensors have


class _Segments:
    """What one pool has. It outlasts the pool until its last tensor is gone."""

    def __init__(self, extension: Extension) -> None:
        self._extension = extension
        self.held: list[_Segment] = []
        self.over = False

    def allocate(self, nbytes: int) -> Owner:
        """Return memory of a size."""
        size = align_up(max(1, nbytes), _ALIGNED_BYTES)
        small = size < _SMALL_BYTES
        alike = [each for each in self.held if each.small == small]
        found = next((each for each in alike if each.filled + size <= each.nbytes), None)
        if found is None:
            made = self._extension.my_malloc(_SEGMENT_BYTES if small else size)
            found = _Segment(*made, small=small)
            self.held.append(found)
        owner = Owner(found.address + found.filled)
        found.filled = found.filled + size if small else found.nbytes
        found.used += size
        weakref.finalize(owner, self._freed, found, size).atexit = False
        return owner

    def _freed(self, segment: _Segment, nbytes: int) -> None:
        segment.used -= nbytes
        if not segment.used:
            segment.filled = 0  # it is used again, as torch does
        if self.over:
            self.end()

    def end(self) -> None:
        """Free what no tensor uses; the rest with its last one."""
        self.over = True
        for segment in [each for each in self.held if not each.used]:
            self.held.remove(segment)
            with contextlib.suppress(KeyError):  # vLLM has freed it itself (`_trim`)
                self._extension.my_free(segment.address)


class StandInPool:
    """torch's `MemPool` over the extension."""

    def __init__(self, extension: Extension) -> None:
        self.segments = _Segments(extension)
        weakref.finalize(self, self.segments.end).atexit = False
        self.id = (id(self), 0)

    def snapshot(self) -> list[dict[str, int]]:
        """Return the segments, as torch describes them."""
        return [
            {"address": each.address, "allocated_size": each.used, "total_size": each.nbytes}
            for each in self.segments.held
        ]


def install(gpu: Gpu) -> None:
    """Have vLLM's `cumem` find its extension, and torch's pools, on a stand-in GPU. Call it before
    vLLM imports them."""
    extension = Extension(gpu.device)
    module: Any = types.ModuleType("vllm.cumem_allocator")
    for name in ("init_module", "python_create_and_map", "python_unmap_and_release"):
        setattr(module, name, getattr(extension, name))
    sys.modules[module.__name__] = module

    class CudaRuntime:
        def cudaMemcpy(self, to: int, source: int, nbytes: int) -> None:
            ctypes.memmove(to, source, nbytes)

    wrapper: Any = importlib.import_module("vllm.distributed.device_communicators.cuda_wrapper")
    wrapper.CudaRTLibrary = CudaRuntime

    @contextlib.contextmanager
    def use_mem_pool(pool: StandInPool) -> Iterator[None]:
        before, gpu.allocate = gpu.allocate, pool.segments.allocate
        try:
            yield
        finally:
            gpu.allocate = before

    memory: Any = torch.cuda.memory
    memory.CUDAPluggableAllocator = lambda *_: types.SimpleNamespace(_allocator=extension)
    memory.MemPool = StandInPool
    memory.use_mem_pool = use_mem_pool
    cuda: Any = torch.cuda
    cuda.synchronize = lambda *_: None
    accelerator: Any = torch.accelerator
    accelerator.synchronize = accelerator.empty_cache = lambda *_: None
    accelerator.get_memory_info = lambda *_: gpu.device.memory_info()
    assert importlib.import_module("vllm.device_allocator.cumem").cumem_available
    assert gpu.device.ordinal == DEVICE.index
