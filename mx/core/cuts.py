"""Which bytes of a tensor a slice of it takes: runs at equal distances. Pure arithmetic.

In row-major order a slice along a dimension is one run of bytes for each index of the dimensions
before it. Along the first dimension that is a single run, and most blocks of the tensor lie within
it whole. Along others every block may hold parts of several runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from mx.core.grid import BLOCK_BYTES, block_count
from mx.core.types import DTYPE_BITS, Tensor
from mx.core.wanted import BlockRange


class Runs(NamedTuple):
    """`number` runs of `nbytes` bytes each, `stride` apart from `offset` on in a piece of a tensor.

    They belong at `target` in the slice, one after the other.
    """

    offset: int
    nbytes: int
    stride: int
    number: int
    target: int


@dataclass(frozen=True, slots=True)
class Cut:
    """The bytes that are taken of a tensor of `nbytes`: `count` runs of `run` bytes each, `stride`
    apart from `first` on."""

    nbytes: int
    first: int
    run: int
    stride: int
    count: int

    @property
    def taken_nbytes(self) -> int:
        return self.run * self.count

    def runs(self, begin: int, end: int) -> list[Runs]:
        """Return what is taken of bytes [begin, end) of the tensor, ascending: at most three
        entries, of which the first and the last may be a part of a run."""
        found: list[Runs] = []
        if not self.run:
            return found
        low = max(0, (begin - self.first - self.run) // self.stride + 1)  # ends behind `begin`
        high = min(self.count, -((self.first - end) // self.stride))  # begins before `end`
        if low < high:
            at = self.first + low * self.stride
            if at < begin or at + self.run > end:
                start, stop = max(at, begin), min(at + self.run, end)
                target = low * self.run + start - at
                found.append(Runs(start - begin, stop - start, self.stride, 1, target))
                low += 1
        last: list[Runs] = []
        if low < high:
            at = self.first + (high - 1) * self.stride
            if at + self.run > end:
                high -= 1
                last.append(Runs(at - begin, end - at, self.stride, 1, high * self.run))
        if low < high:
            at = self.first + low * self.stride
            found.append(Runs(at - begin, self.run, self.stride, high - low, low * self.run))
        return found + last

    def block_ranges(self) -> list[BlockRange]:
        """Return the blocks of the tensor of which something is taken, ascending.

        Those that lie within one run go to their place as they are; others are read aside. Ranges
        that touch differ in that.
        """
        count = block_count(self.nbytes)
        if self.taken_nbytes == self.nbytes:
            return [BlockRange(0, count, False)] if count else []
        if count == 1:
            return [BlockRange(0, 1, True)] if self.taken_nbytes else []
        found: list[BlockRange] = []
        for number, aside in self._blocks():
            if found and found[-1].end == number and found[-1].aside == aside:
                found[-1] = found[-1]._replace(end=number + 1)
            else:
                found.append(BlockRange(number, number + 1, aside))
        return found

    def _blocks(self) -> list[tuple[int, bool]]:
        found = []
        first = self.first // BLOCK_BYTES
        last = -(-(self.first + (self.count - 1) * self.stride + self.run) // BLOCK_BYTES)
        for number in range(first, last if self.taken_nbytes else first):
            begin = number * BLOCK_BYTES
            end = min(begin + BLOCK_BYTES, self.nbytes)
            at = max(0, (begin - self.first - self.run) // self.stride + 1)
            start = self.first + at * self.stride
            if at < self.count and start < end:
                found.append((number, not (start <= begin and end <= start + self.run)))
        return found

    def moved_nbytes(self) -> int:
        """Return the bytes of all blocks of which something is taken."""
        return sum(
            min(each.end * BLOCK_BYTES, self.nbytes) - each.begin * BLOCK_BYTES
            for each in self.block_ranges()
        )


def cut_of(tensor: Tensor, part: tuple[int, int, int] | None) -> Cut:
    """Return the bytes of a slice.

    Args:
        tensor: The tensor; row-major, of whole bytes, unless all of it is taken.
        part: The dimension, and the elements from one (included) to another (excluded) along it;
            None: all of the tensor.
    """
    if part is None:
        return Cut(tensor.nbytes, 0, tensor.nbytes, max(1, tensor.nbytes), 1)
    dim, begin, end = part
    inner_nbytes = prod(tensor.shape[dim + 1 :]) * DTYPE_BITS[tensor.dtype] // 8
    return Cut(
        tensor.nbytes,
        begin * inner_nbytes,
        (end - begin) * inner_nbytes,
        max(1, tensor.shape[dim] * inner_nbytes),
        prod(tensor.shape[:dim]),
    )
