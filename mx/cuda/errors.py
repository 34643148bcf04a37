"""Errors for failed driver calls: the call, CUDA's name of the error, and what to do."""

from __future__ import annotations

from mx.errors import CapacityError, ForkError, LocalError


class CudaError(LocalError):
    """A call of the CUDA driver failed.

    `call` is the driver's function, `code` CUDA's name of the error ("CUDA_ERROR_INVALID_VALUE").
    """

    def __init__(self, message: str, *, hint: str = "", call: str = "", code: str = "") -> None:
        super().__init__(message, hint=hint)
        self.call = call
        self.code = code


class CudaMemoryError(CudaError, CapacityError):
    """There is too little GPU memory, or pinned host memory."""


class CudaUnavailableError(CudaError):
    """CUDA can't be used in this process; the message says why."""


class CudaForkError(CudaError, ForkError):
    """This process was forked from one that used CUDA, and so can't use CUDA."""


#: What a user can do, by CUDA's name of the error (CUresult of the driver API).
_HINTS = {
    "CUDA_ERROR_OUT_OF_MEMORY": "free memory on the GPU, or use one with more",
    "CUDA_ERROR_NO_DEVICE": "no GPU is visible: see nvidia-smi and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": (
        "libcuda and the kernel's driver are of different versions: reboot after a driver "
        "update, or mount the host's libcuda into the container"
    ),
    "CUDA_ERROR_INSUFFICIENT_DRIVER": "update the NVIDIA driver",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": (
        "the CUDA compatibility package does not work with this GPU: update the NVIDIA driver"
    ),
    "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER": "update the NVIDIA driver",
    "CUDA_ERROR_STUB_LIBRARY": "a stub of libcuda was loaded: leave it out of LD_LIBRARY_PATH",
    "CUDA_ERROR_SYSTEM_NOT_READY": (
        "the system is not ready for CUDA: on an NVSwitch host, start nvidia-fabricmanager"
    ),
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "another process has the GPU to itself: see nvidia-smi -c",
    "CUDA_ERROR_DEVICES_UNAVAILABLE": "another process has the GPU to itself: see nvidia-smi -c",
    "CUDA_ERROR_NOT_INITIALIZED": (
        "CUDA does not survive a fork: start processes with spawn or forkserver, or fork before "
        "CUDA is first used"
    ),
    "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED": "these GPUs have no peer access",
    "CUDA_ERROR_TOO_MANY_PEERS": "the GPU has reached its limit of peers",
    "CUDA_ERROR_NOT_PERMITTED": "the driver does not allow it here, as in some containers",
    "CUDA_ERROR_ECC_UNCORRECTABLE": "the GPU's memory is faulty: see nvidia-smi -q -d ECC",
    "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED": "the memory is pinned already",
}

_KINDS: dict[str, type[CudaError]] = {
    "CUDA_ERROR_OUT_OF_MEMORY": CudaMemoryError,
    # Every call comes after cuInit, which only a fork undoes.
    "CUDA_ERROR_NOT_INITIALIZED": CudaForkError,
}

#: Errors after which nothing in the context works: only a new process helps.
FATAL_CODES = frozenset(
    {
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "CUDA_ERROR_LAUNCH_FAILED",
        "CUDA_ERROR_LAUNCH_TIMEOUT",
        "CUDA_ERROR_ECC_UNCORRECTABLE",
        "CUDA_ERROR_NVLINK_UNCORRECTABLE",
        "CUDA_ERROR_HARDWARE_STACK_ERROR",
        "CUDA_ERROR_ILLEGAL_INSTRUCTION",
        "CUDA_ERROR_MISALIGNED_ADDRESS",
        "CUDA_ERROR_INVALID_ADDRESS_SPACE",
        "CUDA_ERROR_INVALID_PC",
        "CUDA_ERROR_ASSERT",
        "CUDA_ERROR_CONTAINED",
    }
)
#: Errors after which nothing is left to free: the driver, or the context, ended, or they are those
#: of the process that this one was forked from.
GONE_CODES = FATAL_CODES | {
    "CUDA_ERROR_DEINITIALIZED",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED",
    "CUDA_ERROR_NOT_INITIALIZED",
}

#: Calls that use another process's memory: where they fail, others' memory may still be used.
_PEER_CALLS = frozenset(
    {
        "cuCtxEnablePeerAccess",
        "cuDeviceCanAccessPeer",
        "cuEventSynchronize",
        "cuIpcOpenMemHandle",
        "cuMemGetAddressRange",
        "cuMemImportFromShareableHandle",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemcpyDtoDAsync",
        "cuMemcpyDtoHAsync",
        "cuPointerGetAttribute",
    }
)


def is_own(error: CudaError) -> bool:
    """Return True if an error of reading another process's memory says that this process's CUDA
    does not work, or has too little memory, whatever the other process is."""
    short = isinstance(error, CudaMemoryError)
    return short or error.code in GONE_CODES or error.call not in _PEER_CALLS


def cuda_error(call: str, code: str, description: str = "", detail: str = "") -> CudaError:
    """Return the error for a failed call of the driver.

    Args:
        call: The driver's function.
        code: CUDA's name of the error.
        description: CUDA's description of it.
        detail: What was requested ("16.8 MB").
    """
    kind = _KINDS.get(code, CudaError)
    hint = _HINTS.get(code, "")
    if code in FATAL_CODES and not hint:
        hint = "the GPU's context is broken: start the process again"
    what = f" of {detail}" if detail else ""
    said = f", {description}" if description else ""
    return kind(f"{call}{what} failed: {code}{said}", hint=hint, call=call, code=code)
