"""Some random folders of `make folders`: models, an adapter, what is odd, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from mx import config
from tests.support.commands import Run, start_coordinator

pytest.importorskip("peft")

from tests.folders.checked import checking

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # what is odd is warned of
]


def test_random_folders(run: Run, tmp_path: Path, settings: config.Settings) -> None:
    coordinator, _ = start_coordinator(run)
    with checking(tmp_path, coordinator, settings) as checker:
        for seed in range(20, 44):
            (tmp_path / str(seed)).mkdir()
            checker.check(seed, tmp_path / str(seed))
    assert {"adapters", "companions", "models loaded", "refused"} <= checker.counts.keys()
