"""A source's grants: their bounds, and which ones end in favour of new ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.core.grants import (
    IDLE_S,
    LEAST_PROGRESS_BYTES,
    TRADING_IDLE_S,
    TRADING_YIELD_S,
    YIELD_S,
    GrantBook,
    GrantBounds,
    Principal,
)
from mx.source.requests import principal_of

BOUNDS = GrantBounds(total=8, per_principal=6, per_connection=3)


def of(connection: int, address: str = "10.0.0.1", reader_id: str = "") -> Principal:
    return Principal(f"ipv4:{address}:{connection}", address, reader_id)


def test_a_connection_at_its_bound_ends_no_grants_of_others() -> None:
    book = GrantBook(BOUNDS)
    for number in range(3):
        assert book.admit(of(1), 100.0) == []
        book.open(str(number), of(1), 0.0)
    assert book.admit(of(1), 100.0) is None
    assert book.admit(of(2), 100.0) == []
    book.close("0")
    book.close("0")
    assert book.grants_of(of(1).connection) == 2
    assert book.admit(of(1), 100.0) == []


def test_a_full_address_ends_idle_grants_of_its_largest_connection_first() -> None:
    book = GrantBook(BOUNDS)
    for number, connection in enumerate((1, 2, 2, 2, 3, 4)):
        book.open(str(number), of(connection), 0.0 if connection == 1 else 1.0)
    assert book.admit(of(5), YIELD_S - 0.1) is None
    assert book.admit(of(5), YIELD_S + 0.5) == ["0"]  # the only one that is late
    (ending,) = book.admit(of(5), YIELD_S + 1.5) or []
    assert ending in "123"
    # Another address has a bound of its own.
    assert book.admit(of(6, "10.0.0.2"), 0.0) == []


def test_a_principal_is_one_wherever_it_reads_from() -> None:
    book = GrantBook(BOUNDS)
    for number in range(6):
        book.open(str(number), replace(of(number, f"10.0.0.{number}"), name="spiffe://a"), 0.0)
    assert book.admit(replace(of(9, "10.0.0.9"), name="spiffe://a"), 0.0) is None
    assert book.admit(replace(of(9, "10.0.0.1"), name="spiffe://b"), 0.0) == []


def test_a_grant_that_makes_progress_keeps_its_place() -> None:
    book = GrantBook(GrantBounds(total=1, per_principal=1))
    book.open("g", of(1), 0.0)
    book.moved("g", LEAST_PROGRESS_BYTES, 10.0)
    assert book.admit(of(2), 10.0 + YIELD_S - 0.1) is None
    book.moved("g", 2 * LEAST_PROGRESS_BYTES - 1, 12.0)  # a trickle is not progress
    assert book.admit(of(2), 10.0 + YIELD_S) == ["g"]
    book.moved("gone", LEAST_PROGRESS_BYTES, 10.0)
    assert book.idle(10.0 + IDLE_S - 0.1) == []
    assert book.idle(10.0 + IDLE_S) == ["g"]


def test_a_reader_that_trades_chunks_may_be_idle_for_longer() -> None:
    book = GrantBook(BOUNDS, max_readers=1)
    trader = of(1, reader_id="a")
    book.open("g", trader, 0.0)
    book.trades(of(9, reader_id="a"), +1)  # over another connection from the same address
    assert book.admit(of(2), TRADING_YIELD_S - 0.1) is None
    assert book.admit(of(2), TRADING_YIELD_S) == ["g"]
    assert book.idle(TRADING_IDLE_S - 0.1) == []
    assert book.idle(TRADING_IDLE_S) == ["g"]
    book.trades(of(9, reader_id="a"), -1)
    assert book.idle(IDLE_S) == ["g"]


def test_a_dialled_reader_trades_from_any_address() -> None:
    book = GrantBook(BOUNDS)
    book.open("g", of(1, reader_id="a"), 0.0)
    book.open("h", of(2, reader_id="b"), 0.0)
    book.trades(Principal("", "", "a"), +1)
    assert book.idle(IDLE_S) == ["h"]
    assert book.idle(TRADING_IDLE_S) == ["g", "h"]
    book.trades(Principal("", "", "a"), -1)
    assert book.idle(IDLE_S) == ["g", "h"]


def test_a_name_from_another_address_or_connection_is_another_reader() -> None:
    book = GrantBook(BOUNDS, max_readers=1)
    book.open("g", of(1, reader_id="a"), 0.0)
    assert book.admit(of(1, reader_id="a"), 0.0) == []
    assert book.admit(of(2, reader_id="a"), 0.0) is None
    assert book.admit(of(1, "10.0.0.2", "a"), 0.0) is None
    book.trades(of(3, "10.0.0.2", "a"), +1)  # it does not keep the grant of the first
    assert book.admit(of(2), YIELD_S) == ["g"]
    assert not book.full_for(of(7, reader_id="a"))
    assert book.full_for(of(7, "10.0.0.2", "a")) and book.full_for(of(7, reader_id="b"))


def test_a_reader_loses_all_of_its_grants_and_only_if_all_are_idle() -> None:
    book = GrantBook(BOUNDS, max_readers=2)
    for number, connection in enumerate((1, 1, 2, 2)):
        book.open(str(number), of(connection), 0.0)
    book.moved("0", LEAST_PROGRESS_BYTES, 5.0)
    assert book.admit(of(3), 5.0) == ["2", "3"]


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 2), st.floats(0, 5), st.booleans()),
        max_size=60,
    ),
    st.integers(0, 4),
)
def test_the_bounds_hold_for_any_requests(
    steps: list[tuple[int, int, float, bool]], max_readers: int
) -> None:
    book, now_s, held = GrantBook(BOUNDS, max_readers), 0.0, dict[str, Principal]()
    for number, (connection, host, passed_s, closes) in enumerate(steps):
        now_s += passed_s
        if closes and held:
            first = next(iter(held))
            del held[first]
            book.close(first)
        principal = of(connection, f"10.0.0.{host}")
        ending = book.admit(principal, now_s)
        if ending is None:
            continue
        for grant_id in ending:
            del held[grant_id]
            book.close(grant_id)
        book.open(str(number), principal, now_s)
        held[str(number)] = principal
        assert len(held) <= BOUNDS.total
        for address in {each.address for each in held.values()}:
            assert sum(p.address == address for p in held.values()) <= BOUNDS.per_principal
        connections = [each.connection for each in held.values()]
        assert max(map(connections.count, connections)) <= BOUNDS.per_connection
        assert not max_readers or len(set(connections)) <= max_readers


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.1.2.3:4567", "10.1.2.3"),
        ("ipv6:%5B::1%5D:4567", "::/64"),
        ("ipv6:[2001:db8:1:2:3::4]:4567", "2001:db8:1:2::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:4567", "fe80::/64"),
        ("ipv6:%5B::ffff:10.1.2.3%5D:4567", "10.1.2.3"),
        ("unix:", "unix:"),
    ],
)
def test_a_principal_is_the_connection_and_its_address(peer: str, address: str) -> None:
    class Context:
        def peer(self) -> str:
            return peer

    assert principal_of(Context(), "me") == Principal(peer, address, "me")
