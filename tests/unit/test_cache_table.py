"""What a cache holds and evicts, against a simple model."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mx.errors import CapacityError
from mx.fleet.cache_table import CacheTable

BUDGET = 100


def filled(*sizes: int) -> CacheTable[int]:
    table: CacheTable[int] = CacheTable(BUDGET)
    for model, nbytes in enumerate(sizes):
        assert table.reserve(model, nbytes, ()) == ()
        table.arrived(model)
    return table


def test_the_time_since_the_last_use() -> None:
    table: CacheTable[int] = CacheTable(BUDGET)
    table.reserve(0, 30, ())
    assert not table.use(0, 1.0)  # it arrives
    table.arrived(0, 2.0)
    assert table.idle_s(0, 5.0) == 3.0
    assert table.use(0, 4.0)
    assert (table.idle_s(0, 5.0), table.idle_s(0, 3.0)) == (1.0, 0.0)


def test_the_least_recently_used_leaves_first() -> None:
    table = filled(30, 30, 30)
    assert table.use(0)
    assert table.reserve(9, 40, ()) == (1,)
    assert [*table.held] == [2, 0]
    assert not table.use(9)  # it has not arrived
    table.arrived(9)
    assert [*table.held] == [2, 0, 9]


def test_what_processes_use_stays() -> None:
    table = filled(40, 40)
    assert table.reserve(9, 50, {0}) == (1,)
    with pytest.raises(CapacityError, match="2 models in it stay"):
        table.reserve(8, 60, {0})
    assert table.held == (0,)


def test_a_model_larger_than_the_cache_is_refused_and_evicts_nothing() -> None:
    table = filled(40, 40)
    with pytest.raises(CapacityError, match="the cache's memory is 100 B"):
        table.reserve(9, 101, ())
    assert table.held == (0, 1)


def test_memory_that_lingers_counts_until_it_is_gone() -> None:
    table = filled(60)
    assert table.reserve(1, 60, ()) == (0,)
    table.remove(1)
    table.linger(1000, 60)
    with pytest.raises(CapacityError, match="at most 40 B"):
        table.reserve(1, 60, ())
    table.gone(1000)
    assert table.reserve(1, 60, ()) == ()


def test_a_model_that_is_evicted_twice_lingers_twice() -> None:
    """Readers keep the memory of each time that it arrived."""
    table = filled(30)
    for memory in (1000, 1001):
        assert table.reserve(1, 100 - table.lingering_bytes, ()) == (0,)
        table.linger(memory, 30)
        table.remove(1)
        table.reserve(0, 30, ())
        table.arrived(0)
    assert table.lingering_bytes == 60
    with pytest.raises(CapacityError, match="at most 40 B"):
        table.reserve(1, 41, ())
    table.gone(1000)
    table.gone(1000)
    assert table.lingering == (1001,)
    assert table.lingering_bytes == 30


def test_the_number_of_models_has_a_bound() -> None:
    table: CacheTable[int] = CacheTable(BUDGET, most_models=2)
    for model in range(2):
        table.reserve(model, 1, ())
    with pytest.raises(CapacityError):
        table.reserve(2, 1, ())
    table.arrived(0)
    assert table.reserve(2, 1, ()) == (0,)


class Caching(RuleBasedStateMachine):
    """Reservations, arrivals, uses and losses in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.table: CacheTable[int] = CacheTable(BUDGET)
        self.held: list[int] = []  # least recently used first
        self.arriving: list[int] = []
        self.sizes: dict[int, int] = {}
        self.lingering: dict[int, int] = {}
        self.next = 0

    @rule(nbytes=st.integers(0, BUDGET + 1), used=st.sets(st.integers(0, 20)))
    def reserve(self, nbytes: int, used: set[int]) -> None:
        model, self.next = self.next, self.next + 1
        in_use = used & set(self.held)
        try:
            evicted = self.table.reserve(model, nbytes, in_use)
        except CapacityError:
            kept = sum(self.sizes[m] for m in self.held if m in in_use)
            kept += sum(self.sizes[m] for m in self.arriving)
            assert nbytes + kept + sum(self.lingering.values()) > BUDGET
            # Which were in use is noted only for a model that may fit.
            if nbytes <= BUDGET:
                self.held.sort(key=lambda m: m in in_use)
                self._as_table()
            return
        free = [m for m in self.held if m not in in_use]
        assert list(evicted) == free[: len(evicted)]
        self.held = [m for m in self.held if m not in evicted]
        self.arriving.append(model)
        self.sizes[model] = nbytes
        self._as_table()

    def _as_table(self) -> None:
        # The order among those in use is the set's.
        assert set(self.held) == set(self.table.held)
        self.held = list(self.table.held)

    @precondition(lambda self: self.arriving)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(self.arriving))
        self.arriving.remove(model)
        self.table.arrived(model)
        self.held.append(model)

    @precondition(lambda self: self.arriving)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(self.arriving))
        self.arriving.remove(model)
        self.table.remove(model)

    @rule(memory=st.integers(0, 3), nbytes=st.integers(0, 30))
    def linger(self, memory: int, nbytes: int) -> None:
        self.table.linger(memory, nbytes)
        self.lingering[memory] = nbytes

    @rule(memory=st.integers(0, 3))
    def gone(self, memory: int) -> None:
        self.table.gone(memory)
        self.lingering.pop(memory, None)

    @rule(model=st.integers(0, 20))
    def use(self, model: int) -> None:
        assert self.table.use(model) == (model in self.held)
        if model in self.held:
            self.held.remove(model)
            self.held.append(model)

    @invariant()
    def is_within_its_memory(self) -> None:
        assert self.table.held == tuple(self.held)
        assert self.table.nbytes == sum(self.sizes[m] for m in (*self.held, *self.arriving))
        assert self.table.nbytes <= BUDGET
        assert self.table.lingering_bytes == sum(self.lingering.values())


TestCaching = Caching.TestCase
