"""All tests of GPUs, over the stand-in driver of CUDA 12: `python -m tests.gpu --standin 12`."""

from __future__ import annotations

import pytest

from tests.support.driver.suite import PARTS, run_part

#: Sockets do not differ with the bindings: the other major's run has them.
_OF_SOCKETS = ("test_staged.py", "test_tcp.py", "test_ucx.py")


@pytest.mark.timeout(390)
@pytest.mark.parametrize(
    "part",
    [
        pytest.param(
            part,
            id=part[0],
            marks=pytest.mark.slow if part[0] in _OF_SOCKETS else pytest.mark.long,
        )
        for part in PARTS
    ],
)
def test_the_suite_passes(part: list[str]) -> None:
    run_part(12, part)
