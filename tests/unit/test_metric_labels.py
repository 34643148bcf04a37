"""Labels that come from elsewhere: bounded, whatever names strangers make up."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from mx import counters
from mx.metrics.labels import MOST_CHARACTERS, OTHER, Names


def test_first_come_names_stay_and_the_rest_is_other() -> None:
    names = Names(2, keep_s=10.0)
    assert names.labelled({"a": 1, "b": 3, "c": 2}, 0.0) == {"b": 3, "c": 2, OTHER: 1}
    assert names.labelled({"a": 9, "b": 1}, 1.0) == {"b": 1, OTHER: 9}  # c keeps its label
    assert names.labelled({"a": 9, "b": 1}, 10.5) == {"a": 9, "b": 1}


def test_a_label_is_short_and_plain() -> None:
    (label,) = Names().labelled({"x\x1b[31m\n" + "y" * 1000: 1}, 0.0)
    assert label.isprintable()
    assert len(label) == MOST_CHARACTERS


@given(
    st.lists(st.tuples(st.floats(0, 5), st.dictionaries(st.text(max_size=3), st.integers(1, 9))))
)
def test_any_stream_of_names_makes_few_labels_and_loses_no_count(
    scrapes: list[tuple[float, dict[str, int]]],
) -> None:
    names, now_s, seen = Names(4, keep_s=7.0), 0.0, list[tuple[float, set[str]]]()
    for passed_s, counts in scrapes:
        now_s += passed_s
        found = names.labelled(counts, now_s)
        assert sum(found.values()) == sum(counts.values())
        assert len(set(found) - {OTHER}) <= 4
        seen.append((now_s, set(found) - {OTHER}))
        lately = set().union(*(labels for at_s, labels in seen if now_s - at_s < 7.0))
        assert len(lately) <= 8  # of two such times, at most


def test_counters_have_few_labels() -> None:
    name = "a test's count"
    for number in range(1000):
        counters.add(name, f"kind {number}", 2)
    found = counters.totals(name)
    assert len(found) == counters.MOST_LABELS + 1
    assert found.total() == 2000
    assert found[counters.OTHER] == 2 * (1000 - counters.MOST_LABELS)
    assert counters.totals("nothing") == Counter()
