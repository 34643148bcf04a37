"""The memory of a fake CUDA driver: cuMemAlloc, virtual memory management, IPC, pinned."""

from __future__ import annotations

import os
import struct

from mx.cuda.driver import IPC_HANDLE_BYTES, PointerInfo
from mx.cuda.errors import cuda_error
from mx.units import MIB
from tests.support import fake_cuda_memory as memory
from tests.support.fake_cuda_base import FakeBase, driver_call, fake_uuid
from tests.support.fake_cuda_memory import Range

GRANULARITY_BYTES = 2 * MIB
#: id of the driver, its process, its descriptor, the memfd's inode, the bytes, the GPU.
_IPC = struct.Struct("<QiiQQi")


class FakeAllocator(FakeBase):
    """The calls that give memory and take it back."""

    # -- memory ------------------------------------------------------------------------------------

    @driver_call
    def mem_info(self) -> tuple[int, int]:
        ordinal = self._ordinal("cuMemGetInfo")
        return self._memory_nbytes - self._used[ordinal], self._memory_nbytes

    @driver_call
    def mem_alloc(self, nbytes: int) -> int:
        ordinal = self._ordinal("cuMemAlloc")
        self._take("cuMemAlloc", ordinal, nbytes)
        fd = memory.new_memfd(self._gpus[ordinal], nbytes)
        address = memory.back(fd, nbytes)
        self._ranges.add(Range(address, nbytes, ordinal, "alloc", next(self._ids), fd))
        return address

    @driver_call
    def mem_free(self, address: int) -> None:
        self._ordinal("cuMemFree")
        found = self._ranges.at(address)
        if found is None or found.kind != "alloc" or found.address != address:
            raise cuda_error("cuMemFree", "CUDA_ERROR_INVALID_VALUE")
        self._drain(found.ordinal)
        self._ranges.pop(address, "alloc")
        self._used[found.ordinal] -= found.nbytes
        memory.unmap(address, found.nbytes)
        os.close(found.fd)

    @driver_call
    def pointer(self, address: int) -> PointerInfo:
        found = self._ranges.at(address)
        if found is None or found.ordinal < 0:
            raise cuda_error("cuPointerGetAttribute", "CUDA_ERROR_INVALID_VALUE")
        return PointerInfo(
            found.ordinal,
            found.address,
            found.nbytes,
            found.buffer_id,
            found.kind == "alloc",
            found.kind == "vmm",
        )

    # -- virtual memory management -----------------------------------------------------------------

    @driver_call
    def vmm_granularity(self, ordinal: int) -> int:
        return GRANULARITY_BYTES

    @driver_call
    def vmm_create(self, ordinal: int, nbytes: int) -> int:
        if not self._vmm:
            raise cuda_error("cuMemCreate", "CUDA_ERROR_NOT_SUPPORTED")
        if nbytes % GRANULARITY_BYTES:
            raise cuda_error("cuMemCreate", "CUDA_ERROR_INVALID_VALUE")
        self._take("cuMemCreate", ordinal, nbytes)
        fd = memory.new_memfd(self._gpus[ordinal], nbytes)
        handle = next(self._ids)
        self._handles[handle] = (fd, ordinal, nbytes)
        return handle

    @driver_call
    def vmm_release(self, handle: int) -> None:
        if handle not in self._handles:
            raise cuda_error("cuMemRelease", "CUDA_ERROR_INVALID_VALUE")
        fd, ordinal, nbytes = self._handles.pop(handle)
        self._give_back(fd, ordinal, nbytes)

    def _give_back(self, fd: int, ordinal: int, nbytes: int) -> None:
        """An allocation is no longer used once neither a handle nor a map of it is left."""
        inode = os.fstat(fd).st_ino
        os.close(fd)
        left = [other for other, _, _ in self._handles.values()]
        left += [found.fd for found in self._ranges if found.kind == "vmm"]
        if all(os.fstat(other).st_ino != inode for other in left):
            self._used[ordinal] -= nbytes

    @driver_call
    def vmm_retain(self, address: int) -> int:
        found = self._ranges.at(address)
        if found is None or found.kind != "vmm":
            raise cuda_error("cuMemRetainAllocationHandle", "CUDA_ERROR_INVALID_VALUE")
        handle = next(self._ids)
        self._handles[handle] = (os.dup(found.fd), found.ordinal, found.nbytes)
        return handle

    @driver_call
    def vmm_reserve(self, nbytes: int) -> int:
        if nbytes <= 0 or nbytes % GRANULARITY_BYTES:
            raise cuda_error("cuMemAddressReserve", "CUDA_ERROR_INVALID_VALUE")
        address = memory.reserve(nbytes, GRANULARITY_BYTES)
        self._reservations[address] = nbytes
        return address

    @driver_call
    def vmm_unreserve(self, address: int, nbytes: int) -> None:
        if self._reservations.get(address) != nbytes or self._ranges.overlapping(address, nbytes):
            raise cuda_error("cuMemAddressFree", "CUDA_ERROR_INVALID_VALUE")
        del self._reservations[address]
        memory.unmap(address, nbytes)

    @driver_call
    def vmm_map(self, address: int, nbytes: int, handle: int) -> None:
        fd, ordinal, size = self._handles.get(handle, (-1, -1, -1))
        reserved = any(
            base <= address and address + nbytes <= base + length
            for base, length in self._reservations.items()
        )
        if fd < 0 or not reserved or nbytes != size or self._ranges.overlapping(address, nbytes):
            raise cuda_error("cuMemMap", "CUDA_ERROR_INVALID_VALUE")
        mine = os.dup(fd)
        memory.back(mine, nbytes, address)
        self._ranges.add(Range(address, nbytes, ordinal, "vmm", next(self._ids), mine))

    @driver_call
    def vmm_unmap(self, address: int, nbytes: int) -> None:
        found = self._ranges.at(address)
        if found is None or (found.kind, found.address, found.nbytes) != ("vmm", address, nbytes):
            raise cuda_error("cuMemUnmap", "CUDA_ERROR_INVALID_VALUE")
        self._ranges.pop(address, "vmm")
        memory.unback(address, nbytes)
        self._give_back(found.fd, found.ordinal, found.nbytes)

    @driver_call
    def vmm_set_access(self, address: int, nbytes: int, ordinal: int) -> None:
        spans = self._ranges.spans(address, nbytes)
        if not spans or any(found.kind != "vmm" for found in spans):
            raise cuda_error("cuMemSetAccess", "CUDA_ERROR_INVALID_VALUE")
        for found in spans:
            if found.ordinal != ordinal and not self._peers:
                raise cuda_error("cuMemSetAccess", "CUDA_ERROR_INVALID_DEVICE")
            found.readers.add(ordinal)

    @driver_call
    def vmm_export_fd(self, handle: int) -> int:
        if handle not in self._handles:
            raise cuda_error("cuMemExportToShareableHandle", "CUDA_ERROR_INVALID_VALUE")
        return os.dup(self._handles[handle][0])

    @driver_call
    def vmm_import_fd(self, descriptor: int) -> int:
        call = "cuMemImportFromShareableHandle"
        uuid = memory.uuid_of(descriptor)
        if uuid is None:
            raise cuda_error(call, "CUDA_ERROR_INVALID_VALUE")
        if uuid not in self._gpus:
            raise cuda_error(call, "CUDA_ERROR_INVALID_DEVICE")
        ordinal, nbytes = self._gpus.index(uuid), os.fstat(descriptor).st_size
        inode = os.fstat(descriptor).st_ino
        mine = [fd for fd, _, _ in self._handles.values()]
        mine += [found.fd for found in self._ranges if found.kind == "vmm"]
        if all(os.fstat(fd).st_ino != inode for fd in mine):
            self._used[ordinal] += nbytes  # counted once in each process that has it
        handle = next(self._ids)
        self._handles[handle] = (os.dup(descriptor), ordinal, nbytes)
        return handle

    # -- legacy IPC --------------------------------------------------------------------------------

    @driver_call
    def ipc_handle(self, address: int) -> bytes:
        self._ordinal("cuIpcGetMemHandle")
        found = self._ranges.at(address)
        if found is None or found.kind != "alloc":
            raise cuda_error("cuIpcGetMemHandle", "CUDA_ERROR_INVALID_VALUE")
        inode = os.fstat(found.fd).st_ino
        gpu = int(self._gpus[found.ordinal].rpartition("-")[2], 16)
        packed = _IPC.pack(self._id, os.getpid(), found.fd, inode, found.nbytes, gpu)
        return packed.ljust(IPC_HANDLE_BYTES, b"\0")

    @driver_call
    def ipc_open(self, handle: bytes) -> int:
        call = "cuIpcOpenMemHandle"
        ordinal = self._ordinal(call)
        owner, pid, fd, inode, nbytes, gpu = _IPC.unpack_from(handle)
        if owner == self._id:
            raise cuda_error(call, "CUDA_ERROR_INVALID_CONTEXT")
        if fake_uuid(gpu) not in self._gpus:
            raise cuda_error(call, "CUDA_ERROR_INVALID_DEVICE")
        for found in self._ranges:
            if found.kind == "ipc" and os.fstat(found.fd).st_ino == inode:
                self._opened[found.address] += 1
                return found.address
        try:
            mine = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            raise cuda_error(call, "CUDA_ERROR_INVALID_VALUE") from None
        if os.fstat(mine).st_ino != inode or memory.uuid_of(mine) != fake_uuid(gpu):
            os.close(mine)
            raise cuda_error(call, "CUDA_ERROR_INVALID_VALUE")
        address = memory.back(mine, nbytes)
        where = self._gpus.index(fake_uuid(gpu))
        readers = {ordinal} if self._peers or ordinal == where else set()
        found = Range(address, nbytes, where, "ipc", next(self._ids), mine, readers=readers)
        self._ranges.add(found)
        self._opened[address] = 1
        return address

    @driver_call
    def ipc_close(self, address: int) -> None:
        found = self._ranges.at(address)
        if found is None or found.kind != "ipc" or found.address != address:
            raise cuda_error("cuIpcCloseMemHandle", "CUDA_ERROR_INVALID_VALUE")
        self._opened[address] -= 1
        if not self._opened[address]:
            self._drain(self._ordinal("cuIpcCloseMemHandle"))
            self._ranges.pop(address, "ipc")
            memory.unmap(address, found.nbytes)
            os.close(found.fd)

    # -- host memory -------------------------------------------------------------------------------

    @driver_call
    def host_alloc(self, nbytes: int) -> int:
        self._ordinal("cuMemHostAlloc")
        if nbytes <= 0:
            raise cuda_error("cuMemHostAlloc", "CUDA_ERROR_INVALID_VALUE")
        fd = memory.new_memfd("pinned", nbytes)
        address = memory.back(fd, nbytes)
        self._ranges.add(Range(address, nbytes, -1, "host", next(self._ids), fd))
        return address

    @driver_call
    def host_free(self, address: int) -> None:
        found = self._ranges.pop(address, "host")
        if found is None:
            raise cuda_error("cuMemFreeHost", "CUDA_ERROR_INVALID_VALUE")
        memory.unmap(address, found.nbytes)
        os.close(found.fd)

    @driver_call
    def host_register(self, address: int, nbytes: int) -> None:
        self._ordinal("cuMemHostRegister")
        if nbytes <= 0:
            raise cuda_error("cuMemHostRegister", "CUDA_ERROR_INVALID_VALUE")
        if self._ranges.overlapping(address, nbytes):
            raise cuda_error("cuMemHostRegister", "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED")
        self._ranges.add(Range(address, nbytes, -1, "registered", next(self._ids)))

    @driver_call
    def host_unregister(self, address: int) -> None:
        if self._ranges.pop(address, "registered") is None:
            raise cuda_error("cuMemHostUnregister", "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED")

    @driver_call
    def host_device_pointer(self, address: int) -> int:
        found = self._ranges.at(address)
        if found is None or found.ordinal >= 0:
            raise cuda_error("cuMemHostGetDevicePointer", "CUDA_ERROR_INVALID_VALUE")
        return address
