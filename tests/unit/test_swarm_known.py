"""The table of known peers: bounded, aged, and safe from a peer that names thousands."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from mx.core.swarm.known import KNOWN_S, MOST_BANNED, KnownPeers
from mx.core.types import SourceRecord, SourceRole
from tests.support.records import make_documents, make_record

RECORD = make_record(make_documents("w"))


def peer(name: object) -> SourceRecord:
    return replace(RECORD, source_id=str(name))


def names(known: KnownPeers) -> list[str]:
    return [record.source_id for record in known]


def test_peers_that_a_peer_names_do_not_displace_listed_ones() -> None:
    known = KnownPeers(most=3)
    for number in range(10):
        known.name(peer(number), number, listed=False)
    assert names(known) == ["7", "8", "9"]
    for name in "abc":
        assert known.name(peer(name), 20.0, listed=True)
    assert names(known) == ["a", "b", "c"]
    assert not known.name(peer("x"), 21.0, listed=False)
    assert known.name(peer("d"), 22.0, listed=True, keep={peer("a").key})
    assert names(known) == ["a", "c", "d"]


def test_peers_that_were_not_named_for_long_are_dropped() -> None:
    known = KnownPeers()
    for name in "abc":
        known.name(peer(name), 0.0, listed=True)
    known.name(peer("b"), KNOWN_S, listed=True)
    known.prune(KNOWN_S + 1, keep={peer("c").key})
    assert names(known) == ["b", "c"]


def test_another_peers_record_does_not_replace_a_listed_one() -> None:
    known = KnownPeers()
    known.name(peer("a"), 0.0, listed=True)
    claims = replace(peer("a"), role=SourceRole.ORIGIN)
    known.name(claims, 1.0, listed=False)
    assert known.record(claims.key).role is RECORD.role


def test_what_a_peer_does_under_the_id_of_another_is_not_the_others_fault() -> None:
    known, liar = KnownPeers(), replace(peer("a"), endpoint="10.9.9.9:1")
    known.name(liar, 0.0, listed=True)
    known.ban(liar.key)
    assert not known.name(liar, 1.0, listed=True)
    assert known.name(peer("a"), 1.0, listed=True)
    assert known.record(peer("a").key).endpoint == RECORD.endpoint


def test_banned_peers_stay_unknown_and_their_number_is_bounded() -> None:
    known = KnownPeers()
    known.name(peer("a"), 0.0, listed=True)
    known.ban(peer("a").key)
    assert known.banned(peer("a").key) and not names(known)
    assert not known.name(peer("a"), 1.0, listed=True)
    for number in range(MOST_BANNED):
        known.ban(str(number))
    assert not known.banned(peer("a").key) and known.banned("0")


@given(
    st.lists(st.tuples(st.integers(0, 20), st.booleans(), st.floats(0, 100)), max_size=80),
    st.frozensets(st.integers(0, 20).map(str), max_size=3),
)
def test_the_table_is_bounded_and_keeps_the_peers_in_keep(
    named: list[tuple[int, bool, float]], keep: frozenset[str]
) -> None:
    known, now_s = KnownPeers(most=5), 0.0
    there: set[str] = set()
    for name, listed, seconds in named:
        now_s += seconds
        kept = {peer(each).key for each in keep}
        known.prune(now_s, kept)
        known.name(peer(name), now_s, listed=listed, keep=kept)
        assert len(known) <= 5
        assert there & keep <= set(names(known))
        there = set(names(known))
