"""A bounded part of `make differential`, with fixed seeds."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter

import pytest

from tests.support.daemon import ROOT

ROUNDS = 40
#: What the rounds have to contain. They draw more, but not each of it in so few rounds.
DRAWN = [
    *("whole with follow", "whole with hold", "whole with into", "layers seen", "files seen"),
    *("followed", "update", "new_lender", "coordinator restarts", "Interrupted", "as_an_engine"),
]

pytestmark = [pytest.mark.integration, pytest.mark.long]


@pytest.mark.timeout(600)
def test_every_step_of_every_round_sees_one_version() -> None:
    played = subprocess.run(
        [sys.executable, "-m", "tests.differential", "--rounds", str(ROUNDS), "--jobs", "2"],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=580,
    )
    assert played.returncode == 0, played.stdout + played.stderr
    assert not played.stderr, played.stderr
    counts: Counter[str] = Counter()
    for listed in re.findall(r": all right \((.*)\)", played.stdout):
        for count, what in re.findall(r"(\d+) ([^,]+)", listed):
            counts[what] += int(count)
    # Rounds in which every pull fails, or nothing happens in the middle of one, would show nothing.
    assert counts["whole"] > ROUNDS
    assert not [what for what in DRAWN if not counts[what]], played.stdout
