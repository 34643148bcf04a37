"""Digests of tensors and chunks, computed while their bytes land in an arena, in any order."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable

from blake3 import blake3
from xxhash import xxh3_128, xxh3_128_digest

from mx.core.types import BLOCK_BYTES, Layout


class Landing:
    """Hashes pieces of tensors where they land. Thread-safe; hashing runs outside the lock.

    `arena` is the destination, a writable or read-only byte view of at least
    `layout.arena_nbytes`, which is only read from, and only where bytes have landed. The blake3 of
    a tensor needs its bytes in order: the thread that lands the next bytes hashes them, and then
    all that landed behind them meanwhile, so that no thread waits for another. The thread that
    lands the last byte of a 1 MiB block hashes the block. The thread that finishes a layer calls
    `on_layer` with its index; the layer's bytes in `arena` are not read afterwards.
    """

    def __init__(
        self,
        layout: Layout,
        arena: memoryview,
        chunk_nbytes: int,
        on_layer: Callable[[int], None] | None = None,
    ) -> None:
        self._layout, self._arena, self._chunk_nbytes = layout, arena, chunk_nbytes
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        #: The blake3 of each tensor of the layout, b"" until all of it has landed.
        self.tensor_digests: list[bytes] = [
            b"" if tensor.nbytes else blake3().digest() for tensor in layout.tensors
        ]
        self._on_layer = on_layer
        self._tensors_left = [0] * len(layout.layers)
        for tensor in layout.tensors:
            self._tensors_left[tensor.layer] += tensor.nbytes > 0
        self._blocks: list[list[bytes]] = []  # per layer, per block
        self._missing: list[list[int]] = []  # payload bytes that a block still waits for
        for layer in layout.layers:
            count = -(-layer.nbytes // BLOCK_BYTES)
            self._blocks.append([b""] * count)
            missing = [0] * count
            for offset, nbytes in layer.runs:
                for block, _, part in _blocks(offset, nbytes):
                    missing[block] += part
            self._missing.append(missing)

    def landed(self, index: int, offset: int, nbytes: int) -> None:
        """Hash bytes [offset, offset + nbytes) of the layout's tensor `index`, now in place.

        Each byte is announced once; `nbytes` is positive.
        """
        tensor = self._layout.tensors[index]
        missing = self._missing[tensor.layer]
        complete = []
        with self._lock:
            for block, _, part in _blocks(tensor.offset + offset, nbytes):
                missing[block] -= part
                if not missing[block]:
                    complete.append(block)
        for block in complete:
            self._blocks[tensor.layer][block] = self._hash_block(tensor.layer, block)
        self._hash_tensor(index, offset, nbytes)

    def chunk_digests(self) -> bytes:
        """Return the digests of all chunks, in order. Raises ValueError if bytes are missing."""
        blocks_per_chunk = self._chunk_nbytes // BLOCK_BYTES
        digests = []
        for blocks in self._blocks:
            if b"" in blocks:
                raise ValueError("not all bytes have landed")
            for first in range(0, len(blocks), blocks_per_chunk):
                digests.append(xxh3_128_digest(b"".join(blocks[first : first + blocks_per_chunk])))
        return b"".join(digests)

    def _hash_block(self, layer_index: int, block: int) -> bytes:
        layer = self._layout.layers[layer_index]
        start, end = block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES
        state = xxh3_128()
        first = max(0, bisect_right(layer.runs, (start, 1 << 62)) - 1)
        for offset, nbytes in layer.runs[first:]:
            if offset >= end:
                break
            low, high = max(offset, start), min(offset + nbytes, end)
            if low < high:
                base = layer.arena_offset
                with self._arena[base + low : base + high] as view:
                    state.update(view)
        return state.digest()

    def _hash_tensor(self, index: int, offset: int, nbytes: int) -> None:
        tensor = self._layout.tensors[index]
        base = self._layout.layers[tensor.layer].arena_offset + tensor.offset
        if nbytes == tensor.nbytes:
            with self._arena[base : base + nbytes] as view:
                self.tensor_digests[index] = blake3(view).digest()
            self._tensor_done(tensor.layer)
            return
        with self._lock:
            pending = self._pending.setdefault(index, _Pending())
            pending.landed[offset] = nbytes
            if pending.busy:
                return
            pending.busy = True
        while True:
            with self._lock:
                part = pending.landed.pop(pending.hashed, None)
                if part is None:
                    pending.busy = False
                    return
            start = base + pending.hashed
            with self._arena[start : start + part] as view:
                pending.state.update(view)
            pending.hashed += part
            if pending.hashed == tensor.nbytes:
                self.tensor_digests[index] = pending.state.digest()
                with self._lock:
                    del self._pending[index]
                self._tensor_done(tensor.layer)
                return

    def _tensor_done(self, layer: int) -> None:
        # A thread hashes complete blocks before it hashes their tensors, so that all blocks are
        # done when the last tensor is.
        with self._lock:
            self._tensors_left[layer] -= 1
            over = not self._tensors_left[layer]
        if over and self._on_layer is not None:
            self._on_layer(layer)


class _Pending:
    """A tensor that lands in several pieces: the bytes hashed, and the pieces behind them."""

    __slots__ = ("busy", "hashed", "landed", "state")

    def __init__(self) -> None:
        self.landed: dict[int, int] = {}
        self.hashed = 0
        self.busy = False
        self.state = blake3()


def _blocks(offset: int, nbytes: int) -> list[tuple[int, int, int]]:
    """Return the blocks that a range of layer space touches, as (block, offset, bytes)."""
    found = []
    end = offset + nbytes
    while offset < end:
        block = offset // BLOCK_BYTES
        part = min(end, (block + 1) * BLOCK_BYTES) - offset
        found.append((block, offset, part))
        offset += part
    return found
