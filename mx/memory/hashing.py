"""Hashes blocks of memory that mx did not allocate, on the device that they are on.

A GPU hashes its own blocks, if mx's kernels load, and if they begin and end at multiples of 16
bytes. Others are copied through a ring of pinned memory, and hashed there: no more of them than the
ring has is in host memory at a time.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Sequence
from itertools import compress

from mx.core.digest import BlockHasher
from mx.cuda.blake3 import UNIT_BYTES
from mx.cuda.device import Device
from mx.cuda.digest import RingDigester, digester
from mx.cuda.driver import load
from mx.cuda.ring import PinnedRing
from mx.errors import ClosedError
from mx.transport import DeviceView, Span, host_view


class SpanHashing:
    """Hashes blocks on the host or on a GPU. Thread-safe.

    What a GPU needs for that is made at its first block, and kept until `close`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gpus: dict[str, _GpuDigests] = {}
        self._closed = False

    def hasher(self, blocks: Sequence[Span]) -> BlockHasher | _ReadHasher:
        """Return a hasher for blocks that land in these views, all of the host or of one GPU.

        Does not block, unlike the hasher's own methods.
        """
        there = [block for block in blocks if isinstance(block, DeviceView)]
        if there:
            return _ReadHasher(self, there)
        return BlockHasher([host_view(block) for block in blocks])

    def digests(self, blocks: Sequence[DeviceView]) -> list[bytes]:
        """Return the blake3 digest of each of some blocks of one GPU. Blocks.

        Raises:
            ClosedError: This was closed.
            CudaError: The GPU has no memory left for it, or fails.
        """
        device = blocks[0].device
        with self._lock:
            if self._closed:
                raise ClosedError("the memory was given back")
            gpu = self._gpus.get(device)
            if gpu is None:
                gpu = self._gpus[device] = _GpuDigests(device)
        return gpu.digests(blocks)

    def close(self) -> None:
        """Free what GPUs needed, once no block is being hashed. Idempotent."""
        with self._lock:
            self._closed = True
            gpus = list(self._gpus.values())
            self._gpus.clear()
        for gpu in gpus:
            gpu.close()


class _GpuDigests:
    """What hashing needs of one GPU."""

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()
        self._ring: PinnedRing | None = None
        with contextlib.ExitStack() as undo:
            self._device = undo.enter_context(Device.open(load(), name))
            self._digester = undo.enter_context(
                contextlib.closing(digester(self._device, self._through))
            )
            self._ends = undo.pop_all()

    def digests(self, blocks: Sequence[DeviceView]) -> list[bytes]:
        """Return the blake3 digest of each block."""
        # Kernels read whole units: beyond a tensor's end there may be no memory.
        whole = [not (block.address | len(block)) % UNIT_BYTES for block in blocks]
        places = [(block.address, len(block)) for block in blocks]
        there = iter(self._digester.digests(list(compress(places, whole))))
        odd = list(compress(places, map(operator.not_, whole)))
        here = iter(RingDigester(self._through()).digests(odd) if odd else ())
        return [next(there if each else here) for each in whole]

    def _through(self) -> PinnedRing:
        with self._lock:
            if self._ring is None:
                self._ring = PinnedRing(self._device)
            return self._ring

    def close(self) -> None:
        self._ends.close()
        if self._ring is not None:
            self._ring.close()


class _ReadHasher:
    """The blocks of one read; see `mx.memory.arena.Hasher`."""

    __slots__ = ("_blocks", "_hashing")

    def __init__(self, hashing: SpanHashing, blocks: Sequence[DeviceView]) -> None:
        self._hashing, self._blocks = hashing, blocks

    def landed(self, payload_nbytes: int) -> None:
        """Do nothing: the blocks of a read are one batch."""

    def block_digests(self) -> bytes:
        """Return the digests of all blocks, concatenated. Raises as `SpanHashing.digests`."""
        return b"".join(self._hashing.digests(self._blocks))
