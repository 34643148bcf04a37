"""The blocks that one pull brings into a GPU's memory, hashed there as they land.

The table has each block's address, length and digest, and lies on the GPU: what hashes a run of
blocks uploads nothing, and one word comes back, which says whether any of them is wrong. Only then
are the digests read.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mx.core.grid import BLOCK_BYTES, ChunkGrid
from mx.cuda.blake3 import CHAINS_BYTES, DIGEST_BYTES, UNIT_BYTES
from mx.cuda.device import CudaEvent, CudaStream, Device, DeviceMemory, PinnedMemory
from mx.cuda.digest import DigestKernel
from mx.cuda.errors import CudaMemoryError
from mx.transport import DeviceView, View
from mx.views import ScatteredView

log = logging.getLogger(__name__)

#: Runs of blocks that are hashed at a time, those of a pull's streams, and the most blocks of a
#: launch: 8 MiB of chaining values on the device for each run.
LAUNCHES, LAUNCH_BLOCKS = 4, 256
_WORD_BYTES = 4
_ROW_BYTES = 8 + 8 + 2 * DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class QueuedDigests:
    """A run of blocks, [first, last), whose digests were queued; `slot` is what that uses."""

    first: int
    last: int
    slot: int


class DigestTable:
    """One pull's, of memory on one GPU. Thread-safe.

    What it needs of the GPU it makes at the first run of blocks, and owns until `close`.
    """

    def __init__(
        self,
        grid: ChunkGrid,
        view: View,
        page_of: Callable[[int], bytes | None],
        kernel: Callable[[], DigestKernel | None],
    ) -> None:
        """
        Args:
            grid: How the model is cut.
            view: The memory that it lands in, all on one GPU. The caller keeps it.
            page_of: Returns the digests that a layer's blocks must have; None while they are not
                known.
            kernel: Returns the GPU's kernel, None while, or if, it has none. Does not block.
        """
        self._grid = grid
        self._page_of = page_of
        self._kernel = kernel
        #: `_odd` are the blocks that the kernel can't read.
        self._addresses, self._lengths, self._odd = _blocks(grid, view)
        self._lock = threading.Lock()
        self._device: _DeviceTable | None = None
        self._closed = False

    def queue(self, first: int, last: int, stream: int) -> QueuedDigests | None:
        """Hash blocks [first, last) behind what is queued on a stream. The context is current.

        Args:
            first: The first block, among all of the model.
            last: The one after the last.
            stream: The stream's handle.

        Returns:
            What `wrong` is called with once that has ended, and `give_back` after it. None where
            they can't be hashed this way now.

        Raises:
            CudaError: The driver fails. Nothing may be known of the blocks.
        """
        at, until = np.searchsorted(self._odd, (first, last))
        with self._lock:
            device = None if at < until else self._made()
            if device is None or not device.free:
                return None
            slot = device.free.pop()
            device.upload_pages(self._grid, self._page_of)
        device.launch(first, last, slot, stream)
        return QueuedDigests(first, last, slot)

    def wrong(self, launch: QueuedDigests) -> bytes | None:
        """Return None if all blocks of a launch that has ended are right, else the digests of all.

        Raises:
            CudaError: The driver fails.
        """
        device = self._device
        assert device is not None
        return device.digests(launch) if device.words[launch.slot] else None

    def give_back(self, launch: QueuedDigests) -> None:
        """Let another run of blocks use what a launch has used, nothing of which runs any more."""
        with self._lock:
            if self._device is not None:
                self._device.free.append(launch.slot)

    def close(self) -> None:
        """Free everything. Idempotent. Nothing that was queued runs any more."""
        with self._lock:
            self._closed = True
            device, self._device = self._device, None
        if device is not None:
            device.close()

    def _made(self) -> _DeviceTable | None:
        if self._device is None and not self._closed:
            kernel = self._kernel()
            if kernel is None:
                return None
            try:
                self._device = _DeviceTable(kernel, self._addresses, self._lengths)
            except CudaMemoryError as error:
                self._closed = True
                log.warning("digests are computed piece by piece: %s", error)
        return self._device


class _DeviceTable:
    """A table's columns on the GPU, and what its launches use."""

    def __init__(
        self,
        kernel: DigestKernel,
        addresses: np.ndarray,
        lengths: np.ndarray,
    ) -> None:
        self._kernel, self._driver = kernel, kernel.device.driver
        device: Device = kernel.device
        count = len(addresses)
        self._launch_blocks = min(LAUNCH_BLOCKS, max(count, 1))
        self._expected = np.zeros((count, DIGEST_BYTES), np.uint8)
        self._pending: list[int] | None = None
        #: Slots that no launch uses.
        self.free = list(range(LAUNCHES))
        with contextlib.ExitStack() as undo:
            own = undo.enter_context
            self._rows = own(DeviceMemory(device, max(count, 1) * _ROW_BYTES))
            chains_nbytes = self._launch_blocks * CHAINS_BYTES
            self._chains = [own(DeviceMemory(device, chains_nbytes)) for _ in self.free]
            words = own(PinnedMemory(device, LAUNCHES * _WORD_BYTES))
            self._stream, self._copied = own(CudaStream(device)), own(CudaEvent(device))
            #: Not 0 once a launch has found a wrong block.
            self.words = words.view().cast("I")
            self._words = words.device_address
            inputs = self._rows.address
            self._places = (
                inputs,
                inputs + 8 * count,
                inputs + 16 * count,
                inputs + (16 + DIGEST_BYTES) * count,
            )
            if count:
                columns = np.concatenate(
                    (addresses, lengths, self._expected.view(np.int64).ravel())
                )
                self._upload(inputs, columns)
            self._ends = undo.pop_all()

    def launch(self, first: int, last: int, slot: int, stream: int) -> None:
        """Queue the digests of a run of blocks, one launch for each `LAUNCH_BLOCKS`."""
        self.words[slot] = 0
        word, chains = self._words + _WORD_BYTES * slot, self._chains[slot].address
        inputs, lengths, expected, found = self._places
        for at in range(first, last, self._launch_blocks):
            digests_at = DIGEST_BYTES * at
            places = (
                inputs + 8 * at,
                lengths + 8 * at,
                expected + digests_at,
                found + digests_at,
                word,
                chains,
            )
            self._kernel.launch(min(self._launch_blocks, last - at), places, stream)

    def upload_pages(self, grid: ChunkGrid, page_of: Callable[[int], bytes | None]) -> None:
        """Upload the digests that are known since the last call."""
        if self._pending is None:
            self._pending = [layer for layer, count in enumerate(grid.layer_blocks) if count]
        if not self._pending:
            return
        left, rows = [], list[int]()
        for layer in self._pending:
            page = page_of(layer)
            if page is None:
                left.append(layer)
                continue
            begin, end = grid.first_of_layer[layer], grid.first_of_layer[layer + 1]
            self._expected[begin:end] = np.frombuffer(page, np.uint8).reshape(-1, DIGEST_BYTES)
            rows += (begin, end)
        self._pending = left
        if rows:  # those between them that are not known yet stay zeros
            begin, end = min(rows), max(rows)
            place = self._places[2] + DIGEST_BYTES * begin
            self._upload(place, self._expected[begin:end])

    def digests(self, launch: QueuedDigests) -> bytes:
        """Return the digests that a launch has computed."""
        found = np.empty((launch.last - launch.first) * DIGEST_BYTES, np.uint8)
        place = self._places[3] + DIGEST_BYTES * launch.first
        with self._kernel.device.current():
            self._driver.copy_dtoh(found.ctypes.data, place, found.nbytes, self._stream.handle)
            self._wait()
        return found.tobytes()

    def _upload(self, place: int, column: np.ndarray) -> None:
        with self._kernel.device.current():
            self._driver.copy_htod(place, column.ctypes.data, column.nbytes, self._stream.handle)
            self._wait()

    def _wait(self) -> None:
        self._driver.event_record(self._copied.handle, self._stream.handle)
        self._driver.event_synchronize(self._copied.handle)

    def close(self) -> None:
        self.words = memoryview(b"").cast("I")
        self._ends.close()


