"""All tests of GPUs, over the stand-in driver: `python -m tests.gpu --standin MAJOR`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.driver.build import MAJORS, why_not

#: The second major's operations are late: work is done only well after it was queued.
SETTINGS = {12: ["--set", "LATE_US=300"], 13: []}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("major", MAJORS)
def test_the_suite_passes(major: int) -> None:
    if reason := why_not(major):
        pytest.skip(reason)
    pytest.importorskip("triton")
    ended = subprocess.run(
        [sys.executable, "-m", "tests.gpu", "--standin", str(major), *SETTINGS[major], "-q"],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
