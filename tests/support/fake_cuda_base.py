"""The base of the fake CUDA driver: its state, failures on request, devices, contexts."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from mx.cuda.driver import DeviceAttribute, Driver
from mx.cuda.errors import cuda_error
from mx.units import GIB
from tests.support import fake_cuda_memory as memory
from tests.support.fake_cuda_memory import Ranges
from tests.support.fake_cuda_streams import FakeEvent, FakeStream, Step

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="FakeBase")


def fake_uuid(index: int) -> str:
    return f"GPU-00000000-0000-4000-8000-{index:012x}"


def driver_call(
    method: Callable[Concatenate[S, P], T],
) -> Callable[Concatenate[S, P], T]:
    """Make a method a call of the driver: counted, failing on request, and always once the device
    is broken."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
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


class FakeBase(Driver):
    """State and devices; `tests.support.fake_cuda.FakeDriver` describes the arguments."""

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
        """Make `call` (a method's name) fail once with CUDA's `code`, after `after` more calls."""
        self._failures[call] = [code, after]

    def live(self) -> list[str]:
        """Return what is held, like "2 streams", "1 alloc"; [] if everything was given back."""
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
        """Return how much device memory is allocated."""
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
        """Return True where the device may touch these addresses; else break the context."""
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
        """Return a step that copies; `sides` are the addresses that the device itself touches."""

        def step() -> bool:
            if not self._broken and all(self._touches(ordinal, side, nbytes) for side in sides):
                ctypes.memmove(target, source, nbytes)
            return True

        return step

    # -- what there is -----------------------------------------------------------------------------

    @driver_call
    def version(self) -> int:
        return 13000

    @driver_call
    def device_count(self) -> int:
        return len(self._gpus)

    @driver_call
    def device_uuid(self, ordinal: int) -> str:
        self._check_ordinal("cuDeviceGetUuid", ordinal)
        return self._gpus[ordinal]

    @driver_call
    def device_name(self, ordinal: int) -> str:
        self._check_ordinal("cuDeviceGetName", ordinal)
        return "Fake GPU"

    @driver_call
    def device_attribute(self, ordinal: int, attribute: DeviceAttribute) -> int:
        self._check_ordinal("cuDeviceGetAttribute", ordinal)
        match attribute:
            case DeviceAttribute.COMPUTE_CAPABILITY_MAJOR:
                return 9
            case DeviceAttribute.VMM | DeviceAttribute.POSIX_FD:
                return int(self._vmm)
            case _:
                return 0

    @driver_call
    def can_access_peer(self, ordinal: int, peer: int) -> bool:
        return self._peers and ordinal != peer

    # -- contexts ----------------------------------------------------------------------------------

    @driver_call
    def context_retain(self, ordinal: int) -> int:
        self._check_ordinal("cuDevicePrimaryCtxRetain", ordinal)
        self._contexts[ordinal] += 1
        return 0xC0 + ordinal

    @driver_call
    def context_release(self, ordinal: int) -> None:
        if not self._contexts[ordinal]:
            raise cuda_error("cuDevicePrimaryCtxRelease", "CUDA_ERROR_INVALID_CONTEXT")
        self._contexts[ordinal] -= 1

    @driver_call
    def context_active(self, ordinal: int) -> bool:
        self._check_ordinal("cuDevicePrimaryCtxGetState", ordinal)
        return self._contexts[ordinal] > 0

    @driver_call
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

    @driver_call
    def enable_peer_access(self, peer_context: int) -> None:
        ordinal = self._ordinal("cuCtxEnablePeerAccess")
        if not self._peers or ordinal == peer_context - 0xC0:
            raise cuda_error("cuCtxEnablePeerAccess", "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")
        self._peered.add((ordinal, peer_context - 0xC0))
