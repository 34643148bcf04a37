from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.core.leases import MARGIN_S, LeaseBook


def test_a_lease_ends_after_its_time_and_a_margin() -> None:
    book = LeaseBook(2.0)
    book.open("g", "s", 10.0)
    assert book.expire(12.0) == []
    (ended,) = book.expire(12.0 + MARGIN_S)
    assert ended.grant_id == "g"
    assert len(book) == 0
    assert not book.renew("g", 12.6)


def test_renewal_counts_from_the_answer() -> None:
    book = LeaseBook(2.0)
    book.open("g", "s", 0.0)
    assert book.renew("g", 2.0)
    assert book.expire(4.0) == []
    assert [lease.grant_id for lease in book.of_source("s")] == ["g"]
    assert book.close("g")
    assert not book.close("g")


def test_an_ended_lease_is_not_renewed_even_before_it_is_swept() -> None:
    book = LeaseBook(1.0)
    book.open("g", "s", 0.0)
    assert not book.renew("g", 100.0)


def test_one_grant_is_one_lease() -> None:
    book = LeaseBook(1.0)
    book.open("g", "s", 0.0)
    with pytest.raises(ValueError, match="open already"):
        book.open("g", "s", 0.0)


@given(
    st.lists(st.tuples(st.floats(0, 5), st.booleans()), max_size=30),
    st.floats(0.5, 3),
)
def test_a_lease_ends_at_its_reader_first(steps: list[tuple[float, bool]], lease_s: float) -> None:
    """While a reader counts its lease as running, it runs at the source, for any round trip."""
    book = LeaseBook(lease_s)
    now_s = 0.0
    book.open("g", "s", now_s)
    reader_until_s = now_s + lease_s
    for delay_s, renews in steps:
        sent_s = now_s
        now_s += delay_s
        swept = {lease.grant_id for lease in book.expire(now_s)}
        if now_s < reader_until_s:
            assert "g" not in swept
        if "g" in swept:
            return
        if renews and book.renew("g", now_s):
            reader_until_s = sent_s + lease_s


def test_a_returned_lease_is_over_and_a_lost_one_is_unexpired_until_its_end() -> None:
    book = LeaseBook(2.0)
    for grant_id in ("back", "lost", "silent"):
        book.open(grant_id, "s", 0.0)
    book.open("other", "t", 0.0)
    book.lose("lost")
    assert len(book) == 3
    assert not book.renew("lost", 0.1)
    book.close("back")
    book.close("silent")
    assert book.has_unexpired("s", 2.4)  # a reader that was cut off may still trust what it reads
    assert not book.has_unexpired("s", 2.0 + MARGIN_S)
    assert {lease.grant_id for lease in book.expire(2.0 + MARGIN_S)} == {"other"}
    assert not book.has_unexpired("s", 0.0)


def test_a_lost_lease_can_still_be_returned() -> None:
    book = LeaseBook(2.0)
    book.open("g", "s", 0.0)
    book.lose("g")
    book.lose("never there")
    assert book.has_unexpired("s", 0.5)
    assert not book.close("g")
    assert not book.has_unexpired("s", 0.5)
