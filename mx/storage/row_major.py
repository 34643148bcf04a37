"""Copies tensors whose dimensions are stored in another order to row-major order, and back.

Elements are integers of their size, so that bits stay as they are.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from math import prod
from typing import Any

from mx.core.types import DTYPE_BITS, Tensor
from mx.units import MIB

#: The memory that a copy takes besides the tensor.
PIECE_BYTES = 4 * MIB


def row_major(
    tensor: Tensor, stored: memoryview, *, back: bool = False, piece_nbytes: int = PIECE_BYTES
) -> Generator[tuple[int, memoryview], None, None]:
    """Yield a tensor's bytes in row-major order, piece by piece.

    Args:
        tensor: The tensor.
        stored: Its bytes in storage order. Close the generator before releasing them.
        back: True copies the other way, into `stored`: the caller fills each piece before it asks
            for the next one.
        piece_nbytes: The most bytes of a piece, a multiple of the size of elements.

    Yields:
        (offset in row-major order, bytes), ascending. The bytes are valid until the next piece is
        asked for. A tensor that is stored in row-major order is one piece, `stored` itself.
    """
    if not tensor.stride:
        yield 0, stored
        return
    import numpy as np  # few tensors need it

    size = DTYPE_BITS[tensor.dtype] // 8
    steps = [size * step for step in tensor.stride]
    whole = np.ndarray(tensor.shape, f"u{size}", stored, strides=steps)
    buffer = np.empty(min(piece_nbytes, tensor.nbytes) // size, whole.dtype)
    begin = 0
    for part in _parts(whole, buffer.size):
        filled = buffer[: part.size]
        piece, rows = filled.data.cast("B"), filled.reshape(part.shape)
        if back:
            yield begin, piece
            part[...] = rows
        else:
            rows[...] = part
            yield begin, piece
        begin += part.nbytes


def _parts(whole: Any, most: int) -> Iterator[Any]:
    """Yield the parts of an array, in row-major order, of at most so many elements."""
    inner = prod(whole.shape[1:])
    if inner > most:
        for row in whole:
            yield from _parts(row, most)
        return
    rows = most // inner
    for row in range(0, len(whole), rows):
        yield whole[row : row + rows]
