"""Sizes, rates and times as users read and write them."""

from __future__ import annotations

import pytest

from mx.units import count, format_rate, parse_seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("1.5", 1.5), ("0", 0), ("1m", 60), ("500ms", 0.5), ("1h30m", 5400),
     (" 2 min ", 120), ("1d", 86400), ("1e2", 100)],
)  # fmt: skip
def test_times_are_parsed(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "m", "1w", "-1", "1m-", "nan", "inf", "1 2", "1m30"])
def test_malformed_times_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="1h30m"):
        parse_seconds(text)


def test_a_rate_is_never_shown_as_zero() -> None:
    assert format_rate(2.151e9) == "2.15 GB/s"
    assert format_rate(1.8e8) == "180 MB/s"
    assert format_rate(4.7e6) == "4.7 MB/s"
    assert format_rate(5e3) == "5 kB/s"


def test_a_count_of_one_is_singular() -> None:
    assert [count(n, "layer") for n in (0, 1, 26)] == ["0 layers", "1 layer", "26 layers"]
