"""Which bytes of parameters are addresses, by two captures."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.graphs.package import RegionSpec
from mx.graphs.pointers import (
    GraphRefusedError,
    Move,
    known_addresses,
    moves,
    pointers,
    windows,
)
from mx.graphs.region import BASE, SHIFTED_BASE
from mx.units import MIB

MOVED = [Move(BASE, SHIFTED_BASE, 64 * MIB), Move(BASE + (1 << 40), SHIFTED_BASE + (1 << 40), MIB)]
SPECS = [RegionSpec(move.first, move.nbytes) for move in MOVED]


def word(number: int) -> bytes:
    return (number % (1 << 64)).to_bytes(8, "little")


@st.composite
def structures(draw: Any) -> tuple[bytes, bytes, tuple[int, ...]]:
    """Draw a parameter of addresses and scalars in two captures, and where the addresses are."""
    first, second, places = b"", b"", []
    for _ in range(draw(st.integers(0, 6))):
        if draw(st.booleans()):
            move = draw(st.sampled_from(MOVED))
            offset = draw(st.integers(0, move.nbytes - 1))
            places.append(len(first))
            first, second = first + word(move.first + offset), second + word(move.second + offset)
        else:
            small = st.integers(0, 1 << 20).map(word) | st.binary(max_size=5)
            scalar = draw(small)
            first, second = first + scalar, second + scalar
    return first, second, tuple(places)


@given(structures())
def test_addresses_are_found_wherever_they_are(drawn: tuple[bytes, bytes, tuple[int, ...]]) -> None:
    first, second, places = drawn
    assert pointers(first, second, MOVED) == places
    assert pointers(second, first, [Move(m.second, m.first, m.nbytes) for m in MOVED]) == places


@given(structures(), st.data())
def test_any_other_change_is_refused(
    drawn: tuple[bytes, bytes, tuple[int, ...]], data: st.DataObject
) -> None:
    first, second, _ = drawn
    if not first:
        return
    at = data.draw(st.integers(0, len(second) - 1))
    changed = bytearray(second)
    changed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ValueError, match="differs|not move|one capture|overlap"):
        pointers(first, bytes(changed), MOVED)


@given(st.binary(max_size=64))
def test_windows_are_all_eight_bytes_in_a_row(value: bytes) -> None:
    numbers = [int.from_bytes(value[at : at + 8], "little") for at in range(len(value) - 7)]
    likely = [(at, n) for at, n in enumerate(numbers) if 1 << 16 <= n < 1 << 57]
    assert sorted(windows(value)) == likely


INSIDE, MOVED_INSIDE = word(BASE + 4096), word(SHIFTED_BASE + 4096)


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (INSIDE, INSIDE, "did not move"),
        (INSIDE, word(SHIFTED_BASE + 4104), "did not move"),
        (INSIDE, word(1), "did not move"),
        (word(1), MOVED_INSIDE, "one capture only"),
        (INSIDE, word((1 << 40) + SHIFTED_BASE + 4096), "did not move"),
        (word(0x7F00_0000_0000), word(0x7E00_0000_0000), "differs at byte 5"),
        (word(BASE + 64 * MIB), word(SHIFTED_BASE + 64 * MIB), "differs"),  # just beyond its end
        (INSIDE[:4], MOVED_INSIDE[:4], "differs"),  # half an address
        (INSIDE[4:] + INSIDE[:4], MOVED_INSIDE[4:] + MOVED_INSIDE[:4], "differs"),
        (word((BASE + 4096) >> 4), word((SHIFTED_BASE + 4096) >> 4), "differs"),  # packed
        (word(BASE + 4096 | 1 << 60), word(SHIFTED_BASE + 4096 | 1 << 60), "differs"),  # tagged
        (INSIDE, MOVED_INSIDE + b"\0", "another length"),
    ],
)
def test_what_is_no_address_of_a_region_is_refused(first: bytes, second: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        pointers(first, second, MOVED)


def test_addresses_that_overlap_are_refused() -> None:
    # All regions that bytes of one another can be taken for: addresses of sixteen equal bytes.
    moved = [Move(0x0101_0101_0101, 0x0202_0202_0202, 1 << 30)]
    first = bytes([1] * 6 + [0, 0])
    assert pointers(first, bytes([2] * 6 + [0, 0]), moved) == (0,)
    wide = [Move(0x01_0101_0101_0101, 0x02_0202_0202_0202, 1 << 30)]
    with pytest.raises(ValueError, match="overlap"):
        pointers(
            bytes([1] * 7 + [0] + [0]),
            bytes([2] * 7 + [0] + [0]),
            [*wide, Move(0x01_0101_0101_01, 0x02_0202_0202_02, 1 << 30)],
        )


def test_an_address_that_the_driver_knows_is_found_at_every_offset() -> None:
    foreign = 0x7F12_3456_7000
    asked: list[int] = []

    def knows(address: int) -> bool:
        asked.append(address)
        return address == foreign

    for offset in range(17):
        value = bytes(offset) + word(foreign) + bytes(17 - offset)
        assert known_addresses(value, SPECS, knows) == [offset]
    assert known_addresses(INSIDE + word(12), SPECS, knows) == []
    assert BASE + 4096 not in asked and 12 not in asked


def test_bases_differ_in_both_halves() -> None:
    one = [RegionSpec(BASE, MIB)]
    assert moves(one, [RegionSpec(SHIFTED_BASE, MIB)]) == [Move(BASE, SHIFTED_BASE, MIB)]
    for base in (BASE, BASE + 4096, BASE + (1 << 40)):
        with pytest.raises(GraphRefusedError, match="one half only"):
            moves(one, [RegionSpec(base, MIB)])
    for others in ([], [RegionSpec(SHIFTED_BASE, 2 * MIB)]):
        with pytest.raises(GraphRefusedError, match="other regions"):
            moves(one, others)
