"""A ring of pinned host memory between the CPU and a GPU, for both directions at once.

The CPU fills or drains one slot while the copy engines work on others; uploads and downloads have
a stream each, so that they overlap too. A slot that was given back while its copy still runs is
waited for by whoever takes it next, and no earlier.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Generator

import numpy as np

from mx.cuda.device import Device, Event, PinnedMemory, Stream
from mx.errors import ClosedError
from mx.units import MIB

SLOT_BYTES = 2 * MIB
SLOTS = 8


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy between byte views of one length, without the interpreter's lock."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class Slot:
    """A piece of the ring, one taker's at a time: `view` (writable bytes) at host `address`."""

    __slots__ = ("address", "event", "view")

    def __init__(self, view: memoryview, address: int, event: Event) -> None:
        self.view, self.address, self.event = view, address, event

    def wait(self) -> None:
        """Sleep until the slot's last copy is done. Raises CudaError."""
        self.event.synchronize()


class PinnedRing:
    """`slots` slots of `slot_nbytes`. Thread-safe; owns its memory, events and two streams.

    Raises CudaMemoryError where so much can't be pinned.
    """

    def __init__(
        self, device: Device, *, slot_nbytes: int = SLOT_BYTES, slots: int = SLOTS
    ) -> None:
        self.device = device
        self.slot_nbytes = slot_nbytes
        with contextlib.ExitStack() as undo:
            self._memory = undo.enter_context(PinnedMemory(device, slots * slot_nbytes))
            self._up = undo.enter_context(Stream(device))
            self._down = undo.enter_context(Stream(device))
            events = [undo.enter_context(Event(device)) for _ in range(slots)]
            self._ends = undo.pop_all()
        #: All of the slots' memory.
        self.view = self._memory.view()
        self._free = deque(
            Slot(
                self.view[i * slot_nbytes : (i + 1) * slot_nbytes],
                self._memory.address + i * slot_nbytes,
                event,
            )
            for i, event in enumerate(events)
        )
        self._slots = slots
        self._wake = threading.Condition()
        self._closed = False

    # -- slot by slot ------------------------------------------------------------------------------

    def take(self) -> Slot:
        """A slot whose last copy is done, waiting for one if need be. Raises ClosedError after
        `close`, CudaError if that copy failed."""
        with self._wake:
            while not self._free and not self._closed:
                self._wake.wait()
            slot = self._pop()
        return self._ready(slot)

    def try_take(self) -> Slot | None:
        """The same, or None if no slot has been given back."""
        with self._wake:
            if not self._free and not self._closed:
                return None
            slot = self._pop()
        return self._ready(slot)

    @property
    def free(self) -> int:
        """Slots that can be taken without waiting for another taker."""
        return len(self._free)

    def _pop(self) -> Slot:
        if self._closed:
            raise ClosedError("the ring of pinned memory was closed")
        return self._free.popleft()

    def _ready(self, slot: Slot) -> Slot:
        try:
            slot.wait()
        except BaseException:
            self.give(slot)
            raise
        return slot

    def give(self, slot: Slot) -> None:
        """Back to the ring; a copy from or to it may still run."""
        with self._wake:
            self._free.append(slot)
            self._wake.notify()
            self._end_if_idle()

    def push(self, slot: Slot, target: int, nbytes: int, *, offset: int = 0) -> None:
        """Queue a copy of the slot's bytes from `offset` to device address `target`."""
        with self.device.current():
            self.device.driver.copy_htod(target, slot.address + offset, nbytes, self._up.handle)
        slot.event.record(self._up)

    def fetch(self, slot: Slot, source: int, nbytes: int) -> None:
        """Queue a copy of device memory into the slot; `slot.wait()` before looking."""
        with self.device.current():
            self.device.driver.copy_dtoh(slot.address, source, nbytes, self._down.handle)
        slot.event.record(self._down)

    # -- whole ranges ------------------------------------------------------------------------------

    def upload(self, target: int, source: memoryview) -> None:
        """Copy host bytes to device address `target`; in place when this returns."""
        for start in range(0, len(source), self.slot_nbytes):
            part = source[start : start + self.slot_nbytes]
            slot = self.take()
            try:
                copy_bytes(slot.view[: len(part)], part)
                self.push(slot, target + start, len(part))
            finally:
                self.give(slot)
        self.flush()

    def flush(self) -> None:
        """Wait for every upload that was queued. Raises CudaError."""
        self._up.synchronize()

    def download(self, source: int, target: memoryview) -> None:
        """Copy from device address `source` to host bytes."""
        done = 0
        for part in self.read(source, len(target)):
            copy_bytes(target[done : done + len(part)], part)
            done += len(part)

    def read(self, source: int, nbytes: int) -> Generator[memoryview, None, None]:
        """Device memory, piece by piece, the next ones on their way meanwhile. Each piece is
        valid until the next is asked for; close the iterator if it is not used up."""
        ahead: deque[tuple[Slot, int]] = deque()
        start = 0
        try:
            while start < nbytes or ahead:
                # Half of the ring at most, and never all: others need some to get on.
                while start < nbytes and len(ahead) < max(1, self._slots // 2):
                    slot = self.take() if not ahead else self.try_take()
                    if slot is None:
                        break
                    size = min(self.slot_nbytes, nbytes - start)
                    ahead.append((slot, size))
                    self.fetch(slot, source + start, size)
                    start += size
                slot, size = ahead[0]
                slot.wait()
                yield slot.view[:size]
                ahead.popleft()
                self.give(slot)
        finally:
            for slot, _ in ahead:
                self.give(slot)

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Give no more slots; free everything once those that are out have been given back.
        Idempotent."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
            self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self._closed and len(self._free) == self._slots:
            self._slots = -1
            self._free.clear()
            self.view = memoryview(b"")
            self._ends.close()
