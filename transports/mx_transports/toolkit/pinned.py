"""Sends device memory over readers' connections, through a bounded ring of pinned memory.

A reader's thread takes a slot of the ring, has device memory copied into it, and sends it from
there. Readers take turns. One whose connection takes no more bytes keeps its slot as long as half
of the ring is free; else it gives the slot back, waits without one, and has what was not sent
copied again. So readers that stop, or trickle, leave half of the ring to the others, and no reader
is cut off for being slow.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby

from mx.cuda.device import Device
from mx.cuda.driver import load
from mx.cuda.errors import GONE_CODES, CudaError
from mx.cuda.ring import MAX_COPIES, PinnedRing, RingSlot
from mx.transport import DeviceView
from mx.units import KIB, MIB
from mx_transports.toolkit.stream import SocketStream

SLOT_BYTES = 1 * MIB
#: The slots of an exposure, whatever the number of its readers and GPUs; of a GPU at least four.
SLOTS, LEAST_SLOTS = 16, 4
#: A connection that took no byte for so long gives its slot back if the ring is short of them.
PATIENCE_S = 0.02
#: What is copied at least for a connection that gave its last slot back.
_LEAST_BYTES = 64 * KIB


class PinnedSender:
    """The rings of one exposure, one for each GPU that it has memory of. Thread-safe.

    Raises:
        CudaError: CUDA can't be used, or so much memory can't be pinned.
        ConfigError: This process does not see one of the GPUs.
    """

    def __init__(
        self, devices: Collection[str], on_lost: Callable[[CudaError], None] = lambda _: None
    ) -> None:
        """
        Args:
            devices: The GPUs, as `DeviceView.device` names them.
            on_lost: See `mx.transport.ExposeOptions`.
        """
        self._on_lost = on_lost
        self._rings: dict[str, PinnedRing] = {}
        slots = max(LEAST_SLOTS, SLOTS // len(devices))
        with contextlib.ExitStack() as undo:
            for name in sorted(devices):
                device = undo.enter_context(Device.open(load(), name))
                ring = PinnedRing(device, slot_nbytes=SLOT_BYTES, slots=slots)
                undo.callback(ring.close)
                self._rings[name] = ring
            self._ends = undo.pop_all()

    def send(
        self, stream: SocketStream, spans: Sequence[DeviceView], on_sent: Callable[[int], None]
    ) -> None:
        """Send device memory. Nothing is copied from it any more when this returns or raises.

        Args:
            stream: The reader's connection.
            spans: The memory, in order.
            on_sent: Called with the number of bytes that were sent since its last call.

        Raises:
            TimeoutError: Not one byte was taken for the stall timeout.
            OSError: The connection is lost, or the memory can't be copied: then it has to end, as
                its bytes were announced.
        """
        try:
            for device, run in groupby(spans, key=lambda span: span.device):
                ring = self._rings[device]
                # The context is made current once, not for each call.
                with ring.device.current(), contextlib.closing(_Feed(ring, run)) as feed:
                    while feed.fill(stream.wait_to_send):
                        feed.sent(
                            stream.send_while(feed.bytes(), PATIENCE_S, feed.may_wait, on_sent)
                        )
        except CudaError as error:
            if error.code in GONE_CODES:
                self._on_lost(error)
            raise ConnectionError(str(error)) from None

    def close(self) -> None:
        """Free the rings, after the last `send` has returned. Idempotent."""
        self._ends.close()


class _FilledSlot:
    """A slot with device memory in it, of which the first `done` bytes were sent."""

    def __init__(self, slot: RingSlot) -> None:
        self.slot = slot
        self.spans: list[DeviceView] = []
        self.nbytes = self.done = 0

    def left(self) -> Iterator[DeviceView]:
        skip = self.done
        for span in self.spans:
            if skip < len(span):
                yield span[skip:]
            skip = max(0, skip - len(span))


class _Feed:
    """What one `send` still has to send: in slots, of which one is sent while the next one is
    filled, and in device memory."""

    def __init__(self, ring: PinnedRing, spans: Iterator[DeviceView]) -> None:
        self._ring = ring
        self._left = deque(span for span in spans if len(span))
        self._filled: deque[_FilledSlot] = deque()
        self._size = ring.slot_nbytes

    def may_wait(self) -> bool:
        """Return True if a slot may wait for a connection that takes no bytes at the moment."""
        return 2 * self._ring.free >= self._ring.slots

    def fill(self, wait: Callable[[], None]) -> bool:
        """Fill the slot to send from, and the next one if there are enough. Return False at the
        end.

        Args:
            wait: Called before waiting for a slot; returns once the connection takes bytes.
        """
        if not self._filled:
            if not self._left:
                return False
            wait()
            self._copy(self._ring.take())
        if self._left and len(self._filled) < 2 and 2 * self._ring.free > self._ring.slots:
            slot = self._ring.try_take()
            if slot is not None:
                self._copy(slot)
        return True

    def _copy(self, slot: RingSlot) -> None:
        filled = _FilledSlot(slot)
        self._filled.append(filled)  # so that `close` gives the slot back, whatever happens
        while self._left and filled.nbytes < self._size and len(filled.spans) < MAX_COPIES:
            span = self._left.popleft()
            room = self._size - filled.nbytes
            if len(span) > room:
                self._left.appendleft(span[room:])
                span = span[:room]
            filled.spans.append(span)
            filled.nbytes += len(span)
        self._ring.gather(slot, filled.spans)

    def bytes(self) -> memoryview:
        """Return the bytes to send next, which are in their slot."""
        first = self._filled[0]
        first.slot.wait()
        return first.slot.view[first.done : first.nbytes]

    def sent(self, nbytes: int) -> None:
        """Count bytes of what `bytes` returned as sent; where some are not, give the slots back."""
        first = self._filled[0]
        first.done += nbytes
        if first.done == first.nbytes:
            self._ring.give(self._filled.popleft().slot)
            self._size = min(2 * self._size, self._ring.slot_nbytes)
            return
        self._left.extendleft(reversed([span for filled in self._filled for span in filled.left()]))
        self.close()
        # The connection takes about as much next time: little of it is copied twice.
        self._size = min(max(nbytes, _LEAST_BYTES), self._ring.slot_nbytes)

    def close(self) -> None:
        """Give all slots back, once nothing is copied into them any more."""
        while self._filled:
            slot = self._filled.popleft().slot
            with contextlib.suppress(CudaError):  # the GPU is lost: nothing copies
                slot.wait()
            self._ring.give(slot)
