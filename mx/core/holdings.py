"""Which chunks of a model are verified. This set is the only record of that. Pure.

Everything that depends on it (what is announced to peers, what is listed with the coordinator, what
is served to readers, when a layer is ready) reads this set or subscribes to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from mx.core.grid import ChunkGrid


class HoldingsListener(Protocol):
    """Called on the thread that changes the set; must not block, nor call back."""

    def chunk_verified(self, chunk: int) -> None:
        """The chunk is verified."""

    def chunk_corrupt(self, chunk: int, source: str) -> None:
        """`source` sent the chunk, or a part of it, with wrong bytes."""


def members(chunks: int) -> Iterator[int]:
    """Yield the chunks in a bit set, the lowest first."""
    while chunks:
        low = chunks & -chunks
        yield low.bit_length() - 1
        chunks ^= low


def ranges_of(layers: Iterable[int]) -> list[tuple[int, int]]:
    """Return ascending layers as half-open ranges."""
    found: list[tuple[int, int]] = []
    for layer in layers:
        if found and found[-1][1] == layer:
            found[-1] = (found[-1][0], layer + 1)
        else:
            found.append((layer, layer + 1))
    return found


class Holdings:
    """The verified chunks of one model in one process, as a bit set (bit c: chunk c).

    `bits` may be read from any thread. Changes and `subscribe` need the lock of the set's owner, so
    that each chunk that is not in a listener's snapshot is reported to it exactly once.
    """

    def __init__(self, grid: ChunkGrid, wanted: int | None = None) -> None:
        """
        Args:
            grid: The chunks.
            wanted: The chunks of which a pull wants something, as a bit set: the set is whole with
                those, each of which counts once its wanted blocks are verified. None: all.
        """
        self._grid = grid
        self._all = (1 << len(grid)) - 1 if wanted is None else wanted
        self._layers = [
            self._all & (((1 << len(chunks)) - 1) << chunks.start)
            for chunks in map(grid.of_layer, range(len(grid.layers)))
        ]
        self._listeners: list[HoldingsListener] = []
        self.bits = 0

    @property
    def whole(self) -> bool:
        return self.bits == self._all

    def has(self, chunk: int) -> bool:
        return bool(self.bits >> chunk & 1)

    def has_layer(self, layer: int) -> bool:
        """Return True if every (wanted) chunk of the layer is verified, or it has none."""
        return not self._layers[layer] & ~self.bits

    def layers(self) -> tuple[tuple[int, int], ...]:
        """Return the layers whose chunks are all verified, as half-open ranges."""
        return tuple(ranges_of(filter(self.has_layer, range(len(self._layers)))))

    def subscribe(self, listener: HoldingsListener) -> int:
        """Report every later change to `listener`.

        Returns:
            The chunks that are verified now, as a bit set.
        """
        self._listeners.append(listener)
        return self.bits

    def add(self, chunk: int) -> bool:
        """Add a chunk that was verified. Returns True if its layer is complete with it."""
        self.bits |= 1 << chunk
        for listener in self._listeners:
            listener.chunk_verified(chunk)
        return not self._layers[self._grid.layer_of[chunk]] & ~self.bits

    def corrupt(self, chunk: int, source: str) -> None:
        """Report that this source sent the chunk, or a part of it, with wrong bytes."""
        for listener in self._listeners:
            listener.chunk_corrupt(chunk, source)
