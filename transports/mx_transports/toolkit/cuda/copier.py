"""Moves bytes for one thread of a GPU session: copies are queued on streams, in overlapping stages.

A step is a few slices that are copied together. Its stage holds the events by which its copies are
known to be done, and, where bytes can't go straight from one memory to the other, pinned host
memory in between. While one stage's copies run, the next is being filled, or the last one emptied.
"""

from __future__ import annotations

import contextlib
import ctypes
import select
import threading
from collections.abc import Callable
from itertools import chain

from mx.cuda.device import CudaEvent, CudaStream, Device, PinnedMemory
from mx.cuda.vmm import HOST
from mx.errors import LocalError
from mx.transport import DeviceView, Span
from mx.units import MIB
from mx_transports.toolkit import kernel
from mx_transports.toolkit.cuda.hosts import HostSide
from mx_transports.toolkit.cuda.remote import RemoteMemory
from mx_transports.toolkit.cuda.wire import RegionKind, RemoteRegion
from mx_transports.toolkit.slicing import Slice

#: Of steps that go straight from GPU to GPU: all of a trip.
DIRECT_STEP_BYTES = 256 * MIB
#: Of steps through pinned memory: its cost against what a step costs in Python. About 80 us of a
#: PCIe 5 x16 link.
STAGED_STEP_BYTES = 4 * MIB
#: Stages of one thread: one that is filled, one that is copied, one that is emptied.
STAGES = 3


_AS_IT_IS = contextlib.nullcontext()


class _Stage:
    """The resources of a step under way; the step `STAGES` later uses them again."""

    def __init__(self) -> None:
        self.memory: PinnedMemory | None = None
        self.view = memoryview(b"")
        #: By the GPU's ordinal; those of `streams` say when the step is done.
        self.events: dict[int, CudaEvent] = {}
        self.streams: list[CudaStream] = []
        #: What is to be copied out of the stage then.
        self.drains: list[tuple[int, memoryview]] = []

    def touch(self, stream: CudaStream) -> None:
        if stream not in self.streams:
            self.streams.append(stream)


