"""All tests of GPUs, over the stand-in driver of CUDA 12: `python -m tests.gpu --standin 12`."""

from __future__ import annotations

import pytest

from tests.support.driver.suite import PARTS, run_part

#: What depends on the bindings most; of the rest CI runs the other major's alone.
_OF_BINDINGS = PARTS[-1][0]


@pytest.mark.timeout(390)
@pytest.mark.parametrize(
    "part",
    [
        pytest.param(
            part,
            id=part[0],
            marks=pytest.mark.long if part[0] == _OF_BINDINGS else pytest.mark.slow,
        )
        for part in PARTS
    ],
)
def test_the_suite_passes(part: list[str]) -> None:
    run_part(12, part)
