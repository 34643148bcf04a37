"""What a freeze takes, and how it ends: by the engine's state, by Ctrl-C."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mx
from mx import config
from mx.cli.outcome import EXIT_INTERRUPTED
from mx.errors import ConfigError, UnknownModelError
from mx.snapshots.container import SNAPSHOT, read
from tests.kills.freezes import KEYS, Site, site
from tests.support.commands import Command, Run, environment

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

BOTH = ("--variant", "engine=vllm,tp=*/2")
LOGGED = ("--log-level", "debug")
#: Ctrl-C's exit code, and what a shell has of a process that was ending when it came again.
INTERRUPTED = (EXIT_INTERRUPTED, -signal.SIGINT)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as found:
        yield found


def has_layer(folder: Path) -> bool:
    """Return True once the journal of a rank names a layer, after its first line."""
    return any(len(each.read_bytes().splitlines()) > 1 for each in folder.glob(".rank*/journal"))


def twice(command: Command) -> int:
    """Press Ctrl-C twice once the command has begun, and return how it has ended."""
    command.until(lambda: "selector" in command.err, "the loop that its log tells of")
    time.sleep(random.uniform(0, 0.5))
    for _ in range(2):
        if command.process.poll() is None:
            command.signal(signal.SIGINT)
        time.sleep(random.choice([0, random.uniform(0, 0.05)]))
    code = command.wait(60)
    assert code in (0, *INTERRUPTED), command.err
    assert "Traceback" not in command.err and "Error" not in command.err
    return code


def freezing(run: Run, here: Site, *more: str) -> Command:
    key = str(here.settings.name_key)
    where = "--coordinator", here.coordinator, "--name-key", key
    return run("freeze", "m", str(here.out), *where, *more, env=environment())


def test_an_engines_state_is_frozen_beside_a_checkpoint(
    run: Run, here: Site, tmp_path: Path
) -> None:
    how: Any = {"coordinator": here.coordinator, "settings": here.settings}
    state = here.states[0]
    with mx.serve(state, model="m", **how), mx.serve(state, model="plain", **how):
        assert mx.freeze("m", tmp_path / "checkpoint", **how).ranks == 1
        command = freezing(run, here, "--from", "engine")
        assert command.wait(60) == 0, command.err
        assert [each.variant for each in read(here.out).ranks] == [*map(str, KEYS)]
        assert not here.wrong()
        with pytest.raises(UnknownModelError, match="no replica of plain lends") as caught:
            mx.freeze("plain", tmp_path / "none", source="engine", **how)
        assert "`mx-peer`" in caught.value.hint
        with pytest.raises(ConfigError, match="is for a name"):
            mx.freeze(state, tmp_path / "none", model="n", source="engine", **how)
    other = mx.ProcessingKey(engine="sglang")
    with mx.serve(state, model="m", variant=other, **how):
        here.out = tmp_path / "other"
        command = freezing(run, here, "--from", "engine")
        assert command.wait(60) == 2
        assert "engine=sglang" in command.err and "engine=vllm,tp=*/2" in command.err
        assert "--variant" in command.err
        command = freezing(run, here, "--from", "engine", "--variant", str(other))
        assert command.wait(60) == 0, command.err
    command = freezing(run, here, "--from", "disk")
    assert command.wait(60) == 2 and "it is peer or engine" in command.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_freeze_that_a_signal_ends_says_how_to_go_on(
    run: Run, here: Site, number: signal.Signals
) -> None:
    slow = config.given(here.settings, max_bandwidth="4MB/s")
    variant = mx.ProcessingKey(engine="slow")
    with mx.serve(
        here.states[0], model="m", variant=variant, coordinator=here.coordinator, settings=slow
    ):
        asked = "--variant", str(variant)
        command = freezing(run, here, *asked, "--transport", "tcp")
        command.until(lambda: has_layer(here.out), "a layer that was written")
        command.signal(number)
        assert command.wait(60) == 128 + number
        assert f"run the same command again to go on from what is in {here.out}" in command.err
        assert "Traceback" not in command.err and not here.loads_in_part()
        command = freezing(run, here, *asked, "--json")
        report = command.json()
        assert command.wait(60) == 0 and report["complete"]
        assert report["bytes"] < sum(each.nbytes for each in here.states[0].values())


@pytest.mark.long
def test_ctrl_c_twice_ends_it_at_once_and_leaves_no_part(run: Run, here: Site) -> None:
    random.seed(5)
    ends = []
    for _ in range(12):
        ends.append(twice(freezing(run, here, *BOTH, *LOGGED)))
        assert not here.wrong()
        if (here.out / SNAPSHOT).exists():
            shutil.rmtree(here.out)
        else:
            assert not here.loads_in_part()
    assert {*ends} & {*INTERRUPTED}
    command = freezing(run, here, *BOTH)
    assert command.wait(60) == 0, command.err
    assert not here.wrong() and sorted(os.listdir(here.out)) == ["rank0", "rank1", SNAPSHOT]
    ends = []
    for _ in range(12):
        ends.append(twice(run("thaw", str(here.out), *LOGGED, env=environment())))
    assert {*ends} & {*INTERRUPTED} and not here.wrong()
