"""A ring of pinned host memory between the CPU and a GPU, for both directions at once.

The CPU fills or drains one slot while the copy engines work on others. Uploads and downloads have
a stream each, so that they overlap too. A slot may be given back while its copy still runs: the
next `take` of the slot waits for the copy.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable

from mx import forks
from mx.buffers import address_of, copy_bytes, seal
from mx.contexts import Undo
from mx.cuda.device import CudaEvent, CudaStream, Device, PinnedMemory, PinnedRegion
from mx.errors import ClosedError
from mx.units import MIB
from mx.views import DeviceView

SLOT_BYTES = 2 * MIB
SLOTS = 8
#: More copies than so many into a slot, of small tensors, take longer than its user should wait.
MAX_COPIES = 1024
_MEMFD_NAME = "mx:ring"
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_FUTURE_WRITE = 1, 2, 4, 16

forks.recognise(lambda fd, link: link.startswith(f"/memfd:{_MEMFD_NAME}"))


class SharedPinned:
    """`nbytes` (> 0) of pinned host memory that other processes can map, to read only.

    Args:
        device: A GPU, for which it is pinned.
        nbytes: A whole number of pages.

    Raises:
        CudaMemoryError: So much memory can't be pinned.
        OSError: There are no descriptors left, or the kernel is older than Linux 5.1.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        with contextlib.ExitStack() as undo:
            flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            self.memfd = os.memfd_create(_MEMFD_NAME, flags)
            undo.callback(os.close, self.memfd)
            os.ftruncate(self.memfd, nbytes)
            self._view = memoryview(mmap.mmap(self.memfd, nbytes))
            # From now on no process gets another writable map, this one included.
            seals = _F_SEAL_SEAL | _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
            seal(self.memfd, seals)
            self.address = address_of(self._view)
            undo.enter_context(PinnedRegion(device, self.address, nbytes))
            self._ends = undo.pop_all()

    def view(self) -> memoryview:
        """Return writable bytes, which keep the memory, pinned or not."""
        return self._view

    def __enter__(self) -> SharedPinned:
        return self

    def __exit__(self, *_: object) -> None:
        """Unpin the memory, and close the memfd."""
        self._view = memoryview(b"")
        self._ends.close()


class RingSlot:
    """A piece of the ring, with one user at a time: `view` (writable bytes) at host `address`."""

    __slots__ = ("address", "copying", "event", "view")

    def __init__(self, view: memoryview, address: int, event: CudaEvent) -> None:
        self.view, self.address, self.event = view, address, event
        #: False once the last copy is known to be done.
        self.copying = False

    def record(self, stream: CudaStream) -> None:
        """Record that the copies that are queued on a stream are the slot's. Raises CudaError."""
        self.copying = True
        self.event.record(stream)

    def wait(self) -> None:
        """Sleep until the slot's last copy is done. Raises CudaError."""
        if self.copying:
            self.event.synchronize()
            self.copying = False


