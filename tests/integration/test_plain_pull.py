"""A plain pull is plain: how much it makes and enters is bounded."""

from __future__ import annotations

from benchmarks.plain_pull import MOST_CLASSES, count_in_a_process

#: What was reached; the benchmark says what is reached for.
MOST_VALUES, MOST_FUNCTIONS = 52, 768


def test_a_plain_pull_makes_and_enters_no_more_than_it_needs() -> None:
    found = count_in_a_process()
    assert found["classes"] <= MOST_CLASSES, found["names"]["classes"]
    assert found["values"] <= MOST_VALUES, found["names"]["values"]
    assert found["functions"] <= MOST_FUNCTIONS, found["names"]["functions"]
