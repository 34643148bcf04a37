"""How the tests that draw examples fail: within their time, and with the example."""

from __future__ import annotations

import pytest

from tests.support.daemon import ROOT

pytest_plugins = ["pytester"]

#: Each example takes so long that shrinking, hundreds of them, would outlast the test's time.
SLOW = """
    import time

    from hypothesis import given
    from hypothesis import strategies as st

    @given(st.lists(st.integers(0, 10**6), min_size=30))
    def test_slow(numbers):
        time.sleep(1)
        assert sum(numbers) < 10**5
"""


@pytest.mark.timeout(120)
def test_a_slow_one_that_fails_shows_its_example(pytester: pytest.Pytester) -> None:
    pytester.makeconftest((ROOT / "tests" / "conftest.py").read_text())
    pytester.makepyfile(SLOW)
    # As for all tests: beyond its time the whole run is ended from outside.
    paths = ("-o", f"pythonpath={ROOT}")
    ended = ("-o", "faulthandler_timeout=50", "-o", "faulthandler_exit_on_timeout=true")
    result = pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider", *paths, *ended)
    result.assert_outcomes(failed=1)
    shown = result.stdout.str()
    assert "numbers=[" in shown
    assert "@reproduce_failure(" in shown
