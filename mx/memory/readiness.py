"""The two signals of a layer on a GPU: *landed* (an event) and *verified* (a word to wait for).

A consumer may queue work on a layer before its bytes arrive: its stream waits, the CPU does not.
The word of each layer lies in pinned memory. A stream waits until it is at least 1
(cuStreamWaitValue32), which the CPU writes when the layer's digests hold. If the pull fails, every
word that is still 0 becomes 2: the streams go on, since nothing may hang, but the pull is
*poisoned*. A consumer therefore calls `check` after waiting for its stream and before it returns
anything that it computed.

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
from typing import Self

from mx.cuda.device import Device, Event, PinnedMemory, Stream
from mx.errors import ClosedError, MxError

_RELEASED = 1
_POISON = 2


class Readiness(enum.Enum):
    """The state of a layer."""

    WAITING = "waiting"
    LANDED = "landed"
    VERIFIED = "verified"
    POISONED = "poisoned"


class LayerSignals:
    """The signals of one pull on one device; thread-safe.

    Streams are driver handles of that device, such as `torch.cuda.Stream.cuda_stream`. The object
    takes over `device`, and owns a word of pinned memory and an event for each layer until
    `close`, which poisons layers that are not verified and waits for the device: no stream may
    wait for a word that is freed. Raises CudaMemoryError.
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
        # On x86 and Arm a 32-bit store to an aligned word is atomic.
        self._words = (ctypes.c_uint32 * layers).from_address(self._memory.address)
        for layer in range(layers):
            self._words[layer] = 0

    def state(self, layer: int) -> Readiness:
        """Return the state of a layer."""
        with self._lock:
            return self._states[layer]

    # -- called by the pull ------------------------------------------------------------------------

    def landed(self, layer: int, stream: Stream) -> None:
        """Record that every byte of the layer is in place once `stream`'s present work is done."""
        with self._lock:
            if self._states[layer] is not Readiness.WAITING:
                return
            event = Event(self._device)
            event.record(stream)
            self._events[layer] = event
            self._states[layer] = Readiness.LANDED
            self._lock.notify_all()

    def verified(self, layer: int) -> None:
        """Record that the layer's digests hold, and release the streams that wait for it."""
        with self._lock:
            if self._states[layer] in (Readiness.WAITING, Readiness.LANDED):
                self._states[layer] = Readiness.VERIFIED
                self._words[layer] = _RELEASED
                self._lock.notify_all()

    def failed(self, error: MxError) -> None:
        """Record that the pull failed: poison unverified layers and release their streams."""
        with self._lock:
            for layer, state in enumerate(self._states):
                if state in (Readiness.WAITING, Readiness.LANDED):
                    self._error = self._error or error.with_traceback(None)
                    self._states[layer] = Readiness.POISONED
                    self._words[layer] = _POISON
            self._lock.notify_all()

    # -- called by consumers -----------------------------------------------------------------------

    def wait_verified(self, layer: int, stream: int) -> None:
        """Make later work on `stream` wait until the layer is verified or the pull has failed.

        `check` tells the two apart.

        Args:
            layer: The layer's index.
            stream: The driver's handle of the stream.

        Raises:
            ClosedError: The signals were closed before the layer was verified.
            MxError: The pull has failed; its error.
            CudaError: The driver fails.
        """
        with self._lock:
            self._raise(layer)
            if self._states[layer] is Readiness.VERIFIED:
                return
            address = self._memory.device_address + 4 * layer
            with self._device.current():
                self._device.driver.stream_wait_value(stream, address, _RELEASED)

    def wait_landed(self, layer: int, stream: int) -> None:
        """Make later work on `stream` wait until the layer's bytes are in place, right or wrong.

        Blocks the caller until the copies have been queued: before that there is no event to wait
        for. Arguments and errors are those of `wait_verified`.
        """
        with self._lock:
            while self._states[layer] is Readiness.WAITING and not self._closed:
                self._lock.wait()
            self._raise(layer)
            event = self._events.get(layer)
            if event is not None:
                with self._device.current():
                    self._device.driver.stream_wait_event(stream, event.handle)

    def check(self, layers: Sequence[int] | None = None) -> None:
        """Check that layers are verified.

        Call it after waiting for the streams that used them, and before handing out results.

        Args:
            layers: Indices of the layers; None checks all.

        Raises:
            MxError: A layer is poisoned; the pull's error.
            ClosedError: A layer is not verified yet, or the signals were closed.
        """
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
        """Poison unverified layers, wait for the device and free the memory. Idempotent."""
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

    def __exit__(self, *_: object) -> None:
        self.close()
