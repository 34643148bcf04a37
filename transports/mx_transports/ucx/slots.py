"""GPU memory for readers that read by themselves: step by step, through slots of pinned memory.

The slots lie in a memfd that another process can map to read: the one of ucx's agent, which so
needs no GPU and has no secrets. A reader names pieces of at most a slot; they are copied into one,
which the reader reads and then gives back. Slots are few, and a reader that holds one too long
while others wait loses its connection, so that each gets its turn.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import cast

from mx.cuda.device import Device
from mx.cuda.driver import load
from mx.cuda.errors import GONE_CODES, CudaError
from mx.cuda.ring import MAX_COPIES, PinnedRing, RingSlot, SharedPinned
from mx.errors import LocalError
from mx.transport import DeviceView, ExposedRegion, ExposeOptions
from mx.units import MIB
from mx_transports.toolkit import framing
from mx_transports.toolkit.exposure import GrantState
from mx_transports.toolkit.pieces import devices_of, find_table

SLOT_BYTES = 1 * MIB
#: The slots of an exposure, whatever the number of its readers. A grant has half of them at most.
SLOTS = 16
#: How often a connection that waits for a slot looks for one.
LOOK_S = 1e-3


class StagingSlots:
    """The slots of one exposure. Thread-safe.

    Args:
        regions: The regions to expose, all in the memory of one GPU.
        options: The options of the exposure.

    Raises:
        CudaError: CUDA can't be used, or so much memory can't be pinned.
        ConfigError: This process does not see the GPU.
        LocalError: The regions are not in the memory of one GPU, or memory can't be shared.
    """

    def __init__(self, regions: Sequence[ExposedRegion], options: ExposeOptions) -> None:
        devices = {device for each in regions for device in devices_of(each.view)}
        elsewhere = any(len(each.view) and not devices_of(each.view) for each in regions)
        if elsewhere or len(devices) != 1:
            raise LocalError("only memory of one GPU can be exposed together")
        self._views = {region.index: region.view for region in regions}
        self._on_lost: Callable[[CudaError], None] = options.on_lost
        #: A slot may be held for so long while no other is free.
        self.patience_s = options.stall_timeout_s / 2
        self._lock = threading.Lock()
        self._taken: Counter[bytes] = Counter()
        with contextlib.ExitStack() as undo:
            device = undo.enter_context(Device.open(load(), devices.pop()))
            try:
                ring = PinnedRing(device, slot_nbytes=SLOT_BYTES, slots=SLOTS, memory=SharedPinned)
            except OSError as error:
                raise LocalError(f"no pinned memory to share: {error.strerror}") from error
            undo.callback(ring.close)
            self._ring = ring
            self._ends = undo.pop_all()
        self.slot_bytes = SLOT_BYTES
        self.nbytes = SLOTS * SLOT_BYTES

    @property
    def memfd(self) -> int:
        """The descriptor of the slots' memory, `nbytes` long."""
        return cast("SharedPinned", self._ring.memory).memfd

    @property
    def short(self) -> bool:
        """True while no slot is free."""
        return not self._ring.free

    def take(self, grant: GrantState, more: bool) -> RingSlot | None:
        """Return a slot, or None if there is none now; connections that have one get `more` only
        while half of the slots are free. Raises ConnectionError: the GPU fails."""
        with self._lock, self._edge():
            if 2 * self._taken[grant.key] >= SLOTS or (more and 2 * self._ring.free <= SLOTS):
                return None
            slot = self._ring.try_take()
            self._taken[grant.key] += slot is not None
            return slot

    def give(self, grant: GrantState, slot: RingSlot) -> None:
        """Take a slot back, once nothing is copied into it any more."""
        with contextlib.suppress(CudaError):  # the GPU is lost: nothing copies
            slot.wait()
        with self._lock:
            self._taken[grant.key] -= 1
            if not self._taken[grant.key]:
                del self._taken[grant.key]
        self._ring.give(slot)

    def offset(self, slot: RingSlot) -> int:
        """Return where a slot begins in the memfd."""
        return slot.address - self._ring.memory.address

    def find(self, table: memoryview) -> list[DeviceView] | None:
        """Return the memory of pieces; None if it is not the GPU's, or more than a slot holds."""
        spans = find_table(self._views, table)
        if spans is None or sum(map(len, spans)) > SLOT_BYTES:
            return None
        found = [span for span in spans if isinstance(span, DeviceView)]
        # Bytes of the host's would be missing between those of the GPU.
        whole = sum(map(len, found)) == sum(map(len, spans))
        return list(filter(len, found)) if whole else None

    def fill(self, slot: RingSlot, spans: Sequence[DeviceView], offset: int) -> None:
        """Queue the copies of memory into a slot, from `offset` on. Raises ConnectionError: the GPU
        fails."""
        with self._edge():
            self._ring.gather(slot, spans, offset=offset)

    def wait(self, slot: RingSlot) -> None:
        """Return once a slot is filled. Raises ConnectionError: the GPU fails."""
        with self._edge():
            slot.wait()

    @contextlib.contextmanager
    def _edge(self) -> Iterator[None]:
        try:
            yield
        except CudaError as error:
            if error.code in GONE_CODES:
                self._on_lost(error)
            raise ConnectionError(str(error)) from None

    def close(self) -> None:
        """Free everything, after the last `give`. Idempotent."""
        self._views.clear()
        self._ends.close()


