"""Budgets: what is reserved, what one may have, and what the counts of a store make of them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.core.budget import MEMORY_BYTES, PRINCIPALS, Budget, BudgetShares, Limits, StoredBudget
from mx.core.memory_store import MemoryStore
from mx.core.store import CountedKind
from mx.errors import CapacityError

UNITS = 1280  # 10 for each of 64, and 640 for whoever comes


def both() -> list[Budget]:
    store = MemoryStore(lambda: 0.0)
    return [
        Budget(UNITS, "there are {} things"),
        StoredBudget(UNITS, "there are {} things", store, CountedKind.MODELS),
    ]


@pytest.mark.parametrize("budget", both(), ids=["here", "stored"])
def test_few_that_take_all_leave_the_shares_of_others(budget: Budget) -> None:
    assert budget.shares.reserved == 10 and budget.shares.most == 330
    budget.add("a", 330)
    with pytest.raises(CapacityError, match="330 things of a, its limit for one principal"):
        budget.add("a")
    budget.add("b", 330)
    for number in range(PRINCIPALS - 2):
        budget.add(str(number), 10)
        with pytest.raises(CapacityError, match="things, its limit$"):
            budget.check(str(number))
    with pytest.raises(CapacityError, match="1280 things, its limit$"):
        budget.check("the 65th")
    budget.take("a", -3)
    budget.add("the 65th", 3)
    assert budget.total == UNITS and not budget.fits("the 65th")


def test_a_unit_is_held_while_a_block_runs() -> None:
    budget = Budget(2, "there are {} streams")
    with pytest.raises(RuntimeError), budget.held("a"):
        assert budget.of("a") == 1 and not budget.fits("a")
        raise RuntimeError
    assert budget.total == 0 and budget.fits("a")


def test_limits_follow_from_the_memory() -> None:
    assert Limits.of(MEMORY_BYTES) == Limits()
    half = Limits.of(MEMORY_BYTES // 2, 100)
    assert half.models == Limits().models // 2 and half.request_nbytes == 100


@given(
    st.integers(0, 3000),
    st.lists(st.tuples(st.integers(0, 80), st.integers(-40, 60)), max_size=200),
)
def test_units_add_up_and_a_share_is_always_there(units: int, steps: list[tuple[int, int]]) -> None:
    budget, shares = Budget(units, "{}"), BudgetShares(units)
    store = MemoryStore(lambda: 0.0)
    stored = StoredBudget(units, "{}", store, CountedKind.SOURCES)
    held: Counter[str] = Counter()
    for number, more in steps:
        principal = str(number)
        more = max(more, -held[principal])
        assert budget.fits(principal, more) == stored.fits(principal, more)
        if more <= 0 or budget.fits(principal, more):
            for counted in (budget, stored):
                counted.take(principal, more)
            held[principal] += more
        assert budget.total == stored.total == held.total() <= units
        assert max(held.values(), default=0) <= shares.most
        holders = [each for each, count in held.items() if count]
        for each in (*holders[:PRINCIPALS], "new"):
            if held[each] < shares.reserved and len({*holders, each}) <= PRINCIPALS:
                assert budget.fits(each)
