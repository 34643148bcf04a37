"""The signals of layers by which CUDA streams, in place of the CPU, wait for verified bytes.

A consumer may queue work on a layer before its bytes arrive: its stream waits, the CPU does not.
The word of each layer lies in pinned memory. A stream waits until it is at least 1
(cuStreamWaitValue32), which the CPU writes when the layer's digests hold. If the pull fails, every
word that is still 0 becomes 2: the streams go on, since nothing may hang, but the pull is
*poisoned*. A consumer therefore calls `check` after waiting for its stream and before it returns
anything that it computed.

    state      verified   failed, or nothing came for too long
    WAITING    VERIFIED   POISONED
    VERIFIED   VERIFIED   VERIFIED
    POISONED   POISONED   POISONED

A stream that waits may hold up what it waits for: where streams share one hardware queue, copies
are queued behind it, and a driver call of another thread may wait for all work. So everything is
loaded before the first stream waits, what mx frees meanwhile it frees afterwards, and a watchdog
poisons what does not come.
"""

from __future__ import annotations

import ctypes
import enum
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mx.contexts import OwnContext, Undo
from mx.errors import ClosedError, LocalError, MxError, another

if TYPE_CHECKING:
    from mx.cuda.device import CudaEvent, Device

_RELEASED = 1
_POISON = 2


class LayerReadiness(enum.Enum):
    """The state of a layer."""

    WAITING = "waiting"
    VERIFIED = "verified"
    POISONED = "poisoned"


class LayerSignals(OwnContext):
    """The signals of one pull on one device; thread-safe.

    Streams are driver handles of that device, such as `torch.cuda.Stream.cuda_stream`. The object
    takes over `device`, and owns a word of pinned memory for each layer, an event for each stream
    that waits and, while one does, a thread, until `close`, which poisons layers that are not
    verified and waits for the streams to pass their words. Raises CudaMemoryError.
    """

    def __init__(self, device: Device, layers: int, patience_s: float) -> None:
        """
        Args:
            device: The GPU.
            layers: How many layers there are.
            patience_s: How long no layer may become ready while a stream waits.
        """
        self.layers = layers
        self._device = device
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._states = [LayerReadiness.WAITING] * layers
        #: By stream: happens when the stream has passed the last word that it waits for.
        self._passed: dict[int, CudaEvent] = {}
        self._watchdog: threading.Thread | None = None
        self._error: MxError | None = None
        self._closed = False
        with Undo(device.close):
            from mx.cuda.device import PinnedMemory

            self._memory = PinnedMemory(device, max(4 * layers, 4))
        # On x86 and Arm a 32-bit store to an aligned word is atomic.
        self._words = (ctypes.c_uint32 * layers).from_address(self._memory.address)
        for layer in range(layers):
            self._words[layer] = 0

    def state(self, layer: int) -> LayerReadiness:
        """Return the state of a layer."""
        with self._changed:
            return self._states[layer]

    # -- called by the pull ------------------------------------------------------------------------

    def verified(self, layer: int) -> None:
        """Record that the layer's digests hold, and release the streams that wait for it."""
        with self._changed:
            if self._states[layer] is LayerReadiness.WAITING:
                self._states[layer] = LayerReadiness.VERIFIED
                self._words[layer] = _RELEASED
                self._changed.notify_all()

    def failed(self, error: MxError) -> None:
        """Record that the pull failed: poison unverified layers and release their streams."""
        with self._changed:
            for layer, state in enumerate(self._states):
                if state is LayerReadiness.WAITING:
                    self._error = self._error or another(error).with_traceback(None)
                    self._states[layer] = LayerReadiness.POISONED
                    self._words[layer] = _POISON
            self._changed.notify_all()

    def _watch(self) -> None:
        from mx.cuda.device import waiting_streams

        try:
            self._watch_layers()
        finally:
            waiting_streams.end(self._device)

    def _watch_layers(self) -> None:
        with self._changed:
            waiting, since_s = self._states.count(LayerReadiness.WAITING), time.monotonic()
            while waiting:
                left_s = since_s + self._patience_s - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
                now = self._states.count(LayerReadiness.WAITING)
                if now != waiting:
                    waiting, since_s = now, time.monotonic()
        if waiting:
            self.failed(
                LocalError(
                    f"no layer became ready in {self._patience_s:g} s while streams wait for some",
                    hint="streams can't wait where CUDA_DEVICE_MAX_CONNECTIONS is small: use "
                    "`layers()`; for a slow network, use `signals(patience_s=...)`",
                )
            )

    def _begin_watching(self) -> None:
        from mx.cuda.device import waiting_streams

        watchdog = threading.Thread(target=self._watch, name="mx-signals", daemon=True)
        waiting_streams.begin(self._device)
        with Undo(waiting_streams.end, self._device):
            watchdog.start()
        self._watchdog = watchdog

    # -- called by consumers -----------------------------------------------------------------------

    def wait_verified(self, layer: int, stream: int) -> None:
        """Make later work on `stream` wait until the layer is verified or the pull has failed.

        `check` tells the two apart.

        Args:
            layer: The layer's index.
            stream: The driver's handle of the stream, which captures no graph.

        Raises:
            ClosedError: The signals were closed before the layer was verified.
            MxError: The pull has failed; its error.
            CudaError: The driver fails.
        """
        with self._changed:
            self._raise(layer)
            if self._states[layer] is LayerReadiness.VERIFIED:
                return
            if self._watchdog is None:
                self._begin_watching()
            passed = self._passed.get(stream)
            if passed is None:
                from mx.cuda.device import CudaEvent

                passed = self._passed[stream] = CudaEvent(self._device)
            address = self._memory.device_address + 4 * layer
            with self._device.current():
                self._device.driver.stream_wait_value(stream, address, _RELEASED)
                self._device.driver.event_record(passed.handle, stream)

    def check(self, layers: Sequence[int] | None = None) -> None:
        """Check that layers are verified.

        Call it after waiting for the streams that used them, and before handing out results.

        Args:
            layers: Indices of the layers; None checks all.

        Raises:
            MxError: A layer is poisoned; the pull's error.
            ClosedError: A layer is not verified yet, or the signals were closed.
        """
        with self._changed:
            for layer in range(len(self._states)) if layers is None else layers:
                self._raise(layer)
                if self._states[layer] is not LayerReadiness.VERIFIED:
                    raise ClosedError(f"layer {layer} is not verified yet: wait for its stream")

    def _raise(self, layer: int) -> None:
        if self._states[layer] is LayerReadiness.POISONED and self._error is not None:
            raise another(self._error)
        if self._closed and self._states[layer] is not LayerReadiness.VERIFIED:
            raise ClosedError("the pull's signals were closed")

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Poison unverified layers, wait for the streams, and free the memory. Idempotent."""
        self.failed(ClosedError("the pull was closed before the layer was verified"))
        with self._changed:
            if self._closed:
                return
            self._closed = True
            watchdog, passed = self._watchdog, list(self._passed.values())
        if watchdog is not None:
            watchdog.join()
        for event in passed:
            event.synchronize()
            event.close()
        self._memory.close()
        self._device.close()
