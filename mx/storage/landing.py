"""Digests of a model's blocks, collected while the blocks land in an arena, in any order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

from mx.core.digest import (
    DIGEST_BYTES,
    SHORTCUT_BYTES,
    block_digest,
    shortcut_digest,
    tensor_root,
)
from mx.core.grid import block_count
from mx.core.types import Layout


@dataclass(frozen=True)
class ArenaDigests:
    """The digests that were computed while an arena was filled.

    `roots` has the root of each tensor. `pages` has the digests of each layer's blocks, 32 bytes
    each, in layer order. `shortcuts` has the shortcut digests of the same blocks, 16 bytes each,
    layer after layer; b"" if they were not asked for. `stamps` are those of the files that were
    read; () if one of them has none.
    """

    roots: dict[str, bytes]
    pages: list[bytes]
    shortcuts: bytes
    stamps: tuple[tuple[int, int, int, int, int], ...] = field(default=(), compare=False)


class Landing:
    """Hashes blocks as they land. Thread-safe; hashing runs outside the lock.

    The thread that finishes a tensor computes its root from the digests of its blocks. The thread
    that finishes a layer calls `on_layer` with its index, after all bytes of the layer have landed.
    A layer without bytes is never reported.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        shortcuts: bool = False,
        on_layer: Callable[[int], None] | None = None,
    ) -> None:
        """
        Args:
            layout: The model's layout.
            shortcuts: Whether to compute the shortcut digests too.
            on_layer: Called with each layer that is complete.
        """
        self._layout, self._on_layer = layout, on_layer
        self._sizes = [nbytes for layer in layout.layers for _, nbytes in layer.extents]
        #: first_block[i] is the number of blocks before tensor i; the last entry counts all.
        self._first_block = list(accumulate(map(block_count, self._sizes), initial=0))
        self._digests = bytearray(DIGEST_BYTES * self._first_block[-1])
        self._shortcuts = bytearray(SHORTCUT_BYTES * self._first_block[-1] if shortcuts else 0)
        empty = tensor_root(0, b"")
        self._roots = [b"" if nbytes else empty for nbytes in self._sizes]
        self._lock = threading.Lock()
        self._blocks_left: dict[int, int] = {}  # of tensors of which some blocks have landed
        self._tensors_left = [
            sum(nbytes > 0 for _, nbytes in layer.extents) for layer in layout.layers
        ]

    def landed(self, index: int, block: int, view: memoryview) -> None:
        """Hash a block that has landed. Each block is announced once.

        Args:
            index: The tensor's index in `layout.tensors`.
            block: The block's number in its tensor.
            view: The block's bytes. They are not used once this returns.
        """
        if self._shortcuts:
            at = SHORTCUT_BYTES * (self._first_block[index] + block)
            self._shortcuts[at : at + SHORTCUT_BYTES] = shortcut_digest(view)
        self.hashed(index, block, block_digest(view))

    def hashed(self, index: int, block: int, digest: bytes) -> None:
        """Take the digest of a block that has landed, as `landed` does, without a shortcut.

        Args:
            index: The tensor's index in `layout.tensors`.
            block: The block's number in its tensor.
            digest: The block's blake3 digest.
        """
        first = self._first_block[index]
        at = DIGEST_BYTES * (first + block)
        self._digests[at : at + DIGEST_BYTES] = digest
        count = self._first_block[index + 1] - first
        if count > 1:
            with self._lock:
                left = self._blocks_left.pop(index, count) - 1
                if left:
                    self._blocks_left[index] = left
                    return
            digest = bytes(self._digests[DIGEST_BYTES * first : DIGEST_BYTES * (first + count)])
        self._roots[index] = tensor_root(self._sizes[index], digest)
        layer = self._layout.tensors[index].layer
        with self._lock:
            self._tensors_left[layer] -= 1
            over = not self._tensors_left[layer]
        if over and self._on_layer is not None:
            self._on_layer(layer)

    def inherit(self, index: int, before: ArenaDigests) -> None:
        """Take over the digests of a tensor that has not changed.

        Args:
            index: The tensor's index in `layout.tensors`.
            before: The digests of all tensors, in the same layout.
        """
        tensor = self._layout.tensors[index]
        first, end = self._first_block[index], self._first_block[index + 1]
        of_layer = self._first_block[self._layout.layers[tensor.layer].first_tensor]
        page = before.pages[tensor.layer]
        self._digests[DIGEST_BYTES * first : DIGEST_BYTES * end] = page[
            DIGEST_BYTES * (first - of_layer) : DIGEST_BYTES * (end - of_layer)
        ]
        if self._shortcuts:
            part = slice(SHORTCUT_BYTES * first, SHORTCUT_BYTES * end)
            self._shortcuts[part] = before.shortcuts[part]
        if self._sizes[index]:
            self._roots[index] = before.roots[tensor.name]
            self._tensors_left[tensor.layer] -= 1

    def roots(self) -> dict[str, bytes]:
        """Return the root of each tensor, by name.

        Raises:
            ValueError: Not all blocks have landed.
        """
        if any(self._tensors_left):
            raise ValueError("not all blocks have landed")
        names = (tensor.name for tensor in self._layout.tensors)
        return dict(zip(names, self._roots, strict=True))

    def pages(self) -> list[bytes]:
        """Return the digests of each layer's blocks, concatenated, once all blocks have landed."""
        pages = []
        for layer in self._layout.layers:
            end = layer.first_tensor + len(layer.extents)
            begin, end = self._first_block[layer.first_tensor], self._first_block[end]
            pages.append(bytes(self._digests[DIGEST_BYTES * begin : DIGEST_BYTES * end]))
        return pages

    def shortcuts(self) -> bytes:
        """Return the shortcut digests of all blocks, layer by layer; b"" if not asked for."""
        return bytes(self._shortcuts)
