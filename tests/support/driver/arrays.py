"""Arrays in device memory, as other libraries have them: torch here is built for CPUs alone."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from cuda.bindings import driver as cuda

from mx.cuda.device import Device, DeviceMemory
from mx.cuda.driver import load
from mx.cuda.ring import PinnedRing
from mx.cuda.vmm import VmmMemory
from mx.units import align_up

_GRANULE = 2 << 20
_TYPES = {"f": 2, "i": 0, "u": 1}


class DeviceArray:
    """A row-major array in GPU memory, with the CUDA array interface (version 3)."""

    def __init__(
        self, shape: tuple[int, ...], dtype: str, address: int, owner: object, device: Device
    ) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.address, self.device, self._owner = address, device, owner
        self.nbytes = self.dtype.itemsize * int(np.prod(shape))
        #: What the interface names as the stream of its last work.
        self.stream: int | None = None

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "strides": None,
            "stream": self.stream,
            "version": 3,
        }

    def set(self, values: np.ndarray[Any, Any]) -> None:
        """Copy host values to the device, and wait for that."""
        data = np.ascontiguousarray(values, self.dtype).reshape(-1).view(np.uint8).data
        ring = PinnedRing(self.device)
        ring.upload(self.address, data)
        ring.close()

    def get(self) -> np.ndarray[Any, Any]:
        """Return a copy of the values in the host."""
        found = np.empty(self.shape, self.dtype)
        ring = PinnedRing(self.device)
        ring.download(self.address, found.reshape(-1).view(np.uint8).data)
        ring.close()
        return found


class _Managed(ctypes.Structure):
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
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class DlpackArray:
    """The same array with DLPack alone. `streams` are those that were to wait for its work."""

    def __init__(self, array: DeviceArray) -> None:
        self._array = array
        self.get, self.set, self.device = array.get, array.set, array.device
        self.streams: list[int | None] = []
        self._shape = (ctypes.c_int64 * len(array.shape))(*array.shape)
        self._managed = _Managed(
            data=array.address,
            device_type=2,
            device_id=array.device.ordinal,
            ndim=len(array.shape),
            code=_TYPES[array.dtype.kind],
            bits=8 * array.dtype.itemsize,
            lanes=1,
            shape=ctypes.cast(self._shape, ctypes.POINTER(ctypes.c_int64)),
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._array.device.ordinal

    def __dlpack__(self, stream: int | None = None) -> object:
        self.streams.append(stream)
        return _new_capsule(ctypes.addressof(self._managed), b"dltensor", None)


def empty(
    shapes: dict[str, tuple[int, ...]], kind: str = "malloc", ordinal: int = 0, dtype: str = "<f4"
) -> dict[str, DeviceArray]:
    """Return arrays full of garbage, by name.

    Args:
        shapes: Their shapes.
        kind: "malloc": each has an allocation of its own; "vmm": so it has, of virtual memory
            management; "segment": all are in one range of several allocations, as torch's
            expandable segments are, and some lie across two of them; "pool": as "vmm", and no
            other process can map it, as with vLLM's memory that sleeps (cumem).
        ordinal: The GPU.
        dtype: Their dtype.
    """
    device = Device(load(), ordinal)
    item = np.dtype(dtype).itemsize
    sizes = {name: max(1, item * int(np.prod(shape))) for name, shape in shapes.items()}
    if kind == "segment":
        places, end = {}, 0
        for name, nbytes in sizes.items():
            places[name], end = end, end + (nbytes + 511) // 512 * 512
        pieces = -(-end // _GRANULE)
        with device.current():
            handles = [device.driver.vmm_create(ordinal, _GRANULE) for _ in range(pieces)]
        memory = VmmMemory(device, handles, [_GRANULE] * pieces)
        return {
            name: DeviceArray(shape, dtype, memory.address + places[name], memory, device)
            for name, shape in shapes.items()
        }
    found = {}
    for name, shape in shapes.items():
        owner: Any
        if kind == "vmm":
            owner = VmmMemory.allocate(device, sizes[name])
        elif kind == "pool":
            owner = _private(device, sizes[name])
        else:
            owner = DeviceMemory(device, sizes[name])
        found[name] = DeviceArray(shape, dtype, owner.address, owner, device)
    return found


def _private(device: Device, nbytes: int) -> VmmMemory:
    """Return memory that was made without a handle to export it by."""
    nbytes = align_up(nbytes, _GRANULE)
    properties = cuda.CUmemAllocationProp()
    properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device.ordinal
    with device.current():
        result, handle = cuda.cuMemCreate(nbytes, properties, 0)
        assert not int(result), result
    return VmmMemory(device, [int(handle)], [nbytes])


def values(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return random values in the host, by name."""
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