class Copier:
    """One thread's streams and stages. `target` is the GPU that destinations are on; None: the
    host. `home` is the GPU whose context is current where `start` and `finish` are called. `host`
    knows what of the host's memory is reached in place; all else goes through stages of
    `step_nbytes`.

    `start` is called with `lock` held; a thread that holds it, and has seen `ended`, knows that
    nothing is queued any more. Raises CudaError throughout.
    """

    def __init__(
        self,
        remote: RemoteMemory,
        host: HostSide,
        target: Device | None,
        home: Device,
        step_nbytes: int,
    ) -> None:
        self.home = home
        self.lock = threading.Lock()
        self.ended = False
        self.poll = select.poll()
        self._remote = remote
        self._host = host
        self._target = target
        self._step_nbytes = step_nbytes
        self._streams: dict[int, CudaStream] = {}
        self._stages = [_Stage() for _ in range(STAGES)]
        remote.register(self.poll)

    def start(
        self,
        number: int,
        parts: list[Slice[Span]],
        behind: Callable[[int], None] | None = None,
    ) -> None:
        """Queue step `number`'s copies; `number - STAGES` has been finished.

        Args:
            number: The step's.
            parts: What it copies.
            behind: Called with the handle of `home`'s stream once they are queued, and those of
                the read's earlier steps; what it queues belongs to the step.
        """
        stage = self._stages[number % STAGES]
        at = 0
        for part in parts:
            region = self._remote.regions[part.region]
            if region.on_gpu:
                at = self._from_device(stage, at, region, part)
            else:
                at = self._from_host(stage, at, region, part)
        if behind is not None:
            stream = self._stream(self.home)
            stage.touch(stream)
            behind(stream.handle)
        for stream in stage.streams:
            self._record(stage, stream)

    def finish(self, number: int) -> None:
        """Wait until step `number`'s bytes are at their destination."""
        stage = self._stages[number % STAGES]
        for stream in stage.streams:
            device = stream.device
            device.driver.event_synchronize(stage.events[device.ordinal].handle)
        stage.streams.clear()
        for address, destination in stage.drains:
            # A call through ctypes releases the GIL, an assignment to a slice would not.
            pin = ctypes.c_char.from_buffer(destination)
            ctypes.memmove(ctypes.addressof(pin), address, len(destination))
            del pin
        stage.drains.clear()

    def discard(self, number: int) -> None:
        """Forget step `number`, which is not finished. Call it after `synchronize`."""
        stage = self._stages[number % STAGES]
        stage.streams.clear()
        stage.drains.clear()

    def synchronize(self) -> None:
        """Wait until all queued work has ended. Call it on any thread, without the lock."""
        with self.lock:
            for stream in self._streams.values():
                stream.synchronize()

    def end(self) -> None:
        """Refuse new steps, and wait until all queued work has ended."""
        with self.lock:
            self.ended = True
        self.synchronize()

    def close(self) -> None:
        """Free everything. Called last, by the thread itself."""
        with self.lock:
            self.ended = True
            streams = list(self._streams.values())
            self._streams.clear()
            for stream in streams:
                stream.close()
        for stage in self._stages:
            for event in stage.events.values():
                event.close()
            stage.view = memoryview(b"")
            if stage.memory is not None:
                stage.memory.close()

    # --- one part

    def _from_device(self, stage: _Stage, at: int, region: RemoteRegion, part: Slice[Span]) -> int:
        maps = self._remote.maps
        done = 0
        for run, source, nbytes in chain.from_iterable(
            maps.pieces(*place)
            for place in self._remote.places(region, part.offset, len(part.view))
        ):
            span = part.view[done : done + nbytes]
            done += nbytes
            if isinstance(span, DeviceView) and run.device is self._target:
                stream, driver = self._stream(self._target), self._target.driver
                copy = driver.copy if run.uuid == HOST else driver.copy_dtod
                with self._on(self._target):
                    copy(span.address, source, nbytes, stream.handle)
                stage.touch(stream)
                continue
            there = None if isinstance(span, DeviceView) else self._host.destination(span)
            if there is not None:
                stream = self._stream(run.device)
                with self._on(run.device):
                    for address, part_nbytes in there:
                        run.device.driver.copy_dtoh(address, source, part_nbytes, stream.handle)
                        source += part_nbytes
                stage.touch(stream)
                continue
            middle, device = self._memory(stage, run.device) + at, run.device
            stream = self._stream(device)
            with self._on(device):
                device.driver.copy_dtoh(middle, source, nbytes, stream.handle)
            if isinstance(span, DeviceView):
                self._onwards(stage, middle, span, self._record(stage, stream))
            else:
                stage.touch(stream)
                stage.drains.append((middle, span))
            at += nbytes
        return at

    def _from_host(self, stage: _Stage, at: int, region: RemoteRegion, part: Slice[Span]) -> int:
        span, nbytes = part.view, len(part.view)
        if not isinstance(span, DeviceView) or self._target is None:
            raise LocalError(f"{self._remote.path} needs a GPU's memory at one side at least")
        there = self._host.source(part)
        if there is not None:
            for address, part_nbytes in there:
                self._onwards(stage, address, span[:part_nbytes], None)
                span = span[part_nbytes:]
            return at
        middle = self._memory(stage, self._target) + at
        view = stage.view[at : at + nbytes]
        if region.where is RegionKind.MEMFD:
            kernel.read_descriptor(region.descriptor, part.offset, view, self._remote.peer)
        else:
            remote = [(region.address + part.offset, view)]
            kernel.read_process(self._remote.ticket.pid, remote, self._remote.peer)
        self._onwards(stage, middle, span, None)
        return at + nbytes

    def _onwards(
        self, stage: _Stage, middle: int, span: DeviceView, after: CudaEvent | None
    ) -> None:
        """Queue a copy from pinned memory to the target, once `after` has happened."""
        device = self._target
        assert device is not None
        stream = self._stream(device)
        if after is not None:
            stream.wait(after)
        with self._on(device):
            device.driver.copy_htod(span.address, middle, span.nbytes, stream.handle)
        stage.touch(stream)

    # --- what parts use

    def _on(self, device: Device) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the device is current. The thread's own device always is:
        making it current for each call would cost more than the call."""
        return _AS_IT_IS if device is self.home else device.current()

    def _stream(self, device: Device) -> CudaStream:
        found = self._streams.get(device.ordinal)
        if found is None:
            found = self._streams[device.ordinal] = CudaStream(device)
        return found

    def _record(self, stage: _Stage, stream: CudaStream) -> CudaEvent:
        ordinal = stream.device.ordinal
        event = stage.events.get(ordinal)
        if event is None:
            event = stage.events[ordinal] = CudaEvent(stream.device)
        with self._on(stream.device):
            stream.device.driver.event_record(event.handle, stream.handle)
        return event

    def _memory(self, stage: _Stage, device: Device) -> int:
        """Return the address of the stage's pinned memory, which is allocated on first use."""
        if stage.memory is None:
            stage.memory = PinnedMemory(device, self._step_nbytes)
            stage.view = stage.memory.view()
        return stage.memory.address
