"""All tests of GPUs, over the stand-in driver of CUDA 13: `python -m tests.gpu --standin 13`."""

from __future__ import annotations

import pytest

from tests.support.driver.suite import PARTS, run_part

#: The longest, of whose transports and memory tests/integration has pulls over the stand-in, too.
_AT_LEISURE = [
    f"test_{part}.py" for part in ("arena", "cuda_ipc", "pcie_p2p", "staged", "tcp", "ucx")
]


@pytest.mark.timeout(390)
@pytest.mark.parametrize(
    "part",
    [
        pytest.param(
            part,
            id=part[0],
            marks=pytest.mark.slow if part[0] in _AT_LEISURE else pytest.mark.long,
        )
        for part in PARTS
    ],
)
def test_the_suite_passes(part: list[str]) -> None:
    run_part(13, part)
