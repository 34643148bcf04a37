"""A CUDA driver over host memory, for tests where there is no GPU: `mx.cuda.driver.Driver`.

It has several GPUs with fixed UUIDs, whose memory is memfds, so that descriptors and IPC handles
work between real processes of one user. It is strict where CUDA is undefined or merely slow:
work is done only when a thread waits for it (see `tests.support.fake_cuda_streams`), fresh
memory is garbage, and addresses that a device may not touch break the context for good, as an
illegal address does. `live()` names whatever was not given back, `fail()` makes calls fail.

    with driver.installed(FakeDriver(gpus=2)) as ...: mx.pull(..., device="cuda:1")
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import final

from mx.cuda.errors import FATAL_CODES, cuda_error
from tests.support.fake_cuda_alloc import GRANULARITY_BYTES, FakeAllocator
from tests.support.fake_cuda_base import driver_call, fake_uuid
from tests.support.fake_cuda_streams import FakeEvent, FakeStream
from tests.support.fake_kernels import KERNELS

__all__ = ["GRANULARITY_BYTES", "FakeDriver", "fake_uuid"]


@final
class FakeDriver(FakeAllocator):
    """See `mx.cuda.driver.Driver` for the calls. `first_gpu` is the number of the GPU that is
    ordinal 0 here: processes may see different ones. `vmm=False` is a GPU of old; `peers=False`
    are GPUs that can't reach each other; `eager=True` does work as soon as it is queued."""

    # -- streams and events ------------------------------------------------------------------------

    @driver_call
    def stream_create(self) -> int:
        stream = next(self._ids)
        self._streams[stream] = FakeStream(self._ordinal("cuStreamCreate"))
        return stream

    @driver_call
    def stream_destroy(self, stream: int) -> None:
        self._stream("cuStreamDestroy", stream).run()
        del self._streams[stream]

    def stream_synchronize(self, stream: int) -> None:
        with self._lock:
            self.calls["stream_synchronize"] += 1
            found = self._stream("cuStreamSynchronize", stream)
        self._until("cuStreamSynchronize", found.run)

    @driver_call
    def stream_query(self, stream: int) -> bool:
        done = self._stream("cuStreamQuery", stream).run_one()
        self._raise_broken("cuStreamQuery")
        return done

    def _raise_broken(self, call: str) -> None:
        if self._broken:
            raise cuda_error(call, self._broken)

    @driver_call
    def stream_wait_event(self, stream: int, event: int) -> None:
        found = self._event("cuStreamWaitEvent", event)
        self._stream("cuStreamWaitEvent", stream).wait(found)

    @driver_call
    def event_create(self) -> int:
        event = next(self._ids)
        self._events[event] = FakeEvent(self._ordinal("cuEventCreate"))
        return event

    @driver_call
    def event_destroy(self, event: int) -> None:
        self._event("cuEventDestroy", event)
        del self._events[event]

    @driver_call
    def event_record(self, event: int, stream: int) -> None:
        found, onto = self._event("cuEventRecord", event), self._stream("cuEventRecord", stream)
        if found.ordinal != onto.ordinal:
            raise cuda_error("cuEventRecord", "CUDA_ERROR_INVALID_HANDLE")
        onto.record(found)
        if self._eager:
            onto.run()

    @driver_call
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

    @driver_call
    def copy_htod(self, target: int, host: int, nbytes: int, stream: int) -> None:
        ordinal = self._stream("cuMemcpyHtoDAsync", stream).ordinal
        step = self._copy(ordinal, target, host, nbytes, target)
        self._queue("cuMemcpyHtoDAsync", stream, step, now=not self._pinned(host, nbytes))

    @driver_call
    def copy_dtoh(self, host: int, source: int, nbytes: int, stream: int) -> None:
        ordinal = self._stream("cuMemcpyDtoHAsync", stream).ordinal
        step = self._copy(ordinal, host, source, nbytes, source)
        self._queue("cuMemcpyDtoHAsync", stream, step, now=not self._pinned(host, nbytes))

    def _pinned(self, host: int, nbytes: int) -> bool:
        """Copy from pageable memory before the call returns, as the driver does."""
        spans = self._ranges.spans(host, nbytes)
        return bool(spans) and all(found.ordinal < 0 for found in spans)

    @driver_call
    def copy_dtod(self, target: int, source: int, nbytes: int, stream: int) -> None:
        ordinal = self._stream("cuMemcpyDtoDAsync", stream).ordinal
        step = self._copy(ordinal, target, source, nbytes, target, source)
        self._queue("cuMemcpyDtoDAsync", stream, step)

    @driver_call
    def memset(self, address: int, value: int, nbytes: int, stream: int) -> None:
        ordinal = self._stream("cuMemsetD8Async", stream).ordinal

        def step() -> bool:
            if not self._broken and self._touches(ordinal, address, nbytes):
                ctypes.memset(address, value, nbytes)
            return True

        self._queue("cuMemsetD8Async", stream, step)

    def break_device(self, stream: int, code: str = "CUDA_ERROR_LAUNCH_FAILED") -> None:
        """Queue a fault, after which nothing works any more."""
        if code not in FATAL_CODES:
            raise ValueError(f"{code} does not break a context")

        def step() -> bool:
            self._broken = code
            return True

        with self._lock:
            self._queue("break", stream, step)

    # -- kernels -----------------------------------------------------------------------------------

    @driver_call
    def module_load(self, image: bytes) -> int:
        self._ordinal("cuModuleLoadData")
        if not image:
            raise cuda_error("cuModuleLoadData", "CUDA_ERROR_INVALID_IMAGE")
        return next(self._ids)

    @driver_call
    def module_function(self, module: int, name: str) -> int:
        if name not in KERNELS:
            raise cuda_error("cuModuleGetFunction", "CUDA_ERROR_NOT_FOUND")
        function = next(self._ids)
        self._functions[function] = name
        return function

    @driver_call
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

    # -- words that streams wait for ---------------------------------------------------------------

    @driver_call
    def stream_wait_value(self, stream: int, address: int, value: int) -> None:
        ordinal = self._stream("cuStreamWaitValue32", stream).ordinal

        def step() -> bool:
            if self._broken or not self._touches(ordinal, address, 4):
                return True
            found = ctypes.c_uint32.from_address(address).value
            return (found - value) & 0xFFFFFFFF < 1 << 31

        self._queue("cuStreamWaitValue32", stream, step)
