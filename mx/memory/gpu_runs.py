"""Slices of tensors in a GPU's memory: buffers for blocks of which a part is wanted, and the copy
of that part to its place."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from mx.cuda.device import Device, DeviceMemory
from mx.cuda.driver import load
from mx.cuda.ring import PinnedRing
from mx.views import DeviceView, Span

#: The most bytes that one call of `GpuRuns.copy` is given, and the slots for each direction.
_SLOT_BYTES, _SLOTS = 1 << 20, 4

#: Copies what is wanted of some bytes (the second ones) to the first ones, both in the host.
Taking = Callable[[memoryview, memoryview], None]


class GpuRuns:
    """Thread-safe. What it needs is allocated at first use, and freed by `close`."""

    def __init__(self, device: str) -> None:
        self._name = device
        self._lock = threading.Lock()
        self._ends = contextlib.ExitStack()
        self._opened: tuple[Device, PinnedRing, PinnedRing] | None = None

    def buffer(self, nbytes: int) -> DeviceView:
        """Return new memory on the GPU, which lives as long as views of it do. Raises CudaError."""
        device, _, _ = self._open()
        memory = DeviceMemory(device, nbytes)
        return DeviceView(device.key, memory.address, nbytes, memory)

    def copy(self, target: DeviceView, data: Span, take: Taking) -> None:
        """Copy what is wanted of a block to its place, through pinned memory. Returns when it is
        there.

        Args:
            target: The place, of at most a block's size.
            data: The block, on the host or the GPU.
            take: Copies what is wanted.

        Raises:
            CudaError: The driver fails.
        """
        _, down, up = self._open()
        with contextlib.ExitStack() as reading:
            if isinstance(data, DeviceView):
                reads = contextlib.closing(down.read(data.address, len(data)))
                data = next(reading.enter_context(reads))
            slot = up.take()
            try:
                take(slot.view[: len(target)], data)
                up.push(slot, target.address, len(target))
                slot.wait()
            finally:
                up.give(slot)

    def _open(self) -> tuple[Device, PinnedRing, PinnedRing]:
        with self._lock:
            if self._opened is None:
                device = self._ends.enter_context(Device.open(load(), self._name))
                # One each: who waits for a slot to write from holds none that others wait for.
                down, up = (
                    self._ends.enter_context(
                        contextlib.closing(
                            PinnedRing(device, slot_nbytes=_SLOT_BYTES, slots=_SLOTS)
                        )
                    )
                    for _ in range(2)
                )
                self._opened = device, down, up
            return self._opened

    def close(self) -> None:
        """Free what was allocated, but buffers that are in use. Idempotent."""
        self._opened = None
        self._ends.close()
