"""Copies tensors whose dimensions are stored in another order to row-major order, and back.

Plain Python, since numpy and torch are extras: it copies vectors of elements along one dimension,
with stepped slices. Elements are bytes or integers of their size, so that bits stay as they are.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from math import prod
from typing import Any, Literal

from mx.core.layout import contiguous_strides
from mx.core.types import DTYPE_BITS, Tensor
from mx.units import MIB

#: The memory that a copy takes besides the tensor.
PIECE_BYTES = 4 * MIB

#: The formats of `memoryview.cast`, by the size of elements in bytes.
_FORMATS: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}
#: A vector of so many elements is long enough for locality to matter more.
_LONG = 256

#: A dimension: its number of elements, and the steps between them in the target and the source.
_Loop = tuple[int, int, int]


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
    size = DTYPE_BITS[tensor.dtype] // 8
    shape, stride = _merged(tensor.shape, tensor.stride)
    buffer = bytearray(min(piece_nbytes, tensor.nbytes))
    with (
        memoryview(buffer) as piece,
        piece.cast(_FORMATS[size]) as elements,
        stored.cast("B") as stored_bytes,
        stored_bytes.cast(_FORMATS[size]) as there,
    ):
        # Stepped slices of a bytearray are several times as fast as those of a memoryview.
        here = buffer if size == 1 else elements
        for begin, origin, counts in _blocks(shape, stride, len(elements)):
            loops = _loops(counts, contiguous_strides(counts), stride[-len(counts) :])
            with piece[: size * prod(counts)] as filled:
                if back:
                    yield size * begin, filled
                    _copy(there, origin, here, 0, [(n, to, of) for n, of, to in loops])
                else:
                    _copy(here, 0, there, origin, loops)
                    yield size * begin, filled


def _merged(shape: Sequence[int], stride: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides of the same elements with as few dimensions as possible."""
    merged: list[tuple[int, int]] = []
    for count, step in zip(shape, stride, strict=True):
        if merged and merged[-1][1] == count * step:
            merged[-1] = (merged[-1][0] * count, step)
        elif count > 1:
            merged.append((count, step))
    return tuple(count for count, _ in merged), tuple(step for _, step in merged)


def _blocks(
    shape: tuple[int, ...], stride: tuple[int, ...], most: int
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield blocks of at most so many elements that are gap-free in row-major order.

    Yields:
        (first element in row-major order, first element in storage order, shape), where the shape
        is one of the last dimensions.
    """
    inner = prod(shape[1:])
    if inner <= most:
        rows = most // inner
        for row in range(0, shape[0], rows):
            yield row * inner, row * stride[0], (min(rows, shape[0] - row), *shape[1:])
        return
    for row in range(shape[0]):
        for begin, origin, counts in _blocks(shape[1:], stride[1:], most):
            yield row * inner + begin, row * stride[0] + origin, counts


def _loops(counts: Sequence[int], here: Sequence[int], there: Sequence[int]) -> list[_Loop]:
    """Return the dimensions of a block, at least two, in the order in which to copy them.

    The last one is copied as a vector: a long one, if possible along the memory of the tensor. The
    others go through that memory in order.
    """
    loops = sorted(zip(counts, here, there, strict=True), key=lambda loop: -loop[2])
    vector = max(loops, key=lambda loop: (min(loop[0], _LONG), loop[2] == 1, loop[0]))
    loops.remove(vector)
    return [*(loops or [(1, 0, 0)]), vector]


def _copy(target: Any, to: int, source: Any, of: int, loops: Sequence[_Loop]) -> None:
    """Copy elements from position `of` of `source` to position `to` of `target`."""
    count, to_step, of_step = loops[0]
    if len(loops) > 2:
        for _ in range(count):
            _copy(target, to, source, of, loops[1:])
            to, of = to + to_step, of + of_step
        return
    length, to_gap, of_gap = loops[1]
    to_span, of_span = (length - 1) * to_gap + 1, (length - 1) * of_gap + 1
    for _ in range(count):
        target[to : to + to_span : to_gap] = source[of : of + of_span : of_gap]
        to, of = to + to_step, of + of_step
