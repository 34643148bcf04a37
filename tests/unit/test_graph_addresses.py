"""Which bytes of parameters are addresses of memory outside the regions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.graphs.addresses import halves, inside, outside_addresses, windows
from mx.graphs.package import RegionSpec
from mx.graphs.region import BASE
from mx.units import MIB

SPECS = [RegionSpec(BASE, 64 * MIB), RegionSpec(BASE + (1 << 40), MIB)]
#: An address that the driver knows, and the upper halves that a process knows of such.
FOREIGN = 0x7F12_3456_7000
PAGES = {FOREIGN >> 32}


def word(number: int) -> bytes:
    return (number % (1 << 64)).to_bytes(8, "little")


def knows(address: int) -> bool:
    return address == FOREIGN or inside(address, SPECS)


@given(st.binary(max_size=64))
def test_windows_are_all_eight_bytes_in_a_row(value: bytes) -> None:
    numbers = [int.from_bytes(value[at : at + 8], "little") for at in range(len(value) - 7)]
    assert sorted(windows(value)) == list(enumerate(numbers))


@pytest.mark.parametrize(
    "form",
    [
        word(FOREIGN),
        word(FOREIGN | 0x7F << 57),  # a tag
        word(FOREIGN)[4:] + word(FOREIGN)[:4],  # its halves the other way round
        word(FOREIGN >> 4),
        word(FOREIGN >> 12),
    ],
    ids=["plain", "tagged", "swapped", "in units of 16 bytes", "in pages"],
)
def test_an_address_is_found_in_every_form_at_every_offset(form: bytes) -> None:
    for offset in range(17):
        value = bytes(offset) + form + bytes(17 - offset)
        assert offset in outside_addresses(value, SPECS, knows, PAGES)
    assert outside_addresses(form[:7], SPECS, knows, PAGES) == []


def test_what_is_no_known_address_outside_the_regions_is_a_number() -> None:
    asked: list[int] = []

    def asks(address: int) -> bool:
        asked.append(address)
        return False

    inner = BASE + 4096
    for number in (inner, 12, 0xFFFF, FOREIGN + 1, inner + (1 << 40), FOREIGN >> 13, 1 << 63):
        assert outside_addresses(word(number), SPECS, knows, PAGES) == []
        outside_addresses(word(number), SPECS, asks, PAGES)
    assert inner not in asked and 12 not in asked and FOREIGN + 1 in asked


def test_addresses_of_other_forms_are_looked_for_near_known_memory_alone() -> None:
    """Else the driver would be asked for each shift of each number."""
    asked: list[int] = []

    def asks(address: int) -> bool:
        asked.append(address)
        return False

    number = 0x0123_4567_89AB
    outside_addresses(word(number), SPECS, asks, PAGES)
    assert asked == [number]


def test_words_that_may_be_half_an_address() -> None:
    low = FOREIGN & 0xFFFF_FFFF
    value = low.to_bytes(4, "little") + bytes(3) + low.to_bytes(4, "little") + bytes(1)
    assert halves(value, SPECS, knows, PAGES) == {low}  # the second one is not aligned
    assert halves(value[4:], SPECS, knows, PAGES) == set()
    assert halves(value, SPECS, knows, {0x6123}) == set()
    # Half an address of a region is a number, as is one below all memory.
    inner = BASE + (1 << 20)
    assert halves(word(inner), SPECS, lambda _: True, PAGES) == set()
    assert halves(word(inner)[:4] + bytes(4), SPECS, lambda _: True, {BASE >> 32}) == set()
    assert halves(word(inner)[:4] + bytes(4), SPECS, lambda _: True, PAGES) == {1 << 20}
    assert halves(word(0xFFFF), SPECS, lambda _: True, PAGES) == set()
