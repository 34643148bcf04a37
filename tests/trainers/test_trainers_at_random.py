"""A bounded part of `make trainers`, with a fixed seed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.daemon import ROOT

ROUNDS = 60

pytestmark = [pytest.mark.integration, pytest.mark.long]


@pytest.mark.timeout(400)
def test_each_pull_of_a_random_trainer_is_one_version() -> None:
    played = subprocess.run(
        [sys.executable, "-m", "tests.trainers", "--rounds", str(ROUNDS)],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=380,
    )
    assert played.returncode == 0, played.stdout + played.stderr
