"""The interface to CUDA: the driver calls that mx uses, over plain ints.

Addresses, contexts, streams, events and allocation handles are ints; devices are ordinals of this
process (after CUDA_VISIBLE_DEVICES); lengths are bytes. Calls that need a current context are
marked: `Device.current()` of `mx.cuda.device` sets one. A call that fails raises `CudaError`
(`CudaMemoryError` if memory is short), which names the call and CUDA's code; the caller decides
whether a peer is to blame. Nothing here owns resources: the objects of `mx.cuda.device` and
`mx.cuda.vmm` do.

Semantics are those of the functions named in each docstring (CUDA driver API reference, 12.9 and
13.x). All methods are thread-safe; a current context is per thread.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Sequence
from typing import Protocol

from mx.cuda.errors import CudaError, CudaUnavailableError
from mx.cuda.library import why_missing
from mx.records import record
from mx.transport import Unavailable, Viable

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


@record(frozen=True, slots=True)
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


class Driver(Protocol):
    """The driver calls that mx uses. What makes them is a final class that derives from this one: a
    missing method is a type error there."""

    # -- what there is; no context needed ----------------------------------------------------------

    def version(self) -> int:
        """Return the driver's CUDA version: 13000 is 13.0 (cuDriverGetVersion)."""

    def device_count(self) -> int:
        """cuDeviceGetCount."""

    def device_uuid(self, ordinal: int) -> str:
        """Return the UUID as NVML writes it, "GPU-xxxxxxxx-xxxx-...", and "MIG-..." for an instance
        of a GPU that is divided (cuDeviceGetUuid)."""

    def device_name(self, ordinal: int) -> str:
        """cuDeviceGetName."""

    def device_attribute(self, ordinal: int, attribute: DeviceAttribute) -> int:
        """cuDeviceGetAttribute."""

    def can_access_peer(self, ordinal: int, peer: int) -> bool:
        """Return True if kernels and copy engines of `ordinal` can access `peer`'s memory directly
        (cuDeviceCanAccessPeer)."""

    # -- contexts ----------------------------------------------------------------------------------

    def context_retain(self, ordinal: int) -> int:
        """Return the device's primary context, which torch and the runtime API use; created if
        necessary, and counted (cuDevicePrimaryCtxRetain)."""

    def context_release(self, ordinal: int) -> None:
        """Undo one `context_retain`; the last one ends the context and everything in it
        (cuDevicePrimaryCtxRelease)."""

    def context_active(self, ordinal: int) -> bool:
        """Return True if this process uses the device: its primary context exists
        (cuDevicePrimaryCtxGetState)."""

    def context_push(self, context: int) -> None:
        """Make `context` this thread's current context (cuCtxPushCurrent)."""

    def context_pop(self) -> None:
        """Restore the thread's context before the last push (cuCtxPopCurrent)."""

    def context_synchronize(self) -> None:
        """Wait for all work of the current context, of any thread (cuCtxSynchronize). This
        invalidates every stream capture in the context."""

    def exchange_capture_mode(self, mode: int) -> int:
        """Set how this thread heeds stream captures, RELAXED_CAPTURE or what this returned before,
        and return the mode until now (cuThreadExchangeStreamCaptureMode)."""

    def enable_peer_access(self, peer_context: int) -> None:
        """Let the current context access memory of `peer_context` that cuMemAlloc made
        (cuCtxEnablePeerAccess). It works in one direction, and may be enabled already. VMM memory
        needs `vmm_set_access` instead."""

    # -- memory (current context) ------------------------------------------------------------------

    def mem_info(self) -> tuple[int, int]:
        """Return the free and total bytes of the current device (cuMemGetInfo)."""

    def mem_alloc(self, nbytes: int) -> int:
        """Allocate device memory, aligned to at least 256 bytes; `nbytes` > 0 (cuMemAlloc)."""

    def mem_free(self, address: int) -> None:
        """Free memory after the work that uses it (cuMemFree). Other processes that opened it by
        an IPC handle break."""

    def pointer(self, address: int) -> PointerInfo:
        """Return the allocation of `address` (cuPointerGetAttribute, cuMemGetAddressRange). Raises
        CudaError if it is not device memory, or was freed."""

    # -- virtual memory management -----------------------------------------------------------------

    def vmm_granularity(self, ordinal: int) -> int:
        """Return the granularity of sizes and addresses of exportable allocations
        (cuMemGetAllocationGranularity, RECOMMENDED)."""

    def vmm_create(self, ordinal: int, nbytes: int) -> int:
        """Allocate device memory that can be exported as a descriptor, and return its handle; it
        has no address yet (cuMemCreate, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)."""

    def vmm_release(self, handle: int) -> None:
        """Release a handle; the memory is freed with its last map, handle and descriptor
        (cuMemRelease)."""

    def vmm_retain(self, address: int) -> int:
        """Return another handle of the allocation mapped at `address`, which the caller releases
        (cuMemRetainAllocationHandle). For VMM memory only, such as torch's expandable segments."""

    def vmm_reserve(self, nbytes: int, wanted: int = 0) -> int:
        """Reserve a range of addresses without memory, at `wanted` if that is possible: it is only
        a hint (cuMemAddressReserve)."""

    def vmm_unreserve(self, address: int, nbytes: int) -> None:
        """Free a range of addresses, exactly as reserved and unmapped (cuMemAddressFree)."""

    def vmm_map(self, address: int, nbytes: int, handle: int) -> None:
        """Map the start of the allocation at `address`, without access yet (cuMemMap)."""

    def vmm_unmap(self, address: int, nbytes: int) -> None:
        """Unmap a range (cuMemUnmap). Synchronise first: running work that uses it would fault."""

    def vmm_set_access(self, address: int, nbytes: int, ordinal: int) -> None:
        """Let a device read and write a mapped range (cuMemSetAccess)."""

    def vmm_export_fd(self, handle: int) -> int:
        """Return a new descriptor of the allocation, which the caller closes
        (cuMemExportToShareableHandle)."""

    def vmm_import_fd(self, descriptor: int) -> int:
        """Return a handle of the allocation behind a descriptor of any process, which the caller
        releases; it keeps the descriptor (cuMemImportFromShareableHandle)."""

    # -- legacy IPC (current context) --------------------------------------------------------------

    def ipc_handle(self, address: int) -> bytes:
        """Return the 64-byte handle of the allocation that contains `address`; it opens at the
        allocation's base, not at `address` (cuIpcGetMemHandle). For memory of cuMemAlloc only."""

    def ipc_open(self, handle: bytes) -> int:
        """Map an allocation of another process and return its address here; counted per context
        (cuIpcOpenMemHandle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS). Raises CudaError for a handle
        of freed memory, and in the process that exported it."""

    def ipc_close(self, address: int) -> None:
        """Close an address that `ipc_open` returned (cuIpcCloseMemHandle). The exporter's memory
        stays."""

    # -- streams and events (current context) ------------------------------------------------------

    def stream_create(self) -> int:
        """Create a stream that does not wait for the default one (CU_STREAM_NON_BLOCKING)."""

    def stream_destroy(self, stream: int) -> None:
        """Destroy a stream at once; its queued work still runs (cuStreamDestroy)."""

    def stream_synchronize(self, stream: int) -> None:
        """Wait for the queued work and raise its error (cuStreamSynchronize)."""

    def stream_query(self, stream: int) -> bool:
        """Return True if all work is done; raise its error (cuStreamQuery)."""

    def stream_wait_event(self, stream: int, event: int) -> None:
        """Make later work wait for the event's last record (cuStreamWaitEvent)."""

    def event_create(self) -> int:
        """Create an event without timing, whose waiters sleep and do not spin
        (CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC)."""

    def event_destroy(self, event: int) -> None:
        """cuEventDestroy."""

    def event_record(self, event: int, stream: int) -> None:
        """Make the event happen when the work queued now is done (cuEventRecord)."""

    def event_query(self, event: int) -> bool:
        """Return True if the event has happened or was never recorded (cuEventQuery)."""

    def event_synchronize(self, event: int) -> None:
        """Sleep until the event has happened (cuEventSynchronize)."""

    # -- copies, queued on a stream (current context) ----------------------------------------------

    def copy_htod(self, target: int, host: int, nbytes: int, stream: int) -> None:
        """cuMemcpyHtoDAsync. It is asynchronous only from pinned memory, and then the host's bytes
        must not change until it is done."""

    def copy_dtoh(self, host: int, source: int, nbytes: int, stream: int) -> None:
        """cuMemcpyDtoHAsync."""

    def copy_dtod(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy between addresses that the current context can access (cuMemcpyDtoDAsync)."""

    def memset(self, address: int, value: int, nbytes: int, stream: int) -> None:
        """Set `nbytes` bytes to `value` (cuMemsetD8Async)."""

    # -- host memory (current context) -------------------------------------------------------------

    def host_alloc(self, nbytes: int) -> int:
        """Allocate pinned host memory, for all contexts, mapped for the devices
        (cuMemHostAlloc, PORTABLE | DEVICEMAP)."""

    def host_free(self, address: int) -> None:
        """cuMemFreeHost."""

    def host_register(self, address: int, nbytes: int) -> None:
        """Pin existing memory (cuMemHostRegister, PORTABLE | DEVICEMAP)."""

    def host_unregister(self, address: int) -> None:
        """cuMemHostUnregister."""

    def host_device_pointer(self, address: int) -> int:
        """Return the current device's address of pinned memory (cuMemHostGetDevicePointer)."""

    # -- kernels (current context) -----------------------------------------------------------------

    def module_load(self, image: bytes) -> int:
        """Load a cubin for this device (cuModuleLoadData). The module stays with the context."""

    def module_function(self, module: int, name: str) -> int:
        """cuModuleGetFunction."""

    def launch(
        self,
        function: int,
        grid: tuple[int, int],
        threads: int,
        shared_nbytes: int,
        stream: int,
        parameters: Sequence[int],
    ) -> None:
        """Queue a kernel whose parameters all have 64 bits (cuLaunchKernel)."""

    # -- words that streams wait for (current context) ---------------------------------------------

    def stream_wait_value(self, stream: int, address: int, value: int) -> None:
        """Make later work wait until the 32-bit word at device address `address` is >= `value`,
        cyclically (cuStreamWaitValue32, GEQ)."""


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
            from mx.cuda.bindings import BindingsDriver

            try:
                _driver = BindingsDriver()
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