class _SlotStep:
    """A reader's step: its `spans` (None: there are none such) are copied into `slot` once it has
    one; `number` names it."""

    def __init__(self, number: int, generation: int, spans: list[DeviceView] | None) -> None:
        self.number, self.generation, self.spans = number, generation, spans
        self.slot: RingSlot | None = None
        self.since_s = 0.0
        self.copied, self.copied_nbytes = 0, 0  # or about to be: spans, and their bytes


class SlotSteps:
    """The steps of one connection, in their order: wait for a slot, are filled, are read.

    Used by the connection's thread alone; `close` gives its slots back.
    """

    def __init__(
        self, slots: StagingSlots, grant: GrantState, status: Callable[[int], int]
    ) -> None:
        """
        Args:
            slots: The exposure's.
            grant: The reader's.
            status: Returns the status of a read that names a generation, as of now.
        """
        self._slots, self._grant, self._status = slots, grant, status
        self._waiting: deque[_SlotStep] = deque()
        self._filling: deque[_SlotStep] = deque()
        self._read: dict[int, _SlotStep] = {}

    @property
    def wait_s(self) -> float | None:
        """How long the connection may sleep unless a message comes; None: for ever."""
        if self._waiting:
            return LOOK_S
        return self._slots.patience_s if self._read else None

    def begin(self, number: int, generation: int, table: memoryview) -> None:
        """Queue a step of the pieces in a table. No step with this number is under way."""
        self._waiting.append(_SlotStep(number, generation, self._slots.find(table)))

    def end(self, number: int) -> None:
        """End a step, which `answers` has named, unless the reader is wrong: then do nothing."""
        step = self._read.pop(number, None)
        if step is not None and step.slot is not None:
            self._slots.give(self._grant, step.slot)

    def answers(self) -> Iterator[tuple[int, int, int]]:
        """Move steps on as far as they can go without a message.

        Yields:
            For each that can be read now: its number, its status, and its slot's offset. Those that
            take many copies come several times before, as WAITING.

        Raises:
            OSError: The GPU fails, or a slot was held too long while others wait.
        """
        while self._waiting or self._filling:
            while self._waiting and self._fill(self._waiting[0]):
                self._filling.append(self._waiting.popleft())
            if not self._filling:
                break
            step = self._filling[0]
            if step.slot is not None:
                self._slots.wait(step.slot)
                if self._copy(step, step.slot):
                    yield step.number, framing.WAITING, 0
                    continue
            self._filling.popleft()
            step.since_s = time.monotonic()
            self._read[step.number] = step
            status = framing.OUT_OF_RANGE if step.spans is None else self._status(step.generation)
            yield step.number, status, self._slots.offset(step.slot) if step.slot else 0
        if self._read and self._slots.short:
            oldest = next(iter(self._read.values()))
            if time.monotonic() - oldest.since_s > self._slots.patience_s:
                raise TimeoutError("a slot of pinned memory is held while others wait")

    def _fill(self, step: _SlotStep) -> bool:
        """Queue the copies of a step. Return False if no slot is free for it now."""
        if step.spans:
            step.slot = self._slots.take(self._grant, bool(self._filling or self._read))
            if step.slot is None:
                return False
            self._copy(step, step.slot)
        return True

    def _copy(self, step: _SlotStep, slot: RingSlot) -> bool:
        """Queue the next of a step's copies. Return False if none are left."""
        part = (step.spans or [])[step.copied : step.copied + MAX_COPIES]
        if part:
            self._slots.fill(slot, part, step.copied_nbytes)
            step.copied += len(part)
            step.copied_nbytes += sum(map(len, part))
        return bool(part)

    def close(self) -> None:
        """Give all slots back."""
        for step in (*self._waiting, *self._filling, *self._read.values()):
            if step.slot is not None:
                self._slots.give(self._grant, step.slot)
        self._waiting.clear()
        self._filling.clear()
        self._read.clear()
