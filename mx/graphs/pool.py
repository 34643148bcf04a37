"""torch's memory pool in a region. Nothing here has run on a GPU."""

from __future__ import annotations

import ctypes
import logging
from typing import TYPE_CHECKING, Any

from mx.errors import CapacityError, LocalError

if TYPE_CHECKING:
    from mx.graphs.region import Region

_log = logging.getLogger(__name__)

#: void *alloc(size_t, int device, cudaStream_t), void free(void *, size_t, int, cudaStream_t)
_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
#: torch calls back as long as the process lives, whatever has become of the pool.
_kept: list[Any] = []


def make_pool(region: Region) -> Any:
    """Return a `torch.cuda.MemPool` that takes its segments from a region, in order.

    torch reuses freed tensors within its segments; what it gives back stays used in the region.
    When the region is full torch raises its out-of-memory error.

    Args:
        region: The region, which has to be open as long as the pool is used.

    Raises:
        LocalError: torch is missing, is built without CUDA, or is older than pools.
    """
    try:
        import torch
    except ImportError as error:
        raise LocalError(
            "a pool in a region is torch's, and torch is missing", hint="install torch for CUDA"
        ) from error
    make_allocator = getattr(torch._C, "_cuda_customAllocator", None)
    memory_pool = getattr(torch.cuda, "MemPool", None)
    if make_allocator is None or memory_pool is None:
        raise LocalError(
            f"torch {torch.__version__} has no memory pools of CUDA",
            hint="use torch 2.5 or later, built for CUDA",
        )
    ordinal = region.device.ordinal

    def allocate(nbytes: int, device: int, _stream: int | None) -> int:
        # torch takes NULL for "out of memory"; an exception here would be lost.
        try:
            if device == ordinal:
                return region.allocate(nbytes)
            _log.warning("torch asked the pool of GPU %d for memory of GPU %d", ordinal, device)
        except CapacityError as error:
            _log.warning("torch's pool: %s", error)
        return 0

    def free(_address: int, _nbytes: int, _device: int, _stream: int | None) -> None:
        """Do nothing: addresses have to be the same in every process, and so are never reused."""

    callbacks = (_ALLOCATE(allocate), _FREE(free))
    pointers = [ctypes.cast(each, ctypes.c_void_p).value for each in callbacks]
    allocator = make_allocator(*pointers)
    pool = memory_pool(allocator)
    _kept.extend((callbacks, allocator))
    return pool
