"""A bounded part of `make differential-gpu`, with fixed seeds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.daemon import ROOT
from tests.support.driver.build import MAJORS, why_not

pytestmark = [pytest.mark.integration, pytest.mark.long]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("rounds", "seed", "major"),
    [
        (6, 20005, MAJORS[1]),
        # The older major where there is time.
        pytest.param(
            8, 1009, MAJORS[0], marks=pytest.mark.slow
        ),  # targets' failures and sources'; some end their pulls
    ],
)
def test_a_call_that_fails_is_a_typed_error_or_none(rounds: int, seed: int, major: int) -> None:
    if reason := why_not(major):
        pytest.skip(reason)
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.differential.gpu", "--major", str(major)]
    played = subprocess.run(
        [*command, "--rounds", str(rounds), "--seed", str(seed)],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=580,
    )
    assert played.returncode == 0, played.stdout + played.stderr
    # Rounds that all end alike would show nothing.
    assert "'whole': " in played.stdout and "'exit " in played.stdout
