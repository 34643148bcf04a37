"""A bounded part of `make disks`, with fixed seeds."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter

import pytest

from tests.disks.run import FAULTS
from tests.support.daemon import ROOT

ROUNDS = 60

pytestmark = [pytest.mark.integration, pytest.mark.long]


@pytest.mark.timeout(400)
def test_no_pull_from_a_random_folder_has_a_wrong_byte() -> None:
    played = subprocess.run(
        [sys.executable, "-m", "tests.disks", "--rounds", str(ROUNDS)],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=380,
    )
    assert played.returncode == 0, played.stdout + played.stderr
    counts: Counter[str] = Counter()
    for count, what in re.findall(r"(\d+) ([^,)]+)", played.stdout.partition("(")[2]):
        counts[what] += int(count)
    # Rounds in which every pull fails, or nothing goes wrong, would show nothing.
    assert counts["whole"] > ROUNDS // 4
    assert not [fault for fault in FAULTS if not counts[fault]], played.stdout
