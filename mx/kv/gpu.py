"""Hashes parts of KV blocks in a GPU's memory, on the GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from mx.core.grid import BLOCK_BYTES
from mx.cuda.blake3 import UNIT_BYTES
from mx.cuda.device import CudaEvent, CudaStream, Device, DeviceMemory
from mx.cuda.digest import Block, Digester, digester
from mx.cuda.driver import load
from mx.cuda.ring import PinnedRing
from mx.units import align_up
from mx.views import DeviceView

#: What parts of several runs are copied to, to be hashed as one.
_SCRATCH_BYTES = 32 << 20
#: The largest part that is hashed.
MOST_PART_BYTES = BLOCK_BYTES


class KvGpu:
    """The GPU that holds KV blocks. Thread-safe; what it needs of the GPU it makes at the first
    call of `digests`, and owns until `close`."""

    def __init__(self, key: str) -> None:
        """
        Args:
            key: The GPU, as views of its memory have it.

        Raises:
            CudaError: The driver fails.
        """
        self._ends = ExitStack()
        self.device = self._ends.enter_context(Device.open(load(), key))
        self._lock = threading.Lock()
        self._digester: Digester | None = None
        self._scratch: DeviceMemory
        self._stream: CudaStream
        self._copied: CudaEvent

    def digests(self, parts: Sequence[Sequence[DeviceView]]) -> list[bytes]:
        """Return the blake3 digest of each part, which has up to 1 MiB.

        Args:
            parts: Their runs of bytes, which are in place, and do not change meanwhile.

        Raises:
            CudaError: The driver fails.
        """
        with self._lock:
            made = self._made()
            found: list[bytes] = []
            for batch in _batches(parts):
                found += made.digests(self._joined(batch))
            return found

    def _made(self) -> Digester:
        if self._digester is None:
            with ExitStack() as undo:
                self._scratch = undo.enter_context(DeviceMemory(self.device, _SCRATCH_BYTES))
                self._stream = undo.enter_context(CudaStream(self.device))
                self._copied = undo.enter_context(CudaEvent(self.device))
                made = digester(self.device, lambda: self._ring(undo))
                undo.callback(made.close)
                self._ends.push(undo.pop_all())
            self._digester = made
        return self._digester

    def _ring(self, ends: ExitStack) -> PinnedRing:
        ring = PinnedRing(self.device)
        ends.callback(ring.close)
        return ring

    def _joined(self, parts: Sequence[Sequence[DeviceView]]) -> list[Block]:
        """Return where each part is in one piece, as the kernel reads it."""
        found: list[Block] = []
        driver, end = self.device.driver, 0
        with self.device.current():
            for runs in parts:
                nbytes = sum(map(len, runs))
                if len(runs) == 1 and not (runs[0].address | nbytes) % UNIT_BYTES:
                    found.append((runs[0].address, nbytes))
                    continue
                found.append((self._scratch.address + end, nbytes))
                at = found[-1][0]
                for run in runs:
                    driver.copy_dtod(at, run.address, len(run), self._stream.handle)
                    at += len(run)
                end = align_up(end + nbytes, UNIT_BYTES)
            if end:
                driver.event_record(self._copied.handle, self._stream.handle)
                driver.event_synchronize(self._copied.handle)
        return found

    def close(self) -> None:
        """Free what this has of the GPU. Idempotent."""
        with self._lock:
            self._ends.close()
            self._digester = None


def _batches(
    parts: Sequence[Sequence[DeviceView]],
) -> Iterator[Sequence[Sequence[DeviceView]]]:
    """Yield parts that there is room for together."""
    begin = nbytes = 0
    for at, runs in enumerate(parts):
        size = align_up(sum(map(len, runs)), UNIT_BYTES)
        if nbytes + size > _SCRATCH_BYTES:
            yield parts[begin:at]
            begin, nbytes = at, 0
        nbytes += size
    if begin < len(parts):
        yield parts[begin:]
