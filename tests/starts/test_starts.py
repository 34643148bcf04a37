"""A bounded part of the campaign of `make starts`, with fixed seeds."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.processes import Violation
from tests.starts import run
from tests.starts.schedule import (
    ASLEEP,
    CHECKPOINT,
    COORDINATOR,
    ENGINE,
    ORDER,
    What,
    draw,
    points_of,
)

#: Together they end in each state and in an interruption, and wake up both ways.
SEEDS = (9, 10, 11, 12, 13, 15)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder on a disk, where the times of files prove something."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made:
        yield Path(made)


@pytest.mark.integration
@pytest.mark.chaos
@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_start_ends_with_right_weights_or_a_reason(folder: Path) -> None:
    tally = run.campaign(SEEDS, folder)
    assert not tally.broken, tally.broken
    assert tally.strokes > len(SEEDS)


@pytest.mark.integration
@pytest.mark.chaos
@pytest.mark.long
@pytest.mark.timeout(240)
def test_wrong_weights_are_noticed(folder: Path) -> None:
    """The engine's folder has other weights than the campaign takes it to have."""
    quiet = replace(draw(1), states=(), checkpoint=False, folder="other", named="name", luck=())
    quiet = replace(quiet, state="auto", fallback=None, then="", memory="usual")
    with run.started(folder) as site:
        assert run.play(site, quiet).end == "ordinary"
        with pytest.raises(Violation, match="wrong weights: they are newer"):
            run.play(replace(site, other=site.newer), quiet)


def test_a_seed_means_the_same_start_everywhere() -> None:
    assert [draw(seed) for seed in range(300)] == [draw(seed) for seed in range(300)]


def test_everything_is_drawn() -> None:
    starts = [draw(seed) for seed in range(2000)]
    strokes = [luck for start in starts for luck in start.luck]
    assert all(len(start.luck) >= 2 for start in starts)
    assert {luck.what for luck in strokes} == set(What)
    assert {luck.who for luck in strokes} == {*ORDER[:2], CHECKPOINT, COORDINATOR, ENGINE}
    points = {point for state in ORDER for point in points_of(state)}
    assert {luck.point for luck in strokes} == points | {ASLEEP}

    def drawn(name: str) -> set[object]:
        return {getattr(start, name) for start in starts}

    assert drawn("folder") == {"whole", "bare", "absent", "other"}
    assert drawn("named") == {"name", "pin", "files"}
    assert drawn("memory") == {"usual", "absent", "full"}
    assert drawn("then") == {"", "sleep", "discard"}
    for start in starts:
        assert start.named != "files" or (start.folder, start.checkpoint) == ("whole", True)
