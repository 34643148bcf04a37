"""A bounded part of `make differential`, with fixed seeds."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.integration.conftest import REPOSITORY

ROUNDS = 40

pytestmark = [pytest.mark.integration, pytest.mark.long]


@pytest.mark.timeout(400)
def test_every_step_of_every_round_sees_one_version() -> None:
    played = subprocess.run(
        [sys.executable, "-m", "tests.differential", "--rounds", str(ROUNDS)],
        check=False,
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=380,
    )
    assert played.returncode == 0, played.stdout + played.stderr
    assert not played.stderr, played.stderr
    counts = {what: int(count) for count, what in re.findall(r"(\d+) (\w+)", played.stdout)}
    # Rounds in which every pull fails, or nothing happens in the middle of one, would show nothing.
    assert counts["whole"] > ROUNDS
    assert counts["RevisionChangedError"] > 0
    assert counts["Interrupted"] > 0
    assert counts["restart"] > 0
