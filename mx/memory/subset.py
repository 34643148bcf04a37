"""The memory of some tensors of a model, or of slices of them, as a pull of the model fills it.

A pull reads blocks of the model. Those that lie whole in the destination go there as they are, by
`view`. Of others `write` copies what is wanted, once they are right.
"""

from __future__ import annotations

import contextlib
import threading
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from typing import Literal

from mx.buffers import copy_bytes
from mx.core.cuts import Runs
from mx.core.grid import BLOCK_BYTES
from mx.core.selection import Subset
from mx.cuda.device import Device, DeviceMemory
from mx.cuda.driver import load
from mx.cuda.ring import PinnedRing
from mx.memory.arena import MakeHasher
from mx.memory.live import Memory
from mx.views import DeviceView, ScatteredView, Span, View, contiguous, device_of, host_view

#: To give up the interpreter lock takes longer than to copy so few bytes.
_SHORT_BYTES = 16 * 1024
#: Shorter runs are copied by columns where that takes fewer steps.
_LONG_RUN_BYTES = 4096
#: What memoryview calls integers, by their bytes.
_CODES: dict[int, Literal["Q", "I", "H", "B"]] = {8: "Q", 4: "I", 2: "H", 1: "B"}


class SubsetMemory:
    """The arena of a model of which only a subset has memory.

    `memory` is that of the subset, laid out as `subset.layout` says. `view` is the model's layer
    space: it has memory where whole blocks of the model lie in one piece.
    """

    memfd: int | None = None

    def __init__(self, subset: Subset, memory: Memory) -> None:
        """
        Args:
            subset: The tensors.
            memory: Their memory, on the host or a GPU. The caller owns it.
        """
        self.subset = subset
        self.memory = memory
        self.hasher: MakeHasher = memory.hasher
        self._view: View = memory.view
        device = device_of(memory.view)
        self._gpu = None if device == "cpu" else GpuRuns(device)
        layers = subset.model.layers
        #: Where each tensor begins in the model's arena.
        self._begins = [layers[t.layer].arena_offset + t.offset for t, _ in subset.members]
        layers = subset.layout.layers
        self._targets = [layers[t.layer].arena_offset + t.offset for t in subset.layout.tensors]
        self.view = self._in_place()

    def _in_place(self) -> ScatteredView:
        begins: list[int] = []
        spans = []
        for base, target, (_, cut) in zip(
            self._begins, self._targets, self.subset.members, strict=True
        ):
            for begin, end, aside in cut.block_ranges():
                low, high = begin * BLOCK_BYTES, min(end * BLOCK_BYTES, cut.nbytes)
                if not aside:
                    # They are of one run: between two there is a block with a gap.
                    (run,) = cut.runs(low, high)
                    begins.append(base + low)
                    spans.append(contiguous(self._view[target + run.target :][: high - low]))
        nbytes = self.subset.model.arena_nbytes
        return ScatteredView.over(begins, spans, nbytes)

    def buffer(self, nbytes: int) -> Span:
        """Return new memory beside that of the subset. Raises CudaError."""
        return memoryview(bytearray(nbytes)) if self._gpu is None else self._gpu.buffer(nbytes)

    def write(self, place: int, data: Span) -> None:
        """Copy what is wanted of some bytes of the model to its place. Thread-safe.

        Args:
            place: Where they begin in the model's arena.
            data: Bytes of one tensor, in whole elements, a block at most; on the host, or on the
                GPU that the memory is on.

        Raises:
            CudaError: The GPU fails.
        """
        at = bisect_right(self._begins, place) - 1
        # An empty tensor begins where the next one does.
        if at < 0 or place >= self._begins[at] + self.subset.members[at][1].nbytes:
            return
        begin = place - self._begins[at]
        for runs in self.subset.members[at][1].runs(begin, begin + len(data)):
            to = self._targets[at] + runs.target
            target = contiguous(self._view[to : to + runs.nbytes * runs.number])
            if isinstance(target, DeviceView):
                assert self._gpu is not None
                self._gpu.copy(target, data, partial(copy_runs, runs=runs))
            else:
                with target:
                    copy_runs(target, host_view(data), runs)

    def release(self) -> None:
        """Let go of the memory, and release it. Idempotent."""
        self.forget()
        self.memory.release()

    def forget(self) -> None:
        """Let go of the memory. Idempotent."""
        self._view = memoryview(b"")
        self.view = ScatteredView.over((), (), 0)
        if self._gpu is not None:
            self._gpu.close()


def copy_runs(target: memoryview, data: memoryview, runs: Runs) -> None:
    """Copy runs at equal distances to where they lie one after the other.

    Args:
        target: Writable bytes, as many as the runs have.
        data: The bytes that the runs are in.
        runs: The runs.
    """
    offset, nbytes, stride, count, _ = runs
    if count == 1:
        if nbytes <= _SHORT_BYTES:
            target[:] = data[offset : offset + nbytes]
        else:
            with data[offset : offset + nbytes] as run:
                copy_bytes(target, run)
        return
    width = next(width for width in _CODES if not (nbytes | stride) % width)
    columns = nbytes // width
    if nbytes >= _LONG_RUN_BYTES or count <= columns:
        for number in range(count):
            at = offset + number * stride
            target[number * nbytes : (number + 1) * nbytes] = data[at : at + nbytes]
        return
    # One strided copy for each column: at most some hundred in a block, however short the runs are.
    with (
        data[offset : offset + (count - 1) * stride + nbytes] as part,
        part.cast(_CODES[width]) as rows,
        target.cast(_CODES[width]) as found,
    ):
        for column in range(columns):
            found[column::columns] = rows[column :: stride // width]


# -- slices of tensors in a GPU's memory ---------------------------------------------------------

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
