"""The driver calls that mx uses, over NVIDIA's cuda-bindings, 12.9 to 13.x, and over plain ints.

Addresses, contexts, streams, events and allocation handles are ints; devices are ordinals of this
process (after CUDA_VISIBLE_DEVICES); lengths are bytes. Calls that need a current context are
marked: `Device.current()` of `mx.cuda.device` sets one. A call that fails raises `CudaError`
(`CudaMemoryError` if memory is short), which names the call and CUDA's code; the caller decides
whether a peer is to blame. Nothing here owns resources: the objects of `mx.cuda.device` and
`mx.cuda.vmm` do.

Semantics are those of the functions named in each docstring (CUDA driver API reference, 12.9 and
13.x). All methods are thread-safe; a current context is per thread.

The library is found when the first driver is made. Its functions return tuples of a CUresult and
their results; each is unpacked here, in one place, and a failure becomes a `CudaError`. They
release the GIL.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Sequence
from types import ModuleType
from typing import Any, final

from mx.cuda.calling import DriverCalls
from mx.cuda.driver import IPC_HANDLE_BYTES, DeviceAttribute, PointerInfo
from mx.cuda.errors import CudaError, CudaForkError, CudaUnavailableError, cuda_error
from mx.units import format_bytes

_NAME_BYTES = 256
#: cuda-bindings 12.9 came with CUDA 12.9; drivers of all of CUDA 12 work with it (minor version
#: compatibility), older ones do not.
_OLDEST_DRIVER = 12000


@final
class Driver(DriverCalls):
    """The driver. Raises CudaUnavailableError if CUDA can't be used, and CudaForkError where that
    is since this process was forked from one that uses it."""

    def __init__(self, module: ModuleType | None = None) -> None:
        DriverCalls.__init__(self, module)
        try:
            self._call("cuInit", 0)
            self._version = int(self._call("cuDriverGetVersion"))
            count = self.device_count()
        except CudaForkError:
            raise
        except CudaError as error:
            raise CudaUnavailableError(
                error.message, hint=error.hint, call=error.call, code=error.code
            ) from None
        except (OSError, RuntimeError) as error:
            # Which of these the bindings raise without libcuda.so.1 depends on their version.
            raise CudaUnavailableError(
                "libcuda, the NVIDIA driver's library, was not found",
                hint="install the NVIDIA driver; in a container, give it the GPUs (--gpus all)",
            ) from error
        if self._version < _OLDEST_DRIVER:
            raise CudaUnavailableError(
                f"the NVIDIA driver is of CUDA {self._version // 1000}, which is too old",
                hint="update the NVIDIA driver to one of CUDA 12 or later",
            )
        if not count:
            raise cuda_unavailable("cuDeviceGetCount", "CUDA_ERROR_NO_DEVICE")
        d = self._d
        self._fd_type = d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._attribute = d.CUpointer_attribute

    # -- what there is; no context needed ----------------------------------------------------------

    def version(self) -> int:
        """Return the driver's CUDA version: 13000 is 13.0 (cuDriverGetVersion)."""
        return self._version

    def device_count(self) -> int:
        """cuDeviceGetCount."""
        return int(self._call("cuDeviceGetCount"))

    def _device(self, ordinal: int) -> Any:
        return self._call("cuDeviceGet", ordinal)

    def device_uuid(self, ordinal: int) -> str:
        """Return the UUID as NVML writes it, "GPU-xxxxxxxx-xxxx-...", and "MIG-..." for an instance
        of a GPU that is divided (cuDeviceGetUuid)."""
        # The first version names the whole GPU of a MIG instance; in 13 there is only the second.
        name = "cuDeviceGetUuid_v2" if hasattr(self._d, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        found = self._call(name, self._device(ordinal))
        # "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
        kind = "MIG" if " MIG " in self.device_name(ordinal) else "GPU"
        return f"{kind}-{uuid.UUID(bytes=bytes(found.bytes))}"

    def device_name(self, ordinal: int) -> str:
        """cuDeviceGetName."""
        name: bytes = self._call("cuDeviceGetName", _NAME_BYTES, self._device(ordinal))
        return name.split(b"\0")[0].decode(errors="replace")

    def device_attribute(self, ordinal: int, attribute: DeviceAttribute) -> int:
        """cuDeviceGetAttribute."""
        known = getattr(self._d.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{attribute.value}")
        return int(self._call("cuDeviceGetAttribute", known, self._device(ordinal)))

    def can_access_peer(self, ordinal: int, peer: int) -> bool:
        """Return True if kernels and copy engines of `ordinal` can access `peer`'s memory directly
        (cuDeviceCanAccessPeer)."""
        return bool(self._call("cuDeviceCanAccessPeer", self._device(ordinal), self._device(peer)))

    # -- contexts ----------------------------------------------------------------------------------

    def context_retain(self, ordinal: int) -> int:
        """Return the device's primary context, which torch and the runtime API use; created if
        necessary, and counted (cuDevicePrimaryCtxRetain)."""
        return int(self._call("cuDevicePrimaryCtxRetain", self._device(ordinal)))

    def context_release(self, ordinal: int) -> None:
        """Undo one `context_retain`; the last one ends the context and everything in it
        (cuDevicePrimaryCtxRelease)."""
        self._call("cuDevicePrimaryCtxRelease", self._device(ordinal))

    def context_active(self, ordinal: int) -> bool:
        """Return True if this process uses the device: its primary context exists
        (cuDevicePrimaryCtxGetState)."""
        _flags, active = self._call("cuDevicePrimaryCtxGetState", self._device(ordinal))
        return bool(active)

    def context_push(self, context: int) -> None:
        """Make `context` this thread's current context (cuCtxPushCurrent)."""
        self._call("cuCtxPushCurrent", self._d.CUcontext(context))

    def context_pop(self) -> None:
        """Restore the thread's context before the last push (cuCtxPopCurrent)."""
        self._call("cuCtxPopCurrent")

    def context_synchronize(self) -> None:
        """Wait for all work of the current context, of any thread (cuCtxSynchronize). This
        invalidates every stream capture in the context."""
        self._call("cuCtxSynchronize")

    def exchange_capture_mode(self, mode: int) -> int:
        """Set how this thread heeds stream captures, RELAXED_CAPTURE or what this returned before,
        and return the mode until now (cuThreadExchangeStreamCaptureMode)."""
        known = self._d.CUstreamCaptureMode(mode)
        return int(self._call("cuThreadExchangeStreamCaptureMode", known))

    def enable_peer_access(self, peer_context: int) -> None:
        """Let the current context access memory of `peer_context` that cuMemAlloc made
        (cuCtxEnablePeerAccess). It works in one direction, and may be enabled already. VMM memory
        needs `vmm_set_access` instead."""
        try:
            self._call("cuCtxEnablePeerAccess", self._d.CUcontext(peer_context), 0)
        except CudaError as error:
            if error.code != "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED":
                raise

    # -- memory (current context) ------------------------------------------------------------------

    def mem_info(self) -> tuple[int, int]:
        """Return the free and total bytes of the current device (cuMemGetInfo)."""
        free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    def mem_alloc(self, nbytes: int) -> int:
        """Allocate device memory, aligned to at least 256 bytes; `nbytes` > 0 (cuMemAlloc)."""
        return int(self._call("cuMemAlloc", nbytes, detail=format_bytes(nbytes)))

    def mem_free(self, address: int) -> None:
        """Free memory after the work that uses it (cuMemFree). Other processes that opened it by
        an IPC handle break."""
        self._call("cuMemFree", address)

    def pointer(self, address: int) -> PointerInfo:
        """Return the allocation of `address` (cuPointerGetAttribute, cuMemGetAddressRange). Raises
        CudaError if it is not device memory, or was freed."""
        names = self._attribute
        ordinal = self._pointer(names.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)
        base, nbytes = self._call("cuMemGetAddressRange", address, detail=hex(address))
        handles = self._pointer(names.CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, address)
        return PointerInfo(
            ordinal,
            int(base),
            int(nbytes),
            self._pointer(names.CU_POINTER_ATTRIBUTE_BUFFER_ID, address),
            bool(self._pointer(names.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, address)),
            bool(handles & int(self._fd_type)),
        )

    def _pointer(self, attribute: Any, address: int) -> int:
        return int(self._call("cuPointerGetAttribute", attribute, address, detail=hex(address)))

    # -- virtual memory management -----------------------------------------------------------------

    def _locate(self, location: Any, where: int, host: bool) -> None:
        kinds = self._d.CUmemLocationType
        location.type = (
            kinds.CU_MEM_LOCATION_TYPE_HOST_NUMA if host else kinds.CU_MEM_LOCATION_TYPE_DEVICE
        )
        location.id = where

    def _properties(self, where: int, host: bool) -> Any:
        d = self._d
        properties = d.CUmemAllocationProp()
        properties.type = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = self._fd_type
        self._locate(properties.location, where, host)
        if not host and self.device_attribute(where, DeviceAttribute.RDMA_VMM):
            properties.allocFlags.gpuDirectRDMACapable = 1
        return properties

    def vmm_granularity(self, where: int, *, host: bool = False) -> int:
        """Return the granularity of sizes and addresses of exportable allocations
        (cuMemGetAllocationGranularity, RECOMMENDED), placed as by `vmm_create`."""
        flags = self._d.CUmemAllocationGranularity_flags
        return int(
            self._call(
                "cuMemGetAllocationGranularity",
                self._properties(where, host),
                flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
            )
        )

    def vmm_create(self, where: int, nbytes: int, *, host: bool = False) -> int:
        """Allocate memory of a device, or with `host` pinned memory of a NUMA node, that can be
        exported as a descriptor, and return its handle; it has no address yet (cuMemCreate,
        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, DEVICE or HOST_NUMA)."""
        properties, detail = self._properties(where, host), format_bytes(nbytes)
        return int(self._call("cuMemCreate", nbytes, properties, 0, detail=detail))

    def vmm_release(self, handle: int) -> None:
        """Release a handle; the memory is freed with its last map, handle and descriptor
        (cuMemRelease)."""
        self._call("cuMemRelease", handle)

    def vmm_retain(self, address: int) -> int:
        """Return another handle of the allocation mapped at `address`, which the caller releases
        (cuMemRetainAllocationHandle). For VMM memory only, such as torch's expandable segments."""
        return int(self._call("cuMemRetainAllocationHandle", address, detail=hex(address)))

    def vmm_reserve(self, nbytes: int, wanted: int = 0) -> int:
        """Reserve a range of addresses without memory, at `wanted` if that is possible: it is only
        a hint (cuMemAddressReserve)."""
        detail = format_bytes(nbytes)
        return int(self._call("cuMemAddressReserve", nbytes, 0, wanted, 0, detail=detail))

    def vmm_unreserve(self, address: int, nbytes: int) -> None:
        """Free a range of addresses, exactly as reserved and unmapped (cuMemAddressFree)."""
        self._call("cuMemAddressFree", address, nbytes)

    def vmm_map(self, address: int, nbytes: int, handle: int) -> None:
        """Map the start of the allocation at `address`, without access yet (cuMemMap)."""
        self._call("cuMemMap", address, nbytes, 0, handle, 0, detail=format_bytes(nbytes))

    def vmm_unmap(self, address: int, nbytes: int) -> None:
        """Unmap a range (cuMemUnmap). Synchronise first: running work that uses it would fault."""
        self._call("cuMemUnmap", address, nbytes)

    def vmm_set_access(self, address: int, nbytes: int, where: int, *, host: bool = False) -> None:
        """Let a device, or with `host` the processors, read and write a mapped range
        (cuMemSetAccess). The processors may have only what was created with `host`."""
        d = self._d
        access = d.CUmemAccessDesc()
        self._locate(access.location, where, host)
        access.flags = d.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call("cuMemSetAccess", address, nbytes, [access], 1)

    def vmm_export_fd(self, handle: int) -> int:
        """Return a new descriptor of the allocation, which the caller closes
        (cuMemExportToShareableHandle)."""
        return int(self._call("cuMemExportToShareableHandle", handle, self._fd_type, 0))

    def vmm_import_fd(self, descriptor: int) -> int:
        """Return a handle of the allocation behind a descriptor of any process, which the caller
        releases; it keeps the descriptor (cuMemImportFromShareableHandle)."""
        return int(self._call("cuMemImportFromShareableHandle", descriptor, self._fd_type))

    # -- legacy IPC (current context) --------------------------------------------------------------

    def ipc_handle(self, address: int) -> bytes:
        """Return the 64-byte handle of the allocation that contains `address`; it opens at the
        allocation's base, not at `address` (cuIpcGetMemHandle). For memory of cuMemAlloc only."""
        handle = self._call("cuIpcGetMemHandle", address, detail=hex(address))
        return ctypes.string_at(int(handle.getPtr()), IPC_HANDLE_BYTES)

    def ipc_open(self, handle: bytes) -> int:
        """Map an allocation of another process and return its address here; counted per context
        (cuIpcOpenMemHandle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS). Raises CudaError for a handle
        of freed memory, and in the process that exported it."""
        if len(handle) != IPC_HANDLE_BYTES:
            raise ValueError(f"an IPC handle has {IPC_HANDLE_BYTES} bytes, not {len(handle)}")
        structure = self._d.CUipcMemHandle()
        ctypes.memmove(int(structure.getPtr()), handle, IPC_HANDLE_BYTES)
        flag = self._d.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(self._call("cuIpcOpenMemHandle", structure, int(flag)))

    def ipc_close(self, address: int) -> None:
        """Close an address that `ipc_open` returned (cuIpcCloseMemHandle). The exporter's memory
        stays."""
        self._call("cuIpcCloseMemHandle", address)

    # -- streams and events (current context) ------------------------------------------------------

    def stream_create(self) -> int:
        """Create a stream that does not wait for the default one (CU_STREAM_NON_BLOCKING)."""
        flag = self._d.CUstream_flags.CU_STREAM_NON_BLOCKING
        return int(self._call("cuStreamCreate", int(flag)))

    def stream_destroy(self, stream: int) -> None:
        """Destroy a stream at once; its queued work still runs (cuStreamDestroy)."""
        self._call("cuStreamDestroy", stream)

    def stream_synchronize(self, stream: int) -> None:
        """Wait for the queued work and raise its error (cuStreamSynchronize)."""
        self._call("cuStreamSynchronize", stream)

    def stream_query(self, stream: int) -> bool:
        """Return True if all work is done; raise its error (cuStreamQuery)."""
        return self._ready("cuStreamQuery", stream)

    def _ready(self, call: str, what: int) -> bool:
        (result,) = getattr(self._d, call)(what)
        if result == self._d.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if int(result):
            raise self._error(call, result, "")
        return True

    def stream_wait_event(self, stream: int, event: int) -> None:
        """Make later work wait for the event's last record (cuStreamWaitEvent)."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def event_create(self) -> int:
        """Create an event without timing, whose waiters sleep and do not spin
        (CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC)."""
        flags = self._d.CUevent_flags
        return int(
            self._call(
                "cuEventCreate",
                int(flags.CU_EVENT_DISABLE_TIMING) | int(flags.CU_EVENT_BLOCKING_SYNC),
            )
        )

    def event_destroy(self, event: int) -> None:
        """cuEventDestroy."""
        self._call("cuEventDestroy", event)

    def event_record(self, event: int, stream: int) -> None:
        """Make the event happen when the work queued now is done (cuEventRecord)."""
        self._call("cuEventRecord", event, stream)

    def event_query(self, event: int) -> bool:
        """Return True if the event has happened or was never recorded (cuEventQuery)."""
        return self._ready("cuEventQuery", event)

    def event_synchronize(self, event: int) -> None:
        """Sleep until the event has happened (cuEventSynchronize)."""
        self._call("cuEventSynchronize", event)

    # -- copies, queued on a stream (current context) ----------------------------------------------

    def copy_htod(self, target: int, host: int, nbytes: int, stream: int) -> None:
        """cuMemcpyHtoDAsync. It is asynchronous only from pinned memory, and then the host's bytes
        must not change until it is done."""
        self._call("cuMemcpyHtoDAsync", target, host, nbytes, stream)

    def copy_dtoh(self, host: int, source: int, nbytes: int, stream: int) -> None:
        """cuMemcpyDtoHAsync."""
        self._call("cuMemcpyDtoHAsync", host, source, nbytes, stream)

    def copy_dtod(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy between addresses that the current context can access (cuMemcpyDtoDAsync)."""
        self._call("cuMemcpyDtoDAsync", target, source, nbytes, stream)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy between addresses of devices or of host memory that the driver made
        (cuMemcpyAsync)."""
        self._call("cuMemcpyAsync", target, source, nbytes, stream)

    def memset(self, address: int, value: int, nbytes: int, stream: int) -> None:
        """Set `nbytes` bytes to `value` (cuMemsetD8Async)."""
        self._call("cuMemsetD8Async", address, value, nbytes, stream)

    # -- host memory (current context) -------------------------------------------------------------

    def host_alloc(self, nbytes: int) -> int:
        """Allocate pinned host memory, for all contexts, mapped for the devices
        (cuMemHostAlloc, PORTABLE | DEVICEMAP)."""
        d = self._d
        flags = int(d.CU_MEMHOSTALLOC_PORTABLE) | int(d.CU_MEMHOSTALLOC_DEVICEMAP)
        return int(self._call("cuMemHostAlloc", nbytes, flags, detail=format_bytes(nbytes)))

    def host_free(self, address: int) -> None:
        """cuMemFreeHost."""
        self._call("cuMemFreeHost", address)

    def host_register(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        """Pin existing memory (cuMemHostRegister, PORTABLE | DEVICEMAP); with `read_only` for
        copies from it only, as memory that is mapped to be read only needs (READ_ONLY, see
        `DeviceAttribute.READ_ONLY_REGISTER`)."""
        d = self._d
        flags = int(d.CU_MEMHOSTREGISTER_PORTABLE) | int(d.CU_MEMHOSTREGISTER_DEVICEMAP)
        if read_only:
            flags |= int(d.CU_MEMHOSTREGISTER_READ_ONLY)
        detail = format_bytes(nbytes)
        self._call("cuMemHostRegister", address, nbytes, flags, detail=detail)

    def host_unregister(self, address: int) -> None:
        """cuMemHostUnregister."""
        self._call("cuMemHostUnregister", address)

    def host_device_pointer(self, address: int) -> int:
        """Return the current device's address of pinned memory (cuMemHostGetDevicePointer)."""
        return int(self._call("cuMemHostGetDevicePointer", address, 0))

    # -- kernels (current context) -----------------------------------------------------------------

    def module_load(self, image: bytes) -> int:
        """Load a cubin for this device (cuModuleLoadData). The module stays with the context."""
        return int(self._call("cuModuleLoadData", image, detail=format_bytes(len(image))))

    def module_function(self, module: int, name: str) -> int:
        """cuModuleGetFunction."""
        handle = self._d.CUmodule(module)
        return int(self._call("cuModuleGetFunction", handle, name.encode(), detail=name))

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
        count = len(parameters)
        values = (ctypes.c_uint64 * count)(*parameters)
        first = ctypes.addressof(values)
        places = (ctypes.c_void_p * count)(*(first + 8 * i for i in range(count)))
        self._call(
            "cuLaunchKernel",
            self._d.CUfunction(function),
            *(*grid, 1),
            *(threads, 1, 1),
            shared_nbytes,
            stream,
            ctypes.addressof(places),
            0,
        )

    # -- words that streams wait for (current context) ---------------------------------------------

    def stream_wait_value(self, stream: int, address: int, value: int) -> None:
        """Make later work wait until the 32-bit word at device address `address` is >= `value`,
        cyclically (cuStreamWaitValue32, GEQ)."""
        flag = self._d.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        word = self._d.cuuint32_t(value)
        self._call("cuStreamWaitValue32", stream, address, word, int(flag))


def cuda_unavailable(call: str, code: str) -> CudaUnavailableError:
    """Return `cuda_error` as the reason why CUDA can't be used at all."""
    error = cuda_error(call, code)
    return CudaUnavailableError(error.message, hint=error.hint, call=call, code=code)
