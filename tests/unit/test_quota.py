"""Who gives up how many, when there are too many."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mx.core.quota import level_down


def test_those_with_the_most_give_up_first() -> None:
    assert level_down({"a": 10, "b": 3, "c": 1}, 5) == {"a": 5}
    assert level_down({"a": 10, "b": 10}, 3) in ({"a": 1, "b": 2}, {"a": 2, "b": 1})
    assert level_down({"a": 2}, 9) == {"a": 2}
    assert level_down({"a": 2}, 0) == {} == level_down({}, 4)


@given(st.dictionaries(st.text("abcd", min_size=1, max_size=2), st.integers(1, 30)), st.integers(0))
def test_the_rest_is_level(counts: dict[str, int], excess: int) -> None:
    given_up = level_down(counts, excess)
    assert sum(given_up.values()) == min(excess, sum(counts.values()))
    assert all(0 < given_up[address] <= counts[address] for address in given_up)
    left = {address: count - given_up.get(address, 0) for address, count in counts.items()}
    most = max(left.values(), default=0)
    # Who gave up anything has, but for one, as many as the one with the most.
    assert all(left[address] >= most - 1 for address in given_up)
