"""How one lane of a GPU session moves bytes: copies queued on streams, in slots that overlap.

A step is a few pieces that are copied together. Its slot holds the events by which its copies are
known to be done, and, where bytes can't go straight from one memory to the other, pinned host
memory in between. While one slot's copies run, the next is being filled, or the last one emptied.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import threading
from collections.abc import Iterator
from typing import NamedTuple

from mx.cuda.device import Device, Event, PinnedMemory, Stream
from mx.errors import LocalError, PeerProtocolError
from mx.transport import DeviceView, Read, Span
from mx.units import MIB
from mx_transports import _vm as vm
from mx_transports._cuda_link import Link
from mx_transports._cuda_wire import Region, Where

#: Of steps that go straight from GPU to GPU. At half of an H200's 4.8 TB/s (its datasheet) this
#: takes 28 us, no more than what a step costs in Python: it can't be smaller.
DIRECT_STEP_BYTES = 64 * MIB
#: Of steps through pinned memory: its cost against what a step costs in Python. About 80 us of a
#: PCIe 5 x16 link.
STAGED_STEP_BYTES = 4 * MIB
#: Slots of one lane: one that is filled, one that is copied, one that is emptied.
SLOTS = 3


_AS_IT_IS = contextlib.nullcontext()


class Part(NamedTuple):
    """`len(span)` bytes from `offset` of a region into `span`."""

    region: int
    offset: int
    span: Span


def steps(read: Read, step_nbytes: int) -> Iterator[tuple[list[Part], int]]:
    """Cut a read into steps of at most `step_nbytes`: (parts, payload bytes when it is done)."""
    parts: list[Part] = []
    room, landed = step_nbytes, 0
    for piece in read.pieces:
        done, nbytes = 0, len(piece.view)
        while done < nbytes:
            take = min(room, nbytes - done)
            parts.append(
                Part(piece.region, piece.region_offset + done, piece.view[done : done + take])
            )
            done += take
            room -= take
            if not room:
                landed += step_nbytes
                yield parts, landed
                parts, room = [], step_nbytes
    if parts:
        yield parts, landed + step_nbytes - room


class _Slot:
    def __init__(self) -> None:
        self.memory: PinnedMemory | None = None
        self.view = memoryview(b"")
        #: By the GPU's ordinal; those of `streams` say when the step is done.
        self.events: dict[int, Event] = {}
        self.streams: list[Stream] = []
        #: What is to be copied out of the slot then.
        self.drains: list[tuple[int, memoryview]] = []

    def touch(self, stream: Stream) -> None:
        if stream not in self.streams:
            self.streams.append(stream)


class Copier:
    """One lane's streams and slots. `target` is the GPU that destinations are on; None: the host.
    `home` is the GPU whose context is current where `start` and `finish` are called.

    `start` is called with `lock` held; whoever holds it, and has seen `ended`, knows that nothing
    is queued any more. Raises CudaError throughout.
    """

    def __init__(self, link: Link, target: Device | None, home: Device, step_nbytes: int) -> None:
        self.home = home
        self.lock = threading.Lock()
        self.ended = False
        self.poll = select.poll()
        self._link = link
        self._target = target
        self._step_nbytes = step_nbytes
        self._streams: dict[int, Stream] = {}
        self._slots = [_Slot() for _ in range(SLOTS)]
        link.register(self.poll)

    def start(self, number: int, parts: list[Part]) -> None:
        """Queue step `number`'s copies; `number - SLOTS` has been finished."""
        slot = self._slots[number % SLOTS]
        at = 0
        for part in parts:
            region = self._link.regions[part.region]
            if region.where is Where.DEVICE:
                at = self._from_device(slot, at, region, part)
            else:
                at = self._from_host(slot, at, region, part)
        for stream in slot.streams:
            self._record(slot, stream)

    def finish(self, number: int) -> None:
        """Wait until step `number`'s bytes are in their place."""
        slot = self._slots[number % SLOTS]
        for stream in slot.streams:
            device = stream.device
            device.driver.event_synchronize(slot.events[device.ordinal].handle)
        slot.streams.clear()
        for address, destination in slot.drains:
            # A call through ctypes releases the GIL, an assignment to a slice would not.
            pin = ctypes.c_char.from_buffer(destination)
            ctypes.memmove(ctypes.addressof(pin), address, len(destination))
            del pin
        slot.drains.clear()

    def discard(self, number: int) -> None:
        """Step `number` is not to be finished; after `synchronize`."""
        slot = self._slots[number % SLOTS]
        slot.streams.clear()
        slot.drains.clear()

    def synchronize(self) -> None:
        """Wait until nothing that was queued runs any more. On any thread, without the lock."""
        with self.lock:
            for stream in self._streams.values():
                stream.synchronize()

    def end(self) -> None:
        """Have nothing started any more, and wait for what was."""
        with self.lock:
            self.ended = True
        self.synchronize()

    def close(self) -> None:
        """Give everything back. The lane's own last act."""
        with self.lock:
            self.ended = True
            streams = list(self._streams.values())
            self._streams.clear()
            for stream in streams:
                stream.close()
        for slot in self._slots:
            for event in slot.events.values():
                event.close()
            slot.view = memoryview(b"")
            if slot.memory is not None:
                slot.memory.close()

    # --- one part

    def _from_device(self, slot: _Slot, at: int, region: Region, part: Part) -> int:
        assert self._link.maps is not None
        done = 0
        for run, source, nbytes in self._link.maps.pieces(
            region.address + part.offset, len(part.span)
        ):
            span = part.span[done : done + nbytes]
            done += nbytes
            if isinstance(span, DeviceView) and run.device is self._target:
                stream = self._stream(self._target)
                with self._on(self._target):
                    self._target.driver.copy_dtod(span.address, source, nbytes, stream.handle)
                slot.touch(stream)
                continue
            middle, device = self._room(slot, run.device) + at, run.device
            stream = self._stream(device)
            with self._on(device):
                device.driver.copy_dtoh(middle, source, nbytes, stream.handle)
            if isinstance(span, DeviceView):
                self._onwards(slot, middle, span, self._record(slot, stream))
            else:
                slot.touch(stream)
                slot.drains.append((middle, span))
            at += nbytes
        return at

    def _from_host(self, slot: _Slot, at: int, region: Region, part: Part) -> int:
        span, nbytes = part.span, len(part.span)
        if not isinstance(span, DeviceView) or self._target is None:
            raise LocalError(f"{self._link.path} is for memory of which one side is a GPU's")
        middle = self._room(slot, self._target) + at
        view = slot.view[at : at + nbytes]
        if region.where is Where.MEMFD:
            self._pread(region.descriptor, part.offset, view)
        else:
            remote = [(region.address + part.offset, view)]
            vm.read_process(self._link.ticket.pid, remote, self._link.peer)
        self._onwards(slot, middle, span, None)
        return at + nbytes

    def _pread(self, descriptor: int, offset: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            got = os.preadv(descriptor, [view[done:]], offset + done)
            if not got:
                peer = self._link.peer
                raise PeerProtocolError(f"{peer}: its memfd is shorter than it said", peer=peer)
            done += got

    def _onwards(self, slot: _Slot, middle: int, span: DeviceView, after: Event | None) -> None:
        """From the slot's memory to the target, once `after` has happened."""
        device = self._target
        assert device is not None
        stream = self._stream(device)
        if after is not None:
            stream.wait(after)
        with self._on(device):
            device.driver.copy_htod(span.address, middle, span.nbytes, stream.handle)
        slot.touch(stream)

    # --- what parts use

    def _on(self, device: Device) -> contextlib.AbstractContextManager[None]:
        """The device is current inside. The lane's own is anyway: making it so for each call
        would cost more than the call."""
        return _AS_IT_IS if device is self.home else device.current()

    def _stream(self, device: Device) -> Stream:
        found = self._streams.get(device.ordinal)
        if found is None:
            found = self._streams[device.ordinal] = Stream(device)
        return found

    def _record(self, slot: _Slot, stream: Stream) -> Event:
        ordinal = stream.device.ordinal
        event = slot.events.get(ordinal)
        if event is None:
            event = slot.events[ordinal] = Event(stream.device)
        with self._on(stream.device):
            stream.device.driver.event_record(event.handle, stream.handle)
        return event

    def _room(self, slot: _Slot, device: Device) -> int:
        """The address of the slot's pinned memory, made when it is first needed."""
        if slot.memory is None:
            slot.memory = PinnedMemory(device, self._step_nbytes)
            slot.view = slot.memory.view()
        return slot.memory.address