class PinnedRing:
    """A ring of `slots` slots of `slot_nbytes` bytes each.

    Thread-safe; owns its memory (of the kind `memory`), events and two streams. Raises
    CudaMemoryError if so much memory can't be pinned, and what else `memory` raises.
    """

    def __init__(
        self,
        device: Device,
        *,
        slot_nbytes: int = SLOT_BYTES,
        slots: int = SLOTS,
        memory: Callable[[Device, int], PinnedMemory | SharedPinned] = PinnedMemory,
    ) -> None:
        self.device = device
        self.slot_nbytes = slot_nbytes
        self._memory = memory
        with contextlib.ExitStack() as undo:
            self._up = undo.enter_context(CudaStream(device))
            self._down = undo.enter_context(CudaStream(device))
            self._uploaded = undo.enter_context(CudaEvent(device))
            #: The first slots' memory.
            self.memory, found = self._slots(undo, slots)
            self._ends = undo.pop_all()
        self.view = self.memory.view()
        self._free = deque(found)
        self.slots = slots
        self._wake = threading.Condition()
        self._turns: deque[object] = deque()  # of threads that wait for a slot
        self._closed = False

    def _slots(
        self, undo: contextlib.ExitStack, slots: int
    ) -> tuple[PinnedMemory | SharedPinned, list[RingSlot]]:
        """Return memory for more slots, and these; `undo` frees them."""
        nbytes = self.slot_nbytes
        memory = self._memory(self.device, slots * nbytes)
        undo.enter_context(memory)
        view = memory.view()
        events = [undo.enter_context(CudaEvent(self.device)) for _ in range(slots)]
        return memory, [
            RingSlot(view[at : at + nbytes], memory.address + at, event)
            for at, event in zip(range(0, slots * nbytes, nbytes), events, strict=True)
        ]

    def extend(self, slots: int) -> None:
        """Add `slots` slots, which lie outside of `view`.

        Raises:
            CudaMemoryError: So much more memory can't be pinned; nothing has changed.
            ClosedError: The ring was closed.
        """
        with contextlib.ExitStack() as undo:
            _, found = self._slots(undo, slots)
            with self._wake:
                if self._closed:
                    raise ClosedError("the ring of pinned memory was closed")
                self._ends.push(undo.pop_all())
                self._free.extend(found)
                self.slots += slots
                self._wake.notify_all()

    # -- slot by slot ------------------------------------------------------------------------------

    def take(self) -> RingSlot:
        """Return a slot whose last copy is done, waiting for one if necessary. Threads that wait
        get slots in the order in which they came.

        Raises:
            ClosedError: The ring was closed.
            CudaError: The slot's last copy failed.
        """
        turn = object()
        with self._wake:
            self._turns.append(turn)
            try:
                self._wake.wait_for(lambda: self._closed or (self._free and self._turns[0] is turn))
                slot = self._pop()
            finally:
                self._turns.remove(turn)
                if self._turns:
                    self._wake.notify_all()
        return self._ready(slot)

    def try_take(self) -> RingSlot | None:
        """Return a slot as `take` does, or None if no slot is free, or others wait for it."""
        with self._wake:
            if (self._turns or not self._free) and not self._closed:
                return None
            slot = self._pop()
        return self._ready(slot)

    @property
    def free(self) -> int:
        """The number of slots that are free now, less those that threads wait for."""
        return max(0, len(self._free) - len(self._turns))

    def _pop(self) -> RingSlot:
        if self._closed:
            raise ClosedError("the ring of pinned memory was closed")
        return self._free.popleft()

    def _ready(self, slot: RingSlot) -> RingSlot:
        with Undo(self.give, slot):
            slot.wait()
        return slot

    def give(self, slot: RingSlot) -> None:
        """Give a slot back to the ring; a copy from or to it may still run."""
        with self._wake:
            self._free.append(slot)
            if self._turns:
                self._wake.notify_all()
            self._end_if_idle()

    def push(self, slot: RingSlot, target: int, nbytes: int) -> None:
        """Queue a copy of the slot's first bytes to device address `target`."""
        with self.device.current():
            self.push_all(slot, ((target, 0, nbytes),))
            self.mark(slot)

    def push_all(self, slot: RingSlot, places: Iterable[tuple[int, int, int]]) -> None:
        """Queue copies of the slot's bytes; call `mark` after it. The context is current.

        Args:
            slot: The slot.
            places: The device address, the offset in the slot, and the bytes of each copy.
        """
        copy, stream = self.device.driver.copy_htod, self._up.handle
        for target, offset, nbytes in places:
            copy(target, slot.address + offset, nbytes, stream)

    def mark(self, slot: RingSlot) -> None:
        """Have `slot.wait` wait for all that is queued for uploads now."""
        slot.record(self._up)

    @property
    def up(self) -> int:
        """The handle of the stream of uploads."""
        return self._up.handle

    def fetch(self, slot: RingSlot, source: int, nbytes: int, *, offset: int = 0) -> None:
        """Queue a copy of device memory into the slot, from `offset` on; call `slot.wait()` before
        reading it."""
        with self.device.current():
            self.device.driver.copy_dtoh(slot.address + offset, source, nbytes, self._down.handle)
        slot.record(self._down)

    def gather(self, slot: RingSlot, spans: Iterable[DeviceView], *, offset: int = 0) -> None:
        """Queue copies of device memory into the slot, one after the other from `offset` on, as
        `fetch` does; adjacent spans are copied as one."""
        copy, stream = self.device.driver.copy_dtoh, self._down.handle
        into, address, run = slot.address + offset, 0, 0
        with self.device.current():
            try:
                for span in spans:
                    if span.address != address + run:
                        if run:
                            copy(into, address, run, stream)
                        into, address, run = into + run, span.address, 0
                    run += len(span)
                if run:
                    copy(into, address, run, stream)
            finally:
                slot.record(self._down)

    # -- whole ranges ------------------------------------------------------------------------------

    def upload(self, target: int, source: memoryview) -> None:
        """Copy host bytes to device address `target`; they are in place when this returns."""
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
        """Wait, asleep, for all queued uploads. Raises CudaError."""
        self._uploaded.record(self._up)
        self._uploaded.synchronize()

    def download(self, source: int, target: memoryview) -> None:
        """Copy `len(target)` bytes from device address `source` to host bytes. Raises CudaError."""
        done = 0
        for part in self.read(source, len(target)):
            copy_bytes(target[done : done + len(part)], part)
            done += len(part)

    def read(self, source: int, nbytes: int) -> Generator[memoryview, None, None]:
        """Yield `nbytes` of device memory from `source` in order, as `pieces` does."""
        step = self.slot_nbytes
        return self.pieces((source + at, min(step, nbytes - at)) for at in range(0, nbytes, step))

    def pieces(self, parts: Iterable[tuple[int, int]]) -> Generator[memoryview, None, None]:
        """Yield parts of device memory, one by one, while the next ones are copied.

        Each piece is valid until the next one is taken. Close the iterator if it is not used up.

        Args:
            parts: The address and the length of each, of which none is longer than a slot.

        Raises:
            ClosedError: The ring was closed.
            CudaError: A copy failed.
        """
        ahead: deque[tuple[RingSlot, int]] = deque()
        left = deque(parts)
        try:
            while left or ahead:
                # Half of the ring at most: other threads need slots too.
                while left and len(ahead) < max(1, self.slots // 2):
                    slot = self.take() if not ahead else self.try_take()
                    if slot is None:
                        break
                    source, nbytes = left.popleft()
                    ahead.append((slot, nbytes))
                    self.fetch(slot, source, nbytes)
                slot, nbytes = ahead[0]
                slot.wait()
                yield slot.view[:nbytes]
                ahead.popleft()
                self.give(slot)
        finally:
            for slot, _ in ahead:
                self.give(slot)

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Hand out no more slots, and free everything once all slots are given back.

        Idempotent.
        """
        with self._wake:
            self._closed = True
            self._wake.notify_all()
            self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self._closed and len(self._free) == self.slots:
            self.slots = -1
            self._free.clear()
            self.view = memoryview(b"")
            self._ends.close()
