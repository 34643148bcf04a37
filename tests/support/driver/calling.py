"""For programs that run over the stand-in: calls of the real cuda-bindings that raise."""

from __future__ import annotations

import ctypes
import importlib
import os
from pathlib import Path
from typing import Any

driver: Any = importlib.import_module("cuda.bindings.driver")

#: CU_STREAM_NON_BLOCKING, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, PORTABLE | DEVICEMAP.
NON_BLOCKING, LAZY_PEERS, PORTABLE = 1, 1, 3
MIB = 1 << 20
GARBAGE = 0xA5


def attempt(name: str, *arguments: Any) -> str:
    """Make a call and return its error's name after CUDA_ERROR_, "" if there is none."""
    return str(getattr(driver, name)(*arguments)[0].name).partition("CUDA_ERROR_")[2]


def call(name: str, *arguments: Any) -> Any:
    """Make a call and return its result, a list if there are several, None if there is none.

    Raises:
        AssertionError: The call fails.
    """
    error, *values = getattr(driver, name)(*arguments)
    assert not int(error), f"{name}: {error!r}"
    return values[0] if len(values) == 1 else values or None


def use(ordinal: int = 0) -> Any:
    """Make a device's primary context the current one and return it."""
    call("cuInit", 0)
    context = call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", ordinal))
    call("cuCtxPushCurrent", context)
    return context


def alloc(nbytes: int) -> int:
    """Return the address of new device memory."""
    return int(call("cuMemAlloc", nbytes))


def pinned(nbytes: int) -> int:
    """Return the address of new pinned memory."""
    return int(call("cuMemHostAlloc", nbytes, PORTABLE))


def stream() -> Any:
    """Return a new stream that does not wait for the default one."""
    return call("cuStreamCreate", NON_BLOCKING)


def image(name: str) -> bytes:
    """Return the cubin of a kernel that the setting KERNELS has, by its name."""
    return Path(os.environ["MX_STANDIN_KERNELS"]).with_name(f"{name}.cubin").read_bytes()


def function(name: str) -> Any:
    """Load a kernel's cubin as a module, and return its function."""
    return call("cuModuleGetFunction", call("cuModuleLoadData", image(name)), name.encode())


def arguments(*values: Any) -> Any:
    """Return what a launch takes for a kernel's parameters, with those that Triton adds.

    An int is an address, a float one of 32 bits; others have a type of ctypes.
    """
    scalars = [
        value
        if isinstance(value, ctypes._SimpleCData)
        else (ctypes.c_float if isinstance(value, float) else ctypes.c_void_p)(value)
        for value in (*values, 0, 0)
    ]
    return tuple(each.value or 0 for each in scalars), tuple(map(type, scalars))


def fill(address: int, value: int, nbytes: int) -> None:
    """Fill device memory, and wait for it."""
    call("cuMemsetD8Async", address, value, nbytes, 0)
    call("cuStreamSynchronize", 0)


def fetch(address: int, nbytes: int) -> bytes:
    """Return the bytes of device memory."""
    found = bytearray(nbytes)
    call("cuMemcpyDtoH", found, address, nbytes)
    return bytes(found)


def attribute(name: str, address: int) -> Any:
    """Return one pointer attribute of an address."""
    names = driver.CUpointer_attribute
    return call("cuPointerGetAttribute", getattr(names, f"CU_POINTER_ATTRIBUTE_{name}"), address)


class Vmm:
    """One allocation of virtual memory management, mapped; without a descriptor a new one."""

    def __init__(self, nbytes: int = 2 * MIB, descriptor: int = -1, ordinal: int = 0) -> None:
        self.nbytes = nbytes
        self._type = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = self._type
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = ordinal
        if descriptor < 0:
            self.handle = call("cuMemCreate", nbytes, properties, 0)
        else:
            self.handle = call("cuMemImportFromShareableHandle", descriptor, self._type)
        self.address = int(call("cuMemAddressReserve", nbytes, 0, 0, 0))
        call("cuMemMap", self.address, nbytes, 0, self.handle, 0)

    def allow(self, ordinal: int = 0, flags: str = "READWRITE") -> None:
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = ordinal
        access.flags = getattr(driver.CUmemAccess_flags, f"CU_MEM_ACCESS_FLAGS_PROT_{flags}")
        call("cuMemSetAccess", self.address, self.nbytes, [access], 1)

    def export(self) -> int:
        return int(call("cuMemExportToShareableHandle", self.handle, self._type, 0))

    def unmap(self) -> None:
        call("cuMemUnmap", self.address, self.nbytes)

    def close(self) -> None:
        self.unmap()
        call("cuMemRelease", self.handle)
        call("cuMemAddressFree", self.address, self.nbytes)
