"""Which bytes of a kernel's parameters are addresses of memory outside the regions. Pure.

A graph is restored at the addresses that it was captured at: one of its regions is a number like
any other. An address of other memory means nothing in another process. It is looked for in all
eight bytes in a row, at every offset: as it is, with a tag in its upper bits, with its halves the
other way round, and shifted right by up to 12 bits. Half an address by itself looks like a number:
`halves` returns words that may be one, and `mx.graphs.merge` refuses the graph where such a word
differs in the two captures, between which all memory outside the regions has moved, or may be one
in both.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator, Sequence

from mx.errors import ConfigError
from mx.graphs.bounds import ADDRESS_BITS
from mx.graphs.package import RegionSpec

_ADDRESS_BYTES = 8
#: No device memory is below, where lengths and counts are.
_LOWEST = 1 << 16
_HIGHEST = 1 << ADDRESS_BITS
_HALF_BITS = 32
_HALF = (1 << _HALF_BITS) - 1
#: Packed addresses are in units of up to a page.
_MOST_SHIFT = 12


class GraphRefusedError(ConfigError):
    """This graph can't travel; the message names the kernel or the node, and why."""


def windows(value: bytes) -> Iterator[tuple[int, int]]:
    """Yield (offset, number) of all eight bytes in a row."""
    for phase in range(min(_ADDRESS_BYTES, len(value) - _ADDRESS_BYTES + 1)):
        count = (len(value) - phase) // _ADDRESS_BYTES
        numbers = struct.unpack_from(f"<{count}Q", value, phase)
        for at, number in enumerate(numbers):
            yield phase + at * _ADDRESS_BYTES, number


def inside(number: int, regions: Sequence[RegionSpec]) -> bool:
    """Return True for an address of a region."""
    return any(region.base <= number < region.base + region.nbytes for region in regions)


def outside_addresses(
    value: bytes,
    regions: Sequence[RegionSpec],
    knows: Callable[[int], bool],
    pages: Collection[int],
) -> list[int]:
    """Return the offsets of addresses in parameters that the driver knows and no region has.

    Args:
        value: The parameters' bytes.
        regions: The regions.
        knows: Whether the driver knows an address.
        pages: The upper halves of addresses outside the regions: forms other than the plain one
            are looked for there.
    """
    lengths = {page.bit_length() + _HALF_BITS for page in pages}
    return [
        offset
        for offset, number in windows(value)
        if number >= _LOWEST
        and not inside(number, regions)
        and any(
            not inside(each, regions) and knows(each) for each in _forms(number, pages, lengths)
        )
    ]


def _forms(number: int, pages: Collection[int], lengths: Collection[int]) -> list[int]:
    """Return the addresses that eight bytes may stand for; `lengths` are those of addresses near
    known memory, in bits."""
    found = [number] if number < _HIGHEST else []
    if number & _HALF in pages:
        found.append(number >> _HALF_BITS | (number & _HALF) << _HALF_BITS)
    if number >= _HIGHEST and (number & (_HIGHEST - 1)) >> _HALF_BITS in pages:
        found.append(number & (_HIGHEST - 1))
    for bits in lengths:
        shift = bits - number.bit_length()
        if 0 < shift <= _MOST_SHIFT and number << shift >> _HALF_BITS in pages:
            found.append(number << shift)
    return found


def halves(
    value: bytes,
    regions: Sequence[RegionSpec],
    knows: Callable[[int], bool],
    pages: Collection[int],
) -> set[int]:
    """Return the aligned words in parameters that may be the lower half of an address that the
    driver knows and no region has: those of addresses of the regions are not.

    Args:
        value: The parameters' bytes.
        regions: The regions.
        knows: Whether the driver knows an address.
        pages: The upper halves of addresses outside the regions.
    """
    words = struct.unpack_from(f"<{len(value) // 4}I", value)
    found = set()
    for word, upper in set(zip(words, (*words[1:], 0), strict=False)):
        if word < _LOWEST or inside(upper << _HALF_BITS | word, regions):
            continue
        addresses = (page << _HALF_BITS | word for page in pages)
        if any(not inside(each, regions) and knows(each) for each in addresses):
            found.add(word)
    return found
