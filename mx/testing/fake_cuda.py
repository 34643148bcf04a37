"""A CUDA driver over host memory, for tests where there is no GPU: `mx.cuda.driver.Driver`.

It has several GPUs with fixed UUIDs, whose memory is memfds, so that descriptors and IPC handles
work between real processes of one user. It is strict where CUDA is undefined or merely slow:
work is done no earlier than somebody waits for it (see `mx.testing.fake_cuda_streams`), fresh
memory is garbage, and addresses that a device may not touch break the context for good, as an
illegal address does. `live()` names whatever was not given back, `fail()` makes calls fail.

    with driver.installed(FakeDriver(gpus=2)) as ...: mx.pull(..., device="cuda:1")
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from mx.cuda.driver import IPC_HANDLE_BYTES, DeviceAttribute, PointerInfo
from mx.cuda.errors import FATAL_CODES, cuda_error
from mx.testing import fake_cuda_memory as memory
from mx.testing.fake_cuda_memory import Range, Ranges
from mx.testing.fake_cuda_streams import FakeEvent, FakeStream, Step
from mx.testing.fake_kernels import KERNELS
from mx.units import GIB, MIB

GRANULARITY_BYTES = 2 * MIB
#: uuid of the driver, its process, its descriptor, the memfd's inode, the bytes, the GPU.
_IPC = struct.Struct("<QiiQQi")

P = ParamSpec("P")
T = TypeVar("T")


def fake_uuid(index: int) -> str:
    return f"GPU-00000000-0000-4000-8000-{index:012x}"


def _call(
    method: Callable[Concatenate[FakeDriver, P], T],
) -> Callable[Concatenate[FakeDriver, P], T]:
    """A call of the driver: counted, failing on request, and for ever once the device broke."""

    @functools.wraps(method)
    def call(self: FakeDriver, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._lock:
            name = method.__name__
            self.calls[name] += 1
            if self._broken:
                raise cuda_error(name, self._broken)
            failure = self._failures.get(name)
            if failure is not None:
                failure[1] -= 1
                if failure[1] < 0:
                    del self._failures[name]
                    raise cuda_error(name, failure[0], "as the test asked")
            return method(self, *args, **kwargs)

    return call


class FakeDriver:
    """See `mx.cuda.driver.Driver` for the calls. `first_gpu` is the number of the GPU that is
    ordinal 0 here: processes may see different ones. `vmm=False` is a GPU of old; `peers=False`
    are GPUs that can't reach each other; `eager=True` does work as soon as it is queued."""

    def __init__(
        self,
        gpus: int = 2,
        *,
        first_gpu: int = 0,
        memory_nbytes: int = GIB,
        vmm: bool = True,
        peers: bool = True,
        eager: bool = False,
    ) -> None:
        self.calls: Counter[str] = Counter()
        self._gpus = [fake_uuid(first_gpu + index) for index in range(gpus)]
        self._memory_nbytes, self._vmm, self._peers, self._eager = memory_nbytes, vmm, peers, eager
        self._id = int.from_bytes(os.urandom(8), "little")
        self._lock = threading.RLock()
        self._thread = threading.local()
        self._ids = itertools.count(1)
        self._ranges = Ranges()
        self._used = [0] * gpus
        self._contexts = [0] * gpus
        self._peered: set[tuple[int, int]] = set()
        self._handles: dict[int, tuple[int, int, int]] = {}  # handle -> (fd, ordinal, nbytes)
        self._reservations: dict[int, int] = {}
        self._streams: dict[int, FakeStream] = {}
        self._events: dict[int, FakeEvent] = {}
        self._functions: dict[int, str] = {}
        self._opened: Counter[int] = Counter()
        self._failures: dict[str, list[Any]] = {}
        self._broken = ""

    # -- for tests ---------------------------------------------------------------------------------

    def fail(self, call: str, code: str, *, after: int = 0) -> None:
        """The next `call` (a method's name) but `after` fails with CUDA's `code`, once."""
        self._failures[call] = [code, after]

    def live(self) -> list[str]:
        """What is held: "2 streams", "1 alloc"; [] if everything was given back."""
        with self._lock:
            counts = Counter(found.kind for found in self._ranges)
            counts["context"] = sum(self._contexts)
            counts["handle"] = len(self._handles)
            counts["reservation"] = len(self._reservations)
            counts["stream"] = len(self._streams)
            counts["event"] = len(self._events)
            return [f"{count} {kind}" for kind, count in sorted(counts.items()) if count]

    def end(self) -> None:
        """Give everything back, as a process's end does: for tests of broken devices."""
        with self._lock:
            for found in self._ranges:
                if found.fd >= 0:
                    memory.unmap(found.address, found.nbytes)
                    os.close(found.fd)
            for address, nbytes in self._reservations.items():
                memory.unmap(address, nbytes)
            for fd, _, _ in self._handles.values():
                os.close(fd)
            self._ranges = Ranges()
            self._reservations.clear()
            self._handles.clear()
            self._broken = "CUDA_ERROR_DEINITIALIZED"

    def used_nbytes(self, ordinal: int = 0) -> int:
        """Device memory that is allocated."""
        return self._used[ordinal]

    # -- inside ------------------------------------------------------------------------------------

    def _ordinal(self, call: str) -> int:
        stack: list[int] = getattr(self._thread, "stack", [])
        if not stack or not self._contexts[stack[-1]]:
            raise cuda_error(call, "CUDA_ERROR_INVALID_CONTEXT")
        return stack[-1]

    def _check_ordinal(self, call: str, ordinal: int) -> None:
        if not 0 <= ordinal < len(self._gpus):
            raise cuda_error(call, "CUDA_ERROR_INVALID_DEVICE")

    def _take(self, call: str, ordinal: int, nbytes: int) -> None:
        if nbytes <= 0:
            raise cuda_error(call, "CUDA_ERROR_INVALID_VALUE")
        if self._used[ordinal] + nbytes > self._memory_nbytes:
            raise cuda_error(call, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
        self._used[ordinal] += nbytes

    def _drain(self, ordinal: int) -> None:
        for stream in list(self._streams.values()):
            if stream.ordinal == ordinal:
                stream.run()

    def _queue(self, call: str, stream: int, step: Step, *, now: bool = False) -> None:
        found = self._stream(call, stream)
        found.steps.append(step)
        if now or self._eager:
            found.run()

    def _stream(self, call: str, stream: int) -> FakeStream:
        if stream not in self._streams:
            raise cuda_error(call, "CUDA_ERROR_INVALID_HANDLE")
        return self._streams[stream]

    def _event(self, call: str, event: int) -> FakeEvent:
        if event not in self._events:
            raise cuda_error(call, "CUDA_ERROR_INVALID_HANDLE")
        return self._events[event]

    def _until(self, call: str, done: Callable[[], bool]) -> None:
        """Wait outside the lock, for another thread or process to write a word or queue work."""
        while True:
            with self._lock:
                if self._broken:
                    raise cuda_error(call, self._broken)
                if done():
                    if self._broken:  # by what was done just now
                        raise cuda_error(call, self._broken)
                    return
            time.sleep(0.0005)

    def _touches(self, ordinal: int, address: int, nbytes: int) -> bool:
        """May the device touch these addresses? Breaks the context if it may not."""
        spans = self._ranges.spans(address, nbytes)
        if spans and all(
            ordinal in found.readers
            if found.kind in ("vmm", "ipc")
            else found.ordinal in (-1, ordinal) or (ordinal, found.ordinal) in self._peered
            for found in spans
        ):
            return True
        self._broken = "CUDA_ERROR_ILLEGAL_ADDRESS"
        return False

    def _copy(self, ordinal: int, target: int, source: int, nbytes: int, *sides: int) -> Step:
        """A step that copies; `sides` are the addresses that the device itself touches."""

        def step() -> bool:
            if not self._broken and all(self._touches(ordinal, side, nbytes) for side in sides):
                ctypes.memmove(target, source, nbytes)
            return True

        return step

    # -- what there is -----------------------------------------------------------------------------

    @_call
    def version(self) -> int:
        return 13000

    @_call
    def device_count(self) -> int:
        return len(self._gpus)

    @_call
    def device_uuid(self, ordinal: int) -> str:
        self._check_ordinal("cuDeviceGetUuid", ordinal)
        return self._gpus[ordinal]

    @_call
    def device_name(self, ordinal: int) -> str:
        self._check_ordinal("cuDeviceGetName", ordinal)
        return "Fake GPU"

    @_call
    def device_memory_nbytes(self, ordinal: int) -> int:
        self._check_ordinal("cuDeviceTotalMem", ordinal)
        return self._memory_nbytes

    @_call
    def device_attribute(self, ordinal: int, attribute: DeviceAttribute) -> int:
        self._check_ordinal("cuDeviceGetAttribute", ordinal)
        match attribute:
            case DeviceAttribute.COMPUTE_CAPABILITY_MAJOR:
                return 9
            case DeviceAttribute.VMM | DeviceAttribute.POSIX_FD:
                return int(self._vmm)
            case DeviceAttribute.READ_ONLY_HOST_REGISTER:
                return 1
            case _:
                return 0

    @_call
    def can_access_peer(self, ordinal: int, peer: int) -> bool:
        return self._peers and ordinal != peer

    # -- contexts ----------------------------------------------------------------------------------

    @_call
    def context_retain(self, ordinal: int) -> int:
        self._check_ordinal("cuDevicePrimaryCtxRetain", ordinal)
        self._contexts[ordinal] += 1
        return 0xC0 + ordinal

    @_call
    def context_release(self, ordinal: int) -> None:
        if not self._contexts[ordinal]:
            raise cuda_error("cuDevicePrimaryCtxRelease", "CUDA_ERROR_INVALID_CONTEXT")
        self._contexts[ordinal] -= 1

    @_call
    def context_push(self, context: int) -> None:
        ordinal = context - 0xC0
        if not 0 <= ordinal < len(self._gpus) or not self._contexts[ordinal]:
            raise cuda_error("cuCtxPushCurrent", "CUDA_ERROR_INVALID_CONTEXT")
        if not hasattr(self._thread, "stack"):
            self._thread.stack = []
        self._thread.stack.append(ordinal)

    def context_pop(self) -> None:
        if not getattr(self._thread, "stack", []):
            raise cuda_error("cuCtxPopCurrent", "CUDA_ERROR_INVALID_CONTEXT")
        self._thread.stack.pop()

    def context_synchronize(self) -> None:
        ordinal = self._ordinal("cuCtxSynchronize")

        def done() -> bool:
            streams = [s for s in list(self._streams.values()) if s.ordinal == ordinal]
            return all([stream.run() for stream in streams])

        self._until("cuCtxSynchronize", done)

    @_call
    def enable_peer_access(self, peer_context: int) -> None:
        ordinal = self._ordinal("cuCtxEnablePeerAccess")
        if not self._peers or ordinal == peer_context - 0xC0:
            raise cuda_error("cuCtxEnablePeerAccess", "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")
        self._peered.add((ordinal, peer_context - 0xC0))

    # -- memory ------------------------------------------------------------------------------------

    @_call
    def mem_info(self) -> tuple[int, int]:
        ordinal = self._ordinal("cuMemGetInfo")
        return self._memory_nbytes - self._used[ordinal], self._memory_nbytes

    @_call
    def mem_alloc(self, nbytes: int) -> int:
        ordinal = self._ordinal("cuMemAlloc")
        self._take("cuMemAlloc", ordinal, nbytes)
        fd = memory.new_memfd(self._gpus[ordinal], nbytes)
        address = memory.back(fd, nbytes)
        self._ranges.add(Range(address, nbytes, ordinal, "alloc", next(self._ids), fd))
        return address

    @_call
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

    @_call
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

    @_call
    def vmm_granularity(self, ordinal: int) -> int:
        return GRANULARITY_BYTES

    @_call
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

    @_call
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

    @_call
    def vmm_retain(self, address: int) -> int:
        found = self._ranges.at(address)
        if found is None or found.kind != "vmm":
            raise cuda_error("cuMemRetainAllocationHandle", "CUDA_ERROR_INVALID_VALUE")
        handle = next(self._ids)
        self._handles[handle] = (os.dup(found.fd), found.ordinal, found.nbytes)
        return handle

    @_call
    def vmm_reserve(self, nbytes: int, alignment: int = 0) -> int:
        if nbytes <= 0 or nbytes % GRANULARITY_BYTES:
            raise cuda_error("cuMemAddressReserve", "CUDA_ERROR_INVALID_VALUE")
        address = memory.reserve(nbytes, max(alignment, GRANULARITY_BYTES))
        self._reservations[address] = nbytes
        return address

    @_call
    def vmm_unreserve(self, address: int, nbytes: int) -> None:
        if self._reservations.get(address) != nbytes or self._ranges.overlapping(address, nbytes):
            raise cuda_error("cuMemAddressFree", "CUDA_ERROR_INVALID_VALUE")
        del self._reservations[address]
        memory.unmap(address, nbytes)

    @_call
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

    @_call
    def vmm_unmap(self, address: int, nbytes: int) -> None:
        found = self._ranges.at(address)
        if found is None or (found.kind, found.address, found.nbytes) != ("vmm", address, nbytes):
            raise cuda_error("cuMemUnmap", "CUDA_ERROR_INVALID_VALUE")
        self._ranges.pop(address, "vmm")
        memory.unback(address, nbytes)
        self._give_back(found.fd, found.ordinal, found.nbytes)

    @_call
    def vmm_set_access(
        self, address: int, nbytes: int, ordinal: int, *, writable: bool = True
    ) -> None:
        spans = self._ranges.spans(address, nbytes)
        if not spans or any(found.kind != "vmm" for found in spans):
            raise cuda_error("cuMemSetAccess", "CUDA_ERROR_INVALID_VALUE")
        for found in spans:
            if found.ordinal != ordinal and not self._peers:
                raise cuda_error("cuMemSetAccess", "CUDA_ERROR_INVALID_DEVICE")
            found.readers.add(ordinal)

    @_call
    def vmm_export_fd(self, handle: int) -> int:
        if handle not in self._handles:
            raise cuda_error("cuMemExportToShareableHandle", "CUDA_ERROR_INVALID_VALUE")
        return os.dup(self._handles[handle][0])

    @_call
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

    @_call
    def ipc_handle(self, address: int) -> bytes:
        self._ordinal("cuIpcGetMemHandle")
        found = self._ranges.at(address)
        if found is None or found.kind != "alloc":
            raise cuda_error("cuIpcGetMemHandle", "CUDA_ERROR_INVALID_VALUE")
        inode = os.fstat(found.fd).st_ino
        gpu = int(self._gpus[found.ordinal].rpartition("-")[2], 16)
        packed = _IPC.pack(self._id, os.getpid(), found.fd, inode, found.nbytes, gpu)
        return packed.ljust(IPC_HANDLE_BYTES, b"\0")

    @_call
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

    @_call
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

    # -- streams and events ------------------------------------------------------------------------

    @_call
    def stream_create(self) -> int:
        stream = next(self._ids)
        self._streams[stream] = FakeStream(self._ordinal("cuStreamCreate"))
        return stream

    @_call
    def stream_destroy(self, stream: int) -> None:
        self._stream("cuStreamDestroy", stream).run()
        del self._streams[stream]

    def stream_synchronize(self, stream: int) -> None:
        with self._lock:
            self.calls["stream_synchronize"] += 1
            found = self._stream("cuStreamSynchronize", stream)
        self._until("cuStreamSynchronize", found.run)

    @_call
    def stream_query(self, stream: int) -> bool:
        done = self._stream("cuStreamQuery", stream).run_one()
        self._raise_broken("cuStreamQuery")
        return done

    def _raise_broken(self, call: str) -> None:
        if self._broken:
            raise cuda_error(call, self._broken)

    @_call
    def stream_wait_event(self, stream: int, event: int) -> None:
        found = self._event("cuStreamWaitEvent", event)
        self._stream("cuStreamWaitEvent", stream).wait(found)

    @_call
    def event_create(self) -> int:
        event = next(self._ids)
        self._events[event] = FakeEvent(self._ordinal("cuEventCreate"))
        return event

    @_call
    def event_destroy(self, event: int) -> None:
        self._event("cuEventDestroy", event)
        del self._events[event]

    @_call
    def event_record(self, event: int, stream: int) -> None:
        found, onto = self._event("cuEventRecord", event), self._stream("cuEventRecord", stream)
        if found.ordinal != onto.ordinal:
            raise cuda_error("cuEventRecord", "CUDA_ERROR_INVALID_HANDLE")
        onto.record(found)
        if self._eager:
            onto.run()

    @_call
    def event_query(self, event: int) -> bool:
        found = self._event("cuEventQuery", event)
        if found.stream is not None and not found.has(found.recorded):
            found.stream.run_one()
        self._raise_broken("cuEventQuery")
        return found.has(found.recorded)

    def event_synchronize(self, event: int) -> None:
        with self._lock:
            self.calls["event_synchronize"] += 1
            found = self._event("cuEventSynchronize", event)
            count, stream = found.recorded, found.stream

        def done() -> bool:
            while not found.has(count):
                if stream is None or not stream.advance():
                    return False
            return True

        self._until("cuEventSynchronize", done)

    # -- copies ------------------------------------------------------------------------------------

    @_call
    def copy_htod(self, target: int, host: int, nbytes: int, stream: int) -> None:
        ordinal = self._stream("cuMemcpyHtoDAsync", stream).ordinal
        step = self._copy(ordinal, target, host, nbytes, target)
        self._queue("cuMemcpyHtoDAsync", stream, step, now=not self._pinned(host, nbytes))

    @_call
    def copy_dtoh(self, host: int, source: int, nbytes: int, stream: int) -> None:
        ordinal = self._stream("cuMemcpyDtoHAsync", stream).ordinal
        step = self._copy(ordinal, host, source, nbytes, source)
        self._queue("cuMemcpyDtoHAsync", stream, step, now=not self._pinned(host, nbytes))

    def _pinned(self, host: int, nbytes: int) -> bool:
        """Pageable memory is copied before the call returns, as the driver does."""
        spans = self._ranges.spans(host, nbytes)
        return bool(spans) and all(found.ordinal < 0 for found in spans)

    @_call
    def copy_dtod(self, target: int, source: int, nbytes: int, stream: int) -> None:
        ordinal = self._stream("cuMemcpyDtoDAsync", stream).ordinal
        step = self._copy(ordinal, target, source, nbytes, target, source)
        self._queue("cuMemcpyDtoDAsync", stream, step)

    @_call
    def copy_peer(
        self,
        target: int,
        target_context: int,
        source: int,
        source_context: int,
        nbytes: int,
        stream: int,
    ) -> None:
        def step() -> bool:
            mine = self._touches(target_context - 0xC0, target, nbytes)
            if not self._broken and mine and self._touches(source_context - 0xC0, source, nbytes):
                ctypes.memmove(target, source, nbytes)
            return True

        self._queue("cuMemcpyPeerAsync", stream, step)

    @_call
    def memset(self, address: int, value: int, nbytes: int, stream: int) -> None:
        ordinal = self._stream("cuMemsetD8Async", stream).ordinal

        def step() -> bool:
            if not self._broken and self._touches(ordinal, address, nbytes):
                ctypes.memset(address, value, nbytes)
            return True

        self._queue("cuMemsetD8Async", stream, step)

    def break_device(self, stream: int, code: str = "CUDA_ERROR_LAUNCH_FAILED") -> None:
        """What is queued now will end in a fault, after which nothing works any more."""
        if code not in FATAL_CODES:
            raise ValueError(f"{code} does not break a context")

        def step() -> bool:
            self._broken = code
            return True

        with self._lock:
            self._queue("break", stream, step)

    # -- kernels -----------------------------------------------------------------------------------

    @_call
    def module_load(self, image: bytes) -> int:
        self._ordinal("cuModuleLoadData")
        if not image:
            raise cuda_error("cuModuleLoadData", "CUDA_ERROR_INVALID_IMAGE")
        return next(self._ids)

    @_call
    def module_function(self, module: int, name: str) -> int:
        if name not in KERNELS:
            raise cuda_error("cuModuleGetFunction", "CUDA_ERROR_NOT_FOUND")
        function = next(self._ids)
        self._functions[function] = name
        return function

    @_call
    def launch(
        self,
        function: int,
        grid: tuple[int, int],
        threads: int,
        shared_nbytes: int,
        stream: int,
        parameters: Sequence[int],
    ) -> None:
        if function not in self._functions:
            raise cuda_error("cuLaunchKernel", "CUDA_ERROR_INVALID_HANDLE")
        kernel, given = KERNELS[self._functions[function]], tuple(parameters)

        def step() -> bool:
            if not self._broken:
                kernel(grid, given)
            return True

        self._queue("cuLaunchKernel", stream, step)

    # -- host memory -------------------------------------------------------------------------------

    @_call
    def host_alloc(self, nbytes: int) -> int:
        self._ordinal("cuMemHostAlloc")
        if nbytes <= 0:
            raise cuda_error("cuMemHostAlloc", "CUDA_ERROR_INVALID_VALUE")
        fd = memory.new_memfd("pinned", nbytes)
        address = memory.back(fd, nbytes)
        self._ranges.add(Range(address, nbytes, -1, "host", next(self._ids), fd))
        return address

    @_call
    def host_free(self, address: int) -> None:
        found = self._ranges.pop(address, "host")
        if found is None:
            raise cuda_error("cuMemFreeHost", "CUDA_ERROR_INVALID_VALUE")
        memory.unmap(address, found.nbytes)
        os.close(found.fd)

    @_call
    def host_register(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        self._ordinal("cuMemHostRegister")
        if nbytes <= 0:
            raise cuda_error("cuMemHostRegister", "CUDA_ERROR_INVALID_VALUE")
        if self._ranges.overlapping(address, nbytes):
            raise cuda_error("cuMemHostRegister", "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED")
        self._ranges.add(Range(address, nbytes, -1, "registered", next(self._ids)))

    @_call
    def host_unregister(self, address: int) -> None:
        if self._ranges.pop(address, "registered") is None:
            raise cuda_error("cuMemHostUnregister", "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED")

    @_call
    def host_device_pointer(self, address: int) -> int:
        found = self._ranges.at(address)
        if found is None or found.ordinal >= 0:
            raise cuda_error("cuMemHostGetDevicePointer", "CUDA_ERROR_INVALID_VALUE")
        return address

    # -- words that streams wait for ---------------------------------------------------------------

    @_call
    def stream_wait_value(self, stream: int, address: int, value: int) -> None:
        ordinal = self._stream("cuStreamWaitValue32", stream).ordinal

        def step() -> bool:
            if self._broken or not self._touches(ordinal, address, 4):
                return True
            found = ctypes.c_uint32.from_address(address).value
            return (found - value) & 0xFFFFFFFF < 1 << 31

        self._queue("cuStreamWaitValue32", stream, step)

    @_call
    def stream_write_value(self, stream: int, address: int, value: int) -> None:
        ordinal = self._stream("cuStreamWriteValue32", stream).ordinal

        def step() -> bool:
            if not self._broken and self._touches(ordinal, address, 4):
                ctypes.c_uint32.from_address(address).value = value
            return True

        self._queue("cuStreamWriteValue32", stream, step)
