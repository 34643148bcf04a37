"""Memory that is filled has one user; memory that is lent may be lent again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.errors import ConfigError
from mx.memory import live as claims
from mx.memory.live import Claim, claim, merged

ranges = st.lists(
    st.integers(0, 40).flatmap(lambda at: st.tuples(st.just(at), st.integers(at, at + 8))),
    max_size=6,
)


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    yield
    assert claims._claims == []


def covered(some: list[tuple[int, int]]) -> set[int]:
    return {at for begin, end in some for at in range(begin, end)}


@given(st.lists(st.tuples(ranges, st.booleans(), st.booleans()), max_size=8))
def test_only_what_is_filled_excludes(
    steps: list[tuple[list[tuple[int, int]], bool, bool]],
) -> None:
    """Against sets of addresses; each step claims, and releases the oldest one or not."""
    held: list[tuple[Claim, set[int], bool]] = []
    try:
        for number, (wanted, fills, releases) in enumerate(steps):
            addresses = covered(wanted)
            free = not any((fills or each[2]) and addresses & each[1] for each in held)
            try:
                held.append(
                    (claim(merged(wanted), f"user {number}", fills=fills), addresses, fills)
                )
                assert free
            except ConfigError as error:
                assert not free
                users = [f"user {i}" for i in range(number)]
                assert any(user in error.message for user in users)
                assert "close" in error.hint
            if releases and held:
                held.pop(0)[0].release()
    finally:
        for each, _, _ in held:
            each.release()


def test_a_release_gives_up_its_own_alone_and_may_come_twice() -> None:
    one = claim([(0, 8), (8, 16)], "one", fills=False)
    other = claim([(4, 12)], "other", fills=False)
    one.release()
    one.release()
    with pytest.raises(ConfigError, match="other"):
        claim([(11, 12)], "a pull", fills=True)
    filling = claim([(12, 16)], "a pull", fills=True)
    other.release()
    claim([(0, 12)], "another pull", fills=True).release()
    filling.release()


def test_nothing_is_left_claimed_by_what_was_refused() -> None:
    one = claim([(0, 8)], "one", fills=True)
    with pytest.raises(ConfigError):
        claim([(7, 100)], "other", fills=True)
    claim([(8, 100)], "other", fills=True).release()
    one.release()


def test_ranges_that_touch_are_apart_and_merged_ones_are() -> None:
    assert claims.are_apart([])
    assert claims.are_apart([(0, 2), (2, 3), (5, 9)])
    assert not claims.are_apart([(0, 3), (2, 4)])
    assert merged([(5, 9), (0, 2), (2, 3)]) == [(0, 2), (2, 3), (5, 9)]
    assert merged([(5, 9), (0, 4), (3, 3), (3, 6)]) == [(0, 9)]
