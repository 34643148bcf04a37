"""How long a pull waits for its peers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mx.core.swarm.patience import ALONE_S, HOPE_S, PATIENCE_S, Patience

seconds = st.floats(0, 1000)


def test_it_waits_longer_where_a_peer_holds_what_is_missing() -> None:
    patience = Patience(10.0)
    assert patience.until_s(given=False) > 10.0 + HOPE_S - 0.1
    assert patience.until_s(given=False) <= 10.0 + HOPE_S
    assert patience.until_s(given=True) > 10.0 + PATIENCE_S - 0.1
    assert patience.until_s(given=True) <= 10.0 + PATIENCE_S


@given(seconds, seconds, st.sampled_from(["landed", "announced", "joined"]))
def test_news_begins_the_wait_anew(start_s: float, later_s: float, news: str) -> None:
    patience, at_s = Patience(start_s), start_s + later_s
    if news == "joined":
        patience.joined("peer", at_s)
    else:
        getattr(patience, news)(at_s)
    assert at_s + HOPE_S - 0.1 < patience.until_s(given=False)
    assert at_s + HOPE_S + 0.1 >= patience.until_s(given=False)


def test_a_source_that_comes_and_goes_is_no_news_until_a_chunk_lands() -> None:
    patience = Patience(0.0)
    patience.lost("peer")
    patience.joined("peer", 4.0)
    assert patience.until_s(given=False) <= HOPE_S + 1
    patience.landed(10.0)
    patience.joined("peer", 14.0)
    assert patience.until_s(given=False) > 14.0 + HOPE_S - 0.1


def test_a_pull_is_alone_after_a_while_without_a_readable_peer() -> None:
    patience = Patience(0.0)
    assert not patience.alone(1.0, readable=False)
    assert not patience.alone(1.0 + ALONE_S, readable=False)
    assert patience.alone(1.1 + ALONE_S, readable=False)
    assert not patience.alone(9.0, readable=True)
    patience.joined("peer", 9.0)
    assert not patience.alone(20.0, readable=False), "the time begins anew"
