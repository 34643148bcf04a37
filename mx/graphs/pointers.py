"""Which bytes of a graph's parameters are addresses: two captures of it, at different addresses.

Pure. Each parameter is looked at as bytes, at every offset, so that structures and tensor maps are
no special cases:

- eight bytes that are an address of a region in both captures, at the same offset of it, moved with
  the region: a pointer;
- bytes that are the same in both and are not address of a region, nor one that the driver knows:
  scalars;
- all else refuses the graph: an address of other memory, one that was split or packed, a counter,
  a handle.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mx.errors import ConfigError
from mx.graphs.bounds import ADDRESS_BITS, POINTER_BYTES
from mx.graphs.package import RegionSpec

#: No device memory is below, where lengths and counts are.
_LOWEST = 1 << 16
_HIGHEST = 1 << ADDRESS_BITS
_HALF = (1 << 32) - 1


class GraphRefusedError(ConfigError):
    """This graph can't travel; the message names the kernel or the node, and why."""


@dataclass(frozen=True, slots=True)
class Move:
    """A region of `nbytes` that is at `first` in one capture, and at `second` in the other."""

    first: int
    second: int
    nbytes: int


def moves(first: Sequence[RegionSpec], second: Sequence[RegionSpec]) -> list[Move]:
    """Return how the regions of one capture moved to those of another.

    Raises:
        GraphRefusedError: The regions are not the same but for their bases, or a pair of bases does
            not differ in both 32-bit halves: half an address would look like a number.
    """
    if [region.nbytes for region in first] != [region.nbytes for region in second]:
        raise GraphRefusedError("the two captures have other regions")
    found = []
    for one, other in zip(first, second, strict=True):
        differ = one.base ^ other.base
        if not (differ & _HALF and differ >> 32):
            raise GraphRefusedError(
                f"both captures have a region at {one.base:#x} and {other.base:#x}, which differ "
                "in one half only",
                hint="make one of the captures in a region with `shifted=True`",
            )
        found.append(Move(one.base, other.base, one.nbytes))
    return found


def windows(value: bytes) -> Iterator[tuple[int, int]]:
    """Yield (offset, number) of all eight bytes in a row that may be an address."""
    for phase in range(min(POINTER_BYTES, len(value) - POINTER_BYTES + 1)):
        count = (len(value) - phase) // POINTER_BYTES
        numbers = struct.unpack_from(f"<{count}Q", value, phase)
        for at, number in enumerate(numbers):
            if _LOWEST <= number < _HIGHEST:
                yield phase + at * POINTER_BYTES, number


def known_addresses(
    value: bytes, regions: Sequence[RegionSpec], knows: Callable[[int], bool]
) -> list[int]:
    """Return the offsets of addresses in a parameter that the driver knows and no region has.

    Args:
        value: The parameter's bytes.
        regions: The regions.
        knows: Whether the driver knows an address.
    """
    return [
        offset
        for offset, number in windows(value)
        if not any(r.base <= number < r.base + r.nbytes for r in regions) and knows(number)
    ]


def pointers(first: bytes, second: bytes, moved: Sequence[Move]) -> tuple[int, ...]:
    """Return where the addresses in one parameter are, whose bytes have no address that the driver
    knows outside the regions (`known_addresses`).

    Args:
        first: Its bytes in one capture.
        second: And in the other.
        moved: The regions.

    Returns:
        The offsets, ascending.

    Raises:
        ValueError: The parameter is refused; the message says what is wrong with its bytes.
    """
    if len(first) != len(second):
        raise ValueError("has another length in the other capture")
    found = []
    others = dict(windows(second))
    for offset, number in sorted(windows(first)):
        other = others.pop(offset, 0)
        inside = _inside(number, other, moved)
        if inside:
            found.append(offset)
        elif inside is None:
            raise ValueError(f"has an address at byte {offset} that did not move with its region")
    for offset, other in others.items():
        if _inside(0, other, moved) is None:
            raise ValueError(f"has an address at byte {offset} in one capture only")
    for one, next_one in pairwise(found):
        if next_one - one < POINTER_BYTES:
            raise ValueError(f"has addresses at bytes {one} and {next_one}, which overlap")
    _require_explained(first, second, found)
    return tuple(found)


def _inside(number: int, other: int, moved: Sequence[Move]) -> bool | None:
    """Return True for the same place of a region, None if one is an address of a region and the
    other is not that place, False if neither is in a region."""
    here = _place(number, [(move.first, move.nbytes) for move in moved])
    there = _place(other, [(move.second, move.nbytes) for move in moved])
    if here is None and there is None:
        return False
    return True if here == there else None


def _place(number: int, regions: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    for index, (base, nbytes) in enumerate(regions):
        if base <= number < base + nbytes:
            return index, number - base
    return None


def _require_explained(first: bytes, second: bytes, found: Sequence[int]) -> None:
    if first == second:
        return
    for at, (one, other) in enumerate(zip(first, second, strict=True)):
        if one != other:
            index = bisect_right(found, at) - 1
            if index < 0 or at >= found[index] + POINTER_BYTES:
                raise ValueError(f"differs at byte {at}, and not by an address of a region")
