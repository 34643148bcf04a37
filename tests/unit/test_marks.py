"""Which marks show that a state has lost some of itself."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from mx.core.marks import MAX_MARK_BYTES, Losses, Mark
from mx.errors import ConfigError

LEASE_S = 5.0


@given(st.text(max_size=64), st.integers(0, 2**64 - 1))
def test_a_mark_is_read_as_it_was_written(epoch: str, sequence: int) -> None:
    mark = Mark(epoch, sequence)
    assert Mark.decode(mark.encode()) == mark


@given(st.binary(max_size=MAX_MARK_BYTES))
def test_any_bytes_are_a_mark_or_an_error(data: bytes) -> None:
    try:
        mark = Mark.decode(data)
    except ConfigError:
        return
    assert mark.encode() == data


def test_marks_that_are_no_bytes_of_a_mark_are_errors() -> None:
    for data in (b"", b"1234567", b"\0" * 8 + b"\xff"):
        with pytest.raises(ConfigError):
            Mark.decode(data)


class Machine(RuleBasedStateMachine):
    """Coordinators on one state, and the marks that sources have got, which they echo in any order,
    as often as they like."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.epochs = 0
        self.state = self.empty()
        self.doubt_until_s = -math.inf
        self.coordinators = [Losses(), Losses()]
        self.told: list[Mark] = []
        self.backups: list[tuple[Mark, float]] = []
        #: What was told of the state that was lost, until that is noticed.
        self.lost: set[Mark] = set()
        self.doubts, self.losses = 0, 0

    def empty(self) -> Mark:
        self.epochs += 1
        return Mark(f"epoch {self.epochs}", 0)

    @rule(by=st.integers(1, 50))
    def grow(self, by: int) -> None:
        self.state = Mark(self.state.epoch, self.state.sequence + by)

    @rule()
    def tell(self) -> None:
        self.told.append(self.state)

    @rule()
    def back_up(self) -> None:
        self.backups.append((self.state, self.doubt_until_s))

    @rule(seconds=st.sampled_from([0.5, 3.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(index=st.integers(0, 7))
    def lose(self, index: int) -> None:
        """The state comes back older, or empty. What was told since then is wrong."""
        if self.now < self.doubt_until_s:
            return  # it is in doubt already
        before = self.state
        if index < len(self.backups):
            self.state, self.doubt_until_s = self.backups[index]
        else:
            self.state, self.doubt_until_s = self.empty(), -math.inf
        newer = {
            mark
            for mark in self.told
            if mark.epoch == before.epoch
            and (mark.epoch != self.state.epoch or mark.sequence > self.state.sequence)
        }
        self.losses += 1
        # An epoch that a coordinator has noted is one that it has doubted before.
        self.lost = {m for m in newer if not any(m.epoch in c._noted for c in self.coordinators)}

    @rule(which=st.integers(0, 1))
    def a_coordinator_starts_anew(self, which: int) -> None:
        self.coordinators[which] = Losses()

    @rule(index=st.integers(0, 200), which=st.integers(0, 1))
    def echo(self, index: int, which: int) -> None:
        if not self.told:
            return
        mark, losses = self.told[index % len(self.told)], self.coordinators[which]
        losses.begun(self.state.epoch)
        shown = losses.shown(self.now, mark, self.state, self.doubt_until_s)
        in_doubt = self.now < self.doubt_until_s
        # What came back may have grown past what it lost before a source could say so.
        newer = mark.sequence > self.state.sequence
        fresh = self.doubt_until_s == -math.inf and mark.epoch != self.state.epoch
        if mark in self.lost and (newer or fresh) and not in_doubt:
            assert shown, "a loss was not noticed"
        if not self.losses:
            assert not shown, "nothing was lost"
        if shown:
            losses.note(self.state.epoch)
            losses.note(mark.epoch)
            self.epochs += 1
            self.state = Mark(f"epoch {self.epochs}", self.state.sequence)
            self.doubt_until_s = self.now + LEASE_S
            self.lost = set()
            assert not losses.shown(self.now, mark, self.state, self.doubt_until_s)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)


def test_a_mark_that_is_replayed_makes_doubt_only_once() -> None:
    losses, old = Losses(), Mark("1", 1000)
    assert losses.shown(0.0, old, Mark("2", 0), -math.inf)
    losses.note("1")
    for now in (1.0, 10.0, 1e6):
        assert not losses.shown(now, old, Mark("3", 5), 5.0)


def test_one_that_comes_in_a_doubt_is_what_the_doubt_is_about() -> None:
    losses, old = Losses(), Mark("1", 1000)
    assert not losses.shown(1.0, old, Mark("3", 5), 5.0)
    assert not losses.shown(1000.0, old, Mark("3", 5), 5.0)


def test_an_epoch_that_is_there_again_may_be_lost_again() -> None:
    losses, old = Losses(), Mark("1", 1000)
    losses.note("1")
    losses.begun("1")
    assert losses.shown(0.0, old, Mark("2", 0), -math.inf)


def test_what_is_remembered_is_bounded() -> None:
    losses = Losses()
    for number in range(5000):
        losses.note(str(number))
    assert len(losses._noted) <= 1024
