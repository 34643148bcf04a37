"""All tests of GPUs, over the stand-in driver of CUDA 12: `python -m tests.gpu --standin 12`."""

from __future__ import annotations

import pytest

from tests.support.driver.suite import PARTS, run_part


@pytest.mark.slow  # what depends on the bindings, the other test_driver_* files run with both
@pytest.mark.timeout(390)
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part[0])
def test_the_suite_passes(part: list[str]) -> None:
    run_part(12, part)
