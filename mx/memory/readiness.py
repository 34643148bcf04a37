"""A layer's two signals on a GPU: *landed* (an event) and *verified* (a word to wait for).

A consumer may queue work on a layer before its bytes are there: its stream waits, the CPU does
not. The word of each layer lies in pinned memory; a stream waits until it is at least 1
(cuStreamWaitValue32), which the CPU writes when the layer's digests hold. Where the pull fails,
every word that is still 0 becomes 2: the streams go on, since nothing may hang, but the pull is
*poisoned*, and whoever used a layer asks `check` after waiting for its stream and before it
returns anything that was computed.

    state      landed   verified   failed
    WAITING    LANDED   VERIFIED   POISONED
    LANDED     LANDED   VERIFIED   POISONED
    VERIFIED   VERIFIED VERIFIED   VERIFIED
    POISONED   POISONED POISONED   POISONED
"""

from __future__ import annotations

import ctypes
import enum
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from mx.cuda.device import Device, Event, PinnedMemory, Stream
from mx.errors import ClosedError, MxError

_RELEASED = 1
_POISON = 2


class Readiness(enum.Enum):
    """Where a layer stands."""

    WAITING = "waiting"
    LANDED = "landed"
    VERIFIED = "verified"
    POISONED = "poisoned"


class LayerSignals:
    """One pull's, on one device; thread-safe. Streams are handles of the driver's, such as
    `torch.cuda.Stream.cuda_stream`, of that device.

    Takes over `device`, and owns a word of pinned memory and an event for each layer until
    `close`, which poisons what is not verified and waits for the device: no stream may wait for a
    word that is gone. Raises CudaMemoryError.
    """

    def __init__(self, device: Device, layers: int) -> None:
        self.layers = layers
        self._device = device
        self._lock = threading.Condition()
        self._states = [Readiness.WAITING] * layers
        self._events: dict[int, Event] = {}
        self._error: MxError | None = None
        self._closed = False
        try:
            self._memory = PinnedMemory(device, max(4 * layers, 4))
        except BaseException:
            device.close()
            raise
        # On x86 and Arm a 32-bit store of an aligned word is seen whole.
        self._words = (ctypes.c_uint32 * layers).from_address(self._memory.address)
        for layer in range(layers):
            self._words[layer] = 0

    def state(self, layer: int) -> Readiness:
        with self._lock:
            return self._states[layer]

    # -- told by the pull --------------------------------------------------------------------------

    def landed(self, layer: int, stream: Stream) -> None:
        """Every byte of the layer is in place once what `stream` holds now is done."""
        with self._lock:
            if self._states[layer] is not Readiness.WAITING:
                return
            event = Event(self._device)
            event.record(stream)
            self._events[layer] = event
            self._states[layer] = Readiness.LANDED
            self._lock.notify_all()

    def verified(self, layer: int) -> None:
        """The layer's digests hold: streams that wait for it go on."""
        with self._lock:
            if self._states[layer] in (Readiness.WAITING, Readiness.LANDED):
                self._states[layer] = Readiness.VERIFIED
                self._words[layer] = _RELEASED
                self._lock.notify_all()

    def failed(self, error: MxError) -> None:
        """The pull will not be completed: release all that wait, and let none of them count."""
        with self._lock:
            for layer, state in enumerate(self._states):
                if state in (Readiness.WAITING, Readiness.LANDED):
                    self._error = self._error or error.with_traceback(None)
                    self._states[layer] = Readiness.POISONED
                    self._words[layer] = _POISON
            self._lock.notify_all()

    # -- asked by who uses the bytes ---------------------------------------------------------------

    def wait_verified(self, layer: int, stream: int) -> None:
        """What is queued on `stream` from now on waits until the layer is verified, or the pull
        has failed: `check` says which. Raises ClosedError, the pull's error, CudaError."""
        with self._lock:
            self._raise(layer)
            if self._states[layer] is Readiness.VERIFIED:
                return
            address = self._memory.device_address + 4 * layer
            with self._device.current():
                self._device.driver.stream_wait_value(stream, address, _RELEASED)

    def wait_landed(self, layer: int, stream: int) -> None:
        """What is queued on `stream` from now on waits until the layer's bytes are in place, right
        or wrong. Blocks the caller until the copies have been queued, which no event knows of
        before. Raises as `wait_verified`."""
        with self._lock:
            while self._states[layer] is Readiness.WAITING and not self._closed:
                self._lock.wait()
            self._raise(layer)
            event = self._events.get(layer)
            if event is not None:
                with self._device.current():
                    self._device.driver.stream_wait_event(stream, event.handle)

    def check(self, layers: Sequence[int] | None = None) -> None:
        """Raise the pull's error if one of these layers (all, by default) is poisoned, or not
        verified yet. To be asked after waiting for the streams that used them, and before giving
        away what they computed."""
        with self._lock:
            for layer in range(len(self._states)) if layers is None else layers:
                self._raise(layer)
                if self._states[layer] is not Readiness.VERIFIED:
                    raise ClosedError(f"layer {layer} is not verified yet: wait for its stream")

    def _raise(self, layer: int) -> None:
        if self._states[layer] is Readiness.POISONED and self._error is not None:
            raise type(self._error)(self._error.message, hint=self._error.hint)
        if self._closed and self._states[layer] is not Readiness.VERIFIED:
            raise ClosedError("the pull's signals were closed")

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Idempotent. Waits for the device if any stream may still be waiting."""
        self.failed(ClosedError("the pull was closed before the layer was verified"))
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._lock.notify_all()
        self._device.synchronize()
        for event in self._events.values():
            event.close()
        self._memory.close()
        self._device.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
