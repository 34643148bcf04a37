"""Tensors at fixed places of a region, as other libraries take them."""

from __future__ import annotations

import ctypes
from typing import Any

from mx.graphs.package import GraphPlace
from mx.memory.arrays import DLPACK_TYPES, TYPESTRS, DLTensor

_CUDA = 2
_TYPESTR_OF = {dtype: typestr for typestr, dtype in TYPESTRS.items()}
_DLPACK_OF = {dtype: kind for kind, dtype in DLPACK_TYPES.items()}


class _DLManagedTensor(ctypes.Structure):
    # DLManagedTensor of dlpack.h.
    _fields_ = (
        ("tensor", DLTensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class RegionTensor:
    """A row-major tensor in a region's memory, which it keeps while the region is open.

    It has the CUDA array interface where that knows its dtype, and DLPack. `address` is the
    device's, `dtype` as safetensors spells it.
    """

    def __init__(self, place: GraphPlace, address: int, ordinal: int, owner: object) -> None:
        self.shape, self.dtype, self.nbytes = place.shape, place.dtype, place.nbytes
        self.address, self._ordinal, self._owner = address, ordinal, owner

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        typestr = _TYPESTR_OF.get(self.dtype)
        if typestr is None:  # so that others ask for DLPack
            raise AttributeError(f"the CUDA array interface has no {self.dtype}")
        return {
            "shape": self.shape,
            "typestr": typestr,
            "data": (self.address, False),
            "strides": None,
            "stream": None,
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, self._ordinal

    def __dlpack__(self, *, stream: int | None = None, **_: object) -> object:
        """Return a capsule; nothing queued by this object has to be waited for.

        Raises:
            BufferError: DLPack has no such dtype.
        """
        kind = _DLPACK_OF.get(self.dtype)
        if kind is None:
            raise BufferError(f"DLPack has no {self.dtype}")
        shape = (ctypes.c_int64 * len(self.shape))(*self.shape)
        tensor = DLTensor(
            data=self.address,
            device_type=_CUDA,
            device_id=self._ordinal,
            ndim=len(self.shape),
            code=kind[0],
            bits=kind[1],
            lanes=1,
            shape=ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)),
        )
        made = _DLManagedTensor(tensor=tensor)
        _kept.append((made, shape))
        return _new_capsule(ctypes.addressof(made), b"dltensor", None)


#: A library that takes a capsule reads its structure until it drops the tensor, which can't be seen
#: here: so the structures stay.
_kept: list[tuple[object, ...]] = []
