"""The seam to CUDA: the calls of the driver that mx uses, as a Protocol over plain ints.

Addresses, contexts, streams, events and allocation handles are ints; devices are ordinals of this
process (as CUDA_VISIBLE_DEVICES leaves them); lengths are bytes. Whatever needs a current context
says so: `Device.current()` of `mx.cuda.device` makes one. A call that fails raises `CudaError`
(`CudaMemoryError` where memory is short), which names the call and CUDA's code; whether a peer is
to blame is for the caller to know. Nothing here owns anything: that is for the objects of
`mx.cuda.device` and `mx.cuda.vmm`.

Semantics are those of the functions named in each docstring (CUDA driver API reference, 12.9 and
13.x). All methods are thread-safe; a current context is per thread.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from mx.cuda.errors import CudaError, CudaUnavailableError
from mx.transport import Unavailable, Viable

#: Bytes of a legacy IPC handle (CU_IPC_HANDLE_SIZE).
IPC_HANDLE_BYTES = 64


class DeviceAttribute(enum.Enum):
    """CU_DEVICE_ATTRIBUTE_*, as far as mx asks."""

    COMPUTE_CAPABILITY_MAJOR = "COMPUTE_CAPABILITY_MAJOR"
    COMPUTE_CAPABILITY_MINOR = "COMPUTE_CAPABILITY_MINOR"
    VMM = "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"
    RDMA_VMM = "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"
    POSIX_FD = "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"


@dataclass(frozen=True, slots=True)
class PointerInfo:
    """What an address of device memory belongs to.

    `base` and `nbytes` are the allocation (for VMM memory: the mapped range) that it is part of;
    `buffer_id` tells allocations of one process apart, reused addresses included.
    `ipc_capable`: a legacy IPC handle can be had; `fd_capable`: a POSIX descriptor can.
    """

    ordinal: int
    base: int
    nbytes: int
    buffer_id: int
    ipc_capable: bool
    fd_capable: bool


class Driver(Protocol):
    # -- what there is; no context needed ----------------------------------------------------------

    def version(self) -> int:
        """The driver's CUDA version: 13000 is 13.0 (cuDriverGetVersion)."""

    def device_count(self) -> int:
        """cuDeviceGetCount."""

    def device_uuid(self, ordinal: int) -> str:
        """As NVML writes it: "GPU-xxxxxxxx-xxxx-..." (cuDeviceGetUuid)."""

    def device_name(self, ordinal: int) -> str:
        """cuDeviceGetName."""

    def device_attribute(self, ordinal: int, attribute: DeviceAttribute) -> int:
        """cuDeviceGetAttribute."""

    def can_access_peer(self, ordinal: int, peer: int) -> bool:
        """May `ordinal`'s kernels and copy engines reach `peer`'s memory directly?
        (cuDeviceCanAccessPeer)"""

    # -- contexts ----------------------------------------------------------------------------------

    def context_retain(self, ordinal: int) -> int:
        """The device's primary context, made if need be and counted (cuDevicePrimaryCtxRetain):
        the one that torch and the runtime API use."""

    def context_release(self, ordinal: int) -> None:
        """Undo one `context_retain`; the last one ends the context and all that is in it."""

    def context_push(self, context: int) -> None:
        """Make it this thread's current context (cuCtxPushCurrent)."""

    def context_pop(self) -> None:
        """Back to the thread's context before the last push (cuCtxPopCurrent)."""

    def context_synchronize(self) -> None:
        """Wait for all work of the current context, whoever queued it (cuCtxSynchronize)."""

    def enable_peer_access(self, peer_context: int) -> None:
        """Let the current context reach `peer_context`'s memory that cuMemAlloc made. One
        direction; enabled already is fine (cuCtxEnablePeerAccess). VMM memory ignores this and
        asks for `vmm_set_access`."""

    # -- memory (current context) ------------------------------------------------------------------

    def mem_info(self) -> tuple[int, int]:
        """(free, total) bytes of the current device (cuMemGetInfo)."""

    def mem_alloc(self, nbytes: int) -> int:
        """Device memory, aligned to 256 bytes at least; `nbytes` > 0 (cuMemAlloc)."""

    def mem_free(self, address: int) -> None:
        """cuMemFree. Waits for the work that uses it; breaks what others opened of it."""

    def pointer(self, address: int) -> PointerInfo:
        """What `address` belongs to (cuPointerGetAttribute, cuMemGetAddressRange). Raises
        CudaError for what is not device memory, or no longer."""

    # -- virtual memory management -----------------------------------------------------------------

    def vmm_granularity(self, ordinal: int) -> int:
        """What sizes, and addresses, of exportable allocations are a multiple of
        (cuMemGetAllocationGranularity, RECOMMENDED)."""

    def vmm_create(self, ordinal: int, nbytes: int) -> int:
        """Pinned memory on the device that can be exported as a descriptor; a handle without an
        address (cuMemCreate, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)."""

    def vmm_release(self, handle: int) -> None:
        """Give a handle up; the memory goes when its last map, handle and descriptor has
        (cuMemRelease)."""

    def vmm_retain(self, address: int) -> int:
        """Another handle of the allocation mapped at `address` (cuMemRetainAllocationHandle);
        to be released. For VMM memory only, as torch's expandable segments are."""

    def vmm_reserve(self, nbytes: int) -> int:
        """A range of addresses with nothing behind it (cuMemAddressReserve)."""

    def vmm_unreserve(self, address: int, nbytes: int) -> None:
        """cuMemAddressFree; the range exactly as reserved, unmapped."""

    def vmm_map(self, address: int, nbytes: int, handle: int) -> None:
        """Put the allocation from its start at `address` (cuMemMap); no access yet."""

    def vmm_unmap(self, address: int, nbytes: int) -> None:
        """cuMemUnmap. The caller has synchronised: running work that uses it would fault."""

    def vmm_set_access(self, address: int, nbytes: int, ordinal: int) -> None:
        """Let a device read and write a mapped range (cuMemSetAccess)."""

    def vmm_export_fd(self, handle: int) -> int:
        """A new descriptor for the allocation, the caller's to close
        (cuMemExportToShareableHandle)."""

    def vmm_import_fd(self, descriptor: int) -> int:
        """A handle for the allocation behind a descriptor of any process, which stays the
        caller's (cuMemImportFromShareableHandle). To be released."""

    # -- legacy IPC (current context) --------------------------------------------------------------

    def ipc_handle(self, address: int) -> bytes:
        """The 64-byte handle of the allocation that `address` is in: it opens at the allocation's
        base, not at `address` (cuIpcGetMemHandle). Memory of cuMemAlloc only."""

    def ipc_open(self, handle: bytes) -> int:
        """Another process's allocation at an address of this one; counted per context
        (cuIpcOpenMemHandle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS). Raises CudaError for a handle
        of freed memory, and in the process that exported it."""

    def ipc_close(self, address: int) -> None:
        """cuIpcCloseMemHandle, with what `ipc_open` gave. The exporter's memory stays."""

    # -- streams and events (current context) ------------------------------------------------------

    def stream_create(self) -> int:
        """A stream that does not wait for the default stream (CU_STREAM_NON_BLOCKING)."""

    def stream_destroy(self, stream: int) -> None:
        """Returns at once; what is queued still runs (cuStreamDestroy)."""

    def stream_synchronize(self, stream: int) -> None:
        """Wait for what is queued (cuStreamSynchronize). Raises what the work failed with."""

    def stream_query(self, stream: int) -> bool:
        """Is everything done? Raises what the work failed with (cuStreamQuery)."""

    def stream_wait_event(self, stream: int, event: int) -> None:
        """What is queued from now on waits for the event's last record (cuStreamWaitEvent)."""

    def event_create(self) -> int:
        """Without timing; waiting for it sleeps, it does not spin
        (CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC)."""

    def event_destroy(self, event: int) -> None:
        """cuEventDestroy."""

    def event_record(self, event: int, stream: int) -> None:
        """The event happens when what is queued now is done (cuEventRecord)."""

    def event_query(self, event: int) -> bool:
        """Has it happened? True for one that was never recorded (cuEventQuery)."""

    def event_synchronize(self, event: int) -> None:
        """Sleep until it has (cuEventSynchronize)."""

    # -- copies, queued on a stream (current context) ----------------------------------------------

    def copy_htod(self, target: int, host: int, nbytes: int, stream: int) -> None:
        """cuMemcpyHtoDAsync. Only from pinned memory is it a DMA beside the CPU, and then the
        host's bytes must stay as they are until it is done."""

    def copy_dtoh(self, host: int, source: int, nbytes: int, stream: int) -> None:
        """cuMemcpyDtoHAsync."""

    def copy_dtod(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Within what the current context can reach (cuMemcpyDtoDAsync)."""

    def memset(self, address: int, value: int, nbytes: int, stream: int) -> None:
        """`nbytes` bytes of `value` (cuMemsetD8Async)."""

    # -- host memory (current context) -------------------------------------------------------------

    def host_alloc(self, nbytes: int) -> int:
        """Pinned host memory, for all contexts, mapped for the devices
        (cuMemHostAlloc, PORTABLE | DEVICEMAP)."""

    def host_free(self, address: int) -> None:
        """cuMemFreeHost."""

    def host_register(self, address: int, nbytes: int) -> None:
        """Pin memory that exists (cuMemHostRegister, PORTABLE | DEVICEMAP)."""

    def host_unregister(self, address: int) -> None:
        """cuMemHostUnregister."""

    def host_device_pointer(self, address: int) -> int:
        """Where the current device sees pinned memory (cuMemHostGetDevicePointer)."""

    # -- kernels (current context) -----------------------------------------------------------------

    def module_load(self, image: bytes) -> int:
        """A module from a cubin for this device (cuModuleLoadData). It stays with the context."""

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
        """Queue a kernel whose parameters are all of 64 bits (cuLaunchKernel)."""

    # -- words that streams wait for (current context) ---------------------------------------------

    def stream_wait_value(self, stream: int, address: int, value: int) -> None:
        """What is queued from now on waits until the 32-bit word at device address `address` is
        >= `value`, cyclically (cuStreamWaitValue32, GEQ)."""


_lock = threading.Lock()
_driver: Driver | CudaUnavailableError | None = None


def load() -> Driver:
    """This process's driver, initialised; made once. Raises CudaUnavailableError, which says why
    there is none: no bindings, no libcuda, no GPU, a driver that is too old or does not match."""
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
    """Is there CUDA with at least one GPU? Never raises."""
    try:
        driver = load()
        names = [driver.device_name(ordinal) for ordinal in range(driver.device_count())]
    except CudaError as error:
        return Unavailable(str(error))
    return Viable(f"CUDA {format_version(driver.version())}: {', '.join(names)}")


def format_version(version: int) -> str:
    """13020 -> "13.2"."""
    return f"{version // 1000}.{version % 1000 // 10}"


@contextlib.contextmanager
def installed(driver: Driver) -> Iterator[None]:
    """Have `load` return `driver` meanwhile, as tests do with `tests.support.fake_cuda`."""
    global _driver
    with _lock:
        before, _driver = _driver, driver
    try:
        yield
    finally:
        with _lock:
            _driver = before
