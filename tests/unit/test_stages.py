"""Where the time of a pull from disk goes: all of it is in one stage or another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from mx import api, config
from mx.core.manifest import plan_layout
from mx.errors import ClosedError
from mx.memory.arena import HostArena
from mx.storage.reader import fill
from mx.storage.safetensors import open_checkpoint
from mx.storage.stages import HASH, READ, UPLOAD, WAIT, StageClock, Stages
from tests.support.checkpoints import write_mixed

SETTINGS = config.load(environ={"HOME": "/nonexistent"})


def test_the_stages_of_a_thread_are_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what it does between them, until its end."""
    clock_s = 0.0

    def now() -> float:
        nonlocal clock_s
        clock_s += 1.0
        return clock_s

    monkeypatch.setattr("mx.storage.stages.time.monotonic", now)
    found = Stages()
    with found.clock("far") as clock:
        clock.lap(READ, 10)
        clock_s += 5
        clock.lap(HASH, 10)
        clock.drive = "near"
        clock.lap(READ, 3)
    assert found.report() == [
        ("far", "read", 1.0, 10),
        ("far", "hash", 6.0, 10),
        ("near", "read", 1.0, 3),
        ("near", "wait", 1.0, 0),
    ]
    assert clock.waited_s == 2.0


def test_all_threads_time_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever became of them: the sum of the stages is that of the threads' lives."""
    write_mixed(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    layout = plan_layout(checkpoint.specs)
    lives: list[StageClock] = []
    began: list[float] = []
    real = StageClock.__init__

    def made(self: StageClock, drive: int | str = "") -> None:
        real(self, drive)
        lives.append(self)
        began.append(self.at_s)

    def over(calls: Iterator[int], after: int) -> bool:
        return next(calls) >= after

    monkeypatch.setattr(StageClock, "__init__", made)
    for luck in ("none", "cancelled"):
        lives.clear()
        began.clear()
        found, calls = Stages(), iter(range(1000))
        after = 3 if luck == "cancelled" else 1000
        try:
            fill(
                checkpoint,
                layout,
                HostArena(layout.arena_nbytes).view,
                cancelled=partial(over, calls, after),
                on_layer=lambda layer: None,
                stages=found,
                uploads=True,
            )
        except ClosedError:
            assert luck == "cancelled"
        told = found.report()
        assert len(lives) >= 2
        lived_s = sum(each.at_s - at_s for each, at_s in zip(lives, began, strict=True))
        assert sum(seconds for _, _, seconds, _ in told) == pytest.approx(lived_s, abs=1e-4)
        if luck == "none":
            nbytes = {stage: nbytes for _, stage, _, nbytes in told}
            assert nbytes[READ] == nbytes[HASH] == layout.payload_nbytes
            assert nbytes[UPLOAD] == sum(layer.nbytes for layer in layout.layers)
            assert nbytes[WAIT] == 0


@pytest.mark.parametrize("pinned", [False, True])
def test_a_pull_from_disk_tells_its_stages(pinned: bool, tmp_path: Path) -> None:
    """By either way to read one, and the object of --json has them."""
    folder = tmp_path / "out"
    source = tmp_path / "source"
    source.mkdir()
    write_mixed(source)
    with api.pull("m", path=source, out=folder, settings=SETTINGS) as pull:
        pin = pull.wait(60).identity
    name = f"m@{pin}" if pinned else "m"  # digests beside the weights lead another way then
    with api.pull(name, path=folder, settings=SETTINGS) as pull:
        report = pull.wait(60)
    nbytes = {each.stage: each.bytes for each in report.stages}
    assert {each.drive for each in report.stages}
    assert nbytes["read"] >= report.bytes
    assert nbytes["hash"] == report.bytes
    assert all(each.seconds >= 0 for each in report.stages)
    told = report.to_json()["stages"]
    assert isinstance(told, list)
    assert {"drive", "stage", "seconds", "bytes", "gb_per_s"} == told[0].keys()
    assert not [each for each in threading.enumerate() if each.name.startswith("mx-read")]


def test_a_pull_that_reads_no_store_has_none() -> None:
    assert "stages" not in api.PullReport("m", "", "", 0, 0.0, 0.0, 0, "digest").to_json()
