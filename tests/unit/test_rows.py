"""The rows of a layer-address table as a document: what is read, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.core.types import ROW_BYTES, AddressTable, Region, TableRow
from mx.errors import PeerProtocolError
from mx.wire.rows import check_rows, encode_rows, with_rows
from tests.support.records import scattered_rows

U64_MAX = (1 << 64) - 1
REGIONS = (Region(0, "cpu", 0, 1000), Region(1, "cpu", 0, 1000, (0, 1)))


def table(count: int) -> AddressTable:
    return AddressTable(b"l" * 32, REGIONS, row_count=count)


@pytest.mark.parametrize("count", [0, 1, 2, 50_000])
def test_rows_survive_a_round_trip(count: int) -> None:
    rows = scattered_rows(count)
    document = encode_rows(rows)
    assert len(document) == count * ROW_BYTES
    large = AddressTable(b"l" * 32, (Region(0, "cpu", 0, 1 << 44),), row_count=count)
    assert with_rows(large, document).rows == rows


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([(0, 0, 1, 2, 0)], "names a region"),  # none is there
        ([(0, 0, 1, 1, 0)], "names a region"),  # it takes no rows
        ([(0, 0, 1, (1 << 32) - 1, 0)], "names a region"),
        ([(0, 0, 1001, 0, 0)], "outside"),
        ([(0, 0, 1, 0, 1000)], "outside"),
        ([(0, 0, 10, 0, U64_MAX)], "outside"),
        ([(0, 0, 10, 0, U64_MAX - 5)], "outside"),
        ([(0, 0, U64_MAX, 0, 1)], "outside"),
        ([(0, U64_MAX, 2, 0, 0)], "too many"),
        ([(0, 0, 0, 0, 0)], "no bytes"),
        ([(0, 0, 10, 0, 0), (0, 9, 10, 0, 10)], "out of order"),  # they overlap
        ([(0, 10, 10, 0, 0), (0, 0, 10, 0, 10)], "out of order"),
        ([(1, 0, 10, 0, 0), (0, 0, 10, 0, 10)], "out of order"),
        ([(0, 0, 10, 0, 0), (0, 10, 10, 0, 10), (1, 0, 10, 7, 0)], "layer 1 at 0 names"),
    ],
)
def test_rows_that_no_table_has_are_refused(
    rows: list[tuple[int, int, int, int, int]], why: str
) -> None:
    document = encode_rows([TableRow(*row) for row in rows])
    with pytest.raises(PeerProtocolError, match=why):
        check_rows(table(len(rows)), document)


@pytest.mark.parametrize(("count", "nbytes"), [(1, 0), (1, 31), (1, 33), (0, 32), (2, 32)])
def test_other_lengths_are_refused(count: int, nbytes: int) -> None:
    with pytest.raises(PeerProtocolError, match=f"{nbytes} bytes for {count} rows"):
        check_rows(table(count), bytes(nbytes))


def is_right(rows: list[TableRow]) -> bool:
    """The rules, row by row."""
    layer = end = 0
    for row in rows:
        if row.layer != layer:
            if row.layer < layer:
                return False
            layer, end = row.layer, 0
        if row.offset < end or not row.nbytes or row.offset + row.nbytes > U64_MAX:
            return False
        end = row.offset + row.nbytes
        if row.region != 0 or row.region_offset + row.nbytes > REGIONS[0].nbytes:
            return False
    return True


NUMBERS = st.integers(0, 40) | st.sampled_from([960, 999, 1000, 1001, U64_MAX - 1, U64_MAX])
ROWS = st.builds(
    TableRow, st.integers(0, 3), NUMBERS, NUMBERS, st.sampled_from([0, 0, 0, 0, 1, 2]), NUMBERS
)


@given(st.lists(ROWS, max_size=5), st.booleans())
def test_what_is_accepted_is_what_the_rules_say(rows: list[TableRow], ordered: bool) -> None:
    rows = sorted(rows) if ordered else rows
    try:
        found = with_rows(table(len(rows)), encode_rows(rows))
    except PeerProtocolError as error:
        assert not is_right(rows), error
    else:
        assert is_right(rows) and found.rows == tuple(rows)