def _blocks(grid: ChunkGrid, view: View) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the device address and the length of each block of a model, in order, as int64, and
    the numbers of those that no kernel may read: those that are not in one place, or not of whole
    units, since beyond the end of live memory there may be none."""
    starts = np.array(
        [layer.arena_offset + at for layer in grid.layers for at, _ in layer.extents], np.int64
    )
    sizes = np.array([nbytes for layer in grid.layers for _, nbytes in layer.extents], np.int64)
    counts = -(-sizes // BLOCK_BYTES)
    # Of each block: how many of its tensor come before it.
    before = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = np.repeat(starts, counts) + BLOCK_BYTES * before
    lengths = np.minimum(np.repeat(sizes, counts) - BLOCK_BYTES * before, BLOCK_BYTES)
    if isinstance(view, DeviceView):
        return view.address + offsets, lengths, np.empty(0, np.int64)
    assert isinstance(view, ScatteredView)
    begins, spans = view.located()
    there = [span for span in spans if isinstance(span, DeviceView)]
    begin = np.array(begins, np.int64)
    shifts = np.array([span.address for span in there], np.int64) - begin
    ends = begin + np.array(list(map(len, there)), np.int64)
    found = np.searchsorted(begin, offsets, "right") - 1
    addresses = offsets + shifts[found]
    outside = (found < 0) | (offsets + lengths > ends[found])
    return addresses, lengths, np.flatnonzero(outside | ((addresses | lengths) % UNIT_BYTES != 0))
