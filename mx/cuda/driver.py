"""The interface to CUDA: the driver calls that mx uses, over plain ints.

`mx.cuda.bindings.Driver` makes the calls, and says how they behave.
"""

from __future__ import annotations

import enum
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mx.cuda.errors import CudaError, CudaUnavailableError
from mx.cuda.library import why_missing
from mx.transport import Unavailable, Viable

if TYPE_CHECKING:
    from mx.cuda.bindings import Driver

#: Bytes of a legacy IPC handle (CU_IPC_HANDLE_SIZE).
IPC_HANDLE_BYTES = 64
#: CU_STREAM_CAPTURE_MODE_RELAXED: captures of other threads forbid this thread no call.
RELAXED_CAPTURE = 2


class DeviceAttribute(enum.Enum):
    """The CU_DEVICE_ATTRIBUTE_* values that mx reads."""

    COMPUTE_CAPABILITY_MAJOR = "COMPUTE_CAPABILITY_MAJOR"
    COMPUTE_CAPABILITY_MINOR = "COMPUTE_CAPABILITY_MINOR"
    SM_COUNT = "MULTIPROCESSOR_COUNT"
    VMM = "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"
    RDMA_VMM = "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"
    POSIX_FD = "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"
    READ_ONLY_REGISTER = "READ_ONLY_HOST_REGISTER_SUPPORTED"
    HOST_NUMA_ID = "HOST_NUMA_ID"
    HOST_NUMA_VMM = "HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"


@dataclass(frozen=True, slots=True)
class PointerInfo:
    """The allocation that an address of device memory belongs to.

    `base` and `nbytes` are the allocation (for VMM memory: the mapped range). `buffer_id` is unique
    among the allocations of one process, even if addresses are reused. `ipc_capable`: a legacy IPC
    handle can export it; `fd_capable`: a POSIX descriptor can.
    """

    ordinal: int
    base: int
    nbytes: int
    buffer_id: int
    ipc_capable: bool
    fd_capable: bool


_lock = threading.Lock()
_driver: Driver | CudaUnavailableError | None = None


def load() -> Driver:
    """Return this process's driver, initialised at the first call.

    Raises:
        CudaUnavailableError: CUDA can't be used; the message says why: no bindings, no libcuda, no
            GPU, a driver that is too old or does not match.
        CudaForkError: This process was forked from one that uses CUDA.
    """
    global _driver
    with _lock:
        if _driver is None:
            from mx.cuda.bindings import Driver

            try:
                _driver = Driver()
            except CudaUnavailableError as error:
                _driver = error
        if isinstance(_driver, CudaUnavailableError):
            raise CudaUnavailableError(
                _driver.message, hint=_driver.hint, call=_driver.call, code=_driver.code
            )
        return _driver


def probe() -> Viable | Unavailable:
    """Return whether CUDA works with at least one GPU, or why it does not. Never raises."""
    try:
        driver = load()
        names = [driver.device_name(ordinal) for ordinal in range(driver.device_count())]
    except CudaError as error:
        return Unavailable(str(error))
    return Viable(f"CUDA {format_version(driver.version())}: {', '.join(names)}")


def presence() -> Viable | Unavailable:
    """Return whether CUDA may work here. Never raises, and never starts CUDA: a process that has
    started it can't fork any more, nor choose its GPUs. Once CUDA is in use, `probe` answers.
    """
    if _driver is not None:
        return probe()
    reason = why_missing()
    return Unavailable(reason) if reason else Viable("CUDA is here, and not in use so far")


def format_version(version: int) -> str:
    """Return a CUDA version as text: "13.2" for 13020."""
    return f"{version // 1000}.{version % 1000 // 10}"
