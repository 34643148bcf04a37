"""What an engine loads, in which order, where what it chose first can't be loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mx.core.variant import ProcessingKey
from mx.engines.replica import choice as choices
from mx.engines.replica.choice import CHECKPOINT, Choice
from mx.engines.replica.names import EligibleModels
from mx.engines.replica.options import LoaderOptions
from mx.engines.replica.ranks import Ranks
from mx.engines.replica.run import LOADED, PROCESSED, RankRun
from mx.errors import ConfigError, IncompleteError, IntegrityError

KEYS = {state: ProcessingKey(engine="e", state=state) for state in (PROCESSED, LOADED)}
ALL = [PROCESSED, LOADED, CHECKPOINT]


class _Group:
    rank_in_group, world_size = 0, 1


def started(
    monkeypatch: pytest.MonkeyPatch,
    listed: list[str],
    pin: str = "",
    names: tuple[str, ...] = ("m",),
    **options: Any,
) -> RankRun:
    """Return the run of an engine under whose model's name `listed` are listed."""

    def look(name: str, keys: Mapping[str, ProcessingKey], **_: Any) -> Choice:
        for state in (*keys, CHECKPOINT):
            if state in listed:
                return Choice(state)
        return Choice(why="nothing else is listed")

    monkeypatch.setattr(choices, "look", look)
    group: Any = _Group()
    read = LoaderOptions.read({"wait_s": 0, **options})
    meant = EligibleModels(names, pin=pin)
    return RankRun("Engine", meant, read, KEYS, Ranks(group, group, (0, 1)), Path("nowhere"))


def fail(run: RankRun, error: Exception | None) -> None:
    run.error = error
    assert not run.agreed(False)


def test_each_state_that_is_listed_is_tried_then_the_checkpoint_then_the_ordinary_loader(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = started(monkeypatch, ALL)
    tried = []
    while run.choice.state:
        tried.append(run.choice.state)
        fail(run, IncompleteError(f"{run.choice.state} is gone"))
    assert tried == ALL and run.loading.loads == {"ordinary": 1}
    first, second, last = caplog.messages
    assert first.startswith("engine.refused") and second.startswith("engine.refused")
    assert "processed: processed is gone; its loaded state is loaded" in first
    assert "loaded: loaded is gone; its checkpoint is loaded" in second
    assert last.startswith("engine.fallback")
    for reason in (*(f"{state} is gone" for state in ALL), "ordinary loader takes over"):
        assert reason in last


def test_what_is_not_listed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    run = started(monkeypatch, [PROCESSED, CHECKPOINT])
    fail(run, None)  # another rank could not load it
    assert run.choice.state == CHECKPOINT and run.loading.loads == {}


def test_without_a_fallback_the_last_error_is_raised_once_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = started(monkeypatch, [LOADED, CHECKPOINT], fallback=False)
    fail(run, ConfigError("it is another model's"))
    run.error = IntegrityError("a byte is wrong")
    with pytest.raises(IntegrityError, match="a byte is wrong"):
        run.agreed(False)
    assert run.loading.loads == {}


def test_of_another_ranks_failure_a_rank_has_no_error_to_raise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = started(monkeypatch, [LOADED], fallback=False)
    with pytest.raises(ConfigError, match="loaded: another rank could not load it"):
        run.agreed(False)


def test_a_pinned_checkpoint_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = started(monkeypatch, [LOADED, CHECKPOINT], pin="ab" * 32)
    fail(run, IncompleteError("gone"))
    assert run.choice.state == CHECKPOINT
    run.error = IncompleteError("gone, too")
    with pytest.raises(IncompleteError, match="gone, too"):
        run.agreed(False)


def test_a_pinned_checkpoint_that_failed_is_not_said_to_be_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = started(monkeypatch, [CHECKPOINT], pin="ab" * 32)

    def refuse(*_: Any, **__: Any) -> Choice:
        raise IncompleteError("no coordinator answers")

    monkeypatch.setattr(choices, "look", refuse)
    caplog.clear()
    run.error = IncompleteError("gone")
    with pytest.raises(IncompleteError, match="gone"):
        run.agreed(False)
    assert not caplog.messages


def test_a_coordinator_that_is_gone_meanwhile_leaves_the_ordinary_loader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = started(monkeypatch, ALL)

    def refuse(*_: Any, **__: Any) -> Choice:
        raise IncompleteError("no coordinator answers")

    monkeypatch.setattr(choices, "look", refuse)
    fail(run, IncompleteError("its source is gone"))
    assert not run.choice.state and run.loading.loads == {"ordinary": 1}


def test_where_a_folder_has_several_names_all_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where two sources of this host have read the same files: one of them may be gone."""
    run = started(monkeypatch, [CHECKPOINT], names=("m", "n"))
    tried = []
    while run.choice.state:
        tried.append((run.choice.name, run.choice.state))
        fail(run, IncompleteError("its source is gone"))
    assert tried == [("m", CHECKPOINT), ("n", CHECKPOINT)]


class _Lent:
    closed = False

    def close(self) -> None:
        self.closed = True


def test_a_start_that_fails_lends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where an engine can't process what it has begun to lend."""
    lent: Any = _Lent()
    with started(monkeypatch, []) as run:
        run.loading.lender = lent
    assert not lent.closed
    with pytest.raises(KeyboardInterrupt), started(monkeypatch, []) as run:
        run.loading.lender = lent
        raise KeyboardInterrupt
    assert lent.closed
