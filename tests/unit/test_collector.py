"""Pauses of the garbage collector nest, and end as they began."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from mx.memory import collector
from mx.memory.collector import paused


@pytest.fixture(autouse=True)
def nothing_of_the_suite_is_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process of its own (tests/conftest.py freezes what it has collected)."""
    monkeypatch.setattr(collector, "_frozen", False)
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    if frozen:
        gc.freeze()


def test_pauses_nest_and_end() -> None:
    assert gc.isenabled()
    with paused():
        with paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_collector_that_was_disabled_stays_so() -> None:
    gc.disable()
    try:
        with paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_child_that_is_forked_in_a_pause_collects() -> None:
    with paused():
        child = os.fork()
        if not child:
            os._exit(0 if gc.isenabled() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not gc.isenabled()


@pytest.mark.skipif(
    gc.get_freeze_count() > 0, reason="Python 3.12 has frozen objects of its own, which stay so"
)
def test_what_is_made_in_a_pause_counts_as_old() -> None:
    with paused():
        made: list[list[object]] = [[] for _ in range(10)]
    old = set(map(id, gc.get_objects(generation=2)))
    assert all(id(each) in old for each in made)


def test_what_the_caller_has_frozen_stays_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with paused():
            pass
        assert gc.get_freeze_count() > frozen // 2 > 0
    finally:
        gc.unfreeze()


def test_frozen_objects_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """That looks at each of them."""
    counted: list[int] = []

    def count() -> int:
        counted.append(1)
        return 5

    monkeypatch.setattr(gc, "get_freeze_count", count)
    for _ in range(3):
        with paused():
            pass
    assert len(counted) == 1
