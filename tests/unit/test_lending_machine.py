"""The state of lent memory: its table, and that no change ever holds it for good."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.core.lending import TRANSITIONS, Lent, LentEvent, LentState

AT_REST = {Lent.LENT, Lent.WITHDRAWN, Lent.CLOSED}
#: What comes of itself, without the owner.
LOOP = {LentEvent.LEAVE, LentEvent.LIST, LentEvent.WITHDRAW, LentEvent.CLOSE}


def run(events: list[LentEvent]) -> tuple[LentState, list[tuple[Lent, LentEvent]]]:
    """Run those of the events that are possible; return the state, and what was done when."""
    state, done = LentState(), []
    for what in events:
        if (state.now, what) in TRANSITIONS:
            done.append((state.now, what))
            state.step(what, "a reason" if what is LentEvent.WITHDRAW else "")
        else:
            before = (state.now, state.why)
            with pytest.raises(ValueError, match="not possible"):
                state.step(what, "a reason")
            assert (state.now, state.why) == before
    return state, done


@given(st.lists(st.sampled_from(LentEvent)))
def test_withdrawn_has_a_reason_and_lent_has_none(events: list[LentEvent]) -> None:
    state, done = run(events)
    if state.now is Lent.WITHDRAWN:
        assert state.why
    if state.now is Lent.LENT:
        assert not state.why
    reached = [TRANSITIONS[each] for each in done]
    if Lent.CLOSED in reached:
        assert set(reached[reached.index(Lent.CLOSED) :]) == {Lent.CLOSED}


@given(st.lists(st.sampled_from(LentEvent)))
def test_the_owner_writes_only_after_readers_have_left(events: list[LentEvent]) -> None:
    state, done = run(events)
    if state.now is Lent.CHANGING:
        assert done[-1] == (Lent.ENTERING, LentEvent.OPEN)
        assert done[-2] in ((Lent.LENT, LentEvent.ENTER), (Lent.WITHDRAWN, LentEvent.ENTER))
    if state.now is Lent.LENT and done:  # it was hashed since
        (*_, before, last) = done
        assert last == (Lent.LEAVING, LentEvent.LIST) and before[1] is LentEvent.LEAVE


@pytest.mark.parametrize("state", Lent)
def test_a_change_comes_to_an_end_without_its_owner(state: Lent) -> None:
    found = {state}
    while (
        more := {
            after for (now, what), after in TRANSITIONS.items() if now in found and what in LOOP
        }
        - found
    ):
        found |= more
    assert found & AT_REST
    assert (state, LentEvent.CLOSE) in TRANSITIONS
    if state not in AT_REST:
        assert (state, LentEvent.WITHDRAW) in TRANSITIONS


def test_a_reason_is_needed() -> None:
    with pytest.raises(ValueError, match="reason"):
        LentState().step(LentEvent.WITHDRAW)
