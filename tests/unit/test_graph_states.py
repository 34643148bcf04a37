"""The states of a graph on its way into an engine."""

from __future__ import annotations

import itertools

from mx.graphs.states import Cause, GraphProgress, GraphStep, Reason, State

ONE, OTHER = Reason(Cause.GOLDEN, "other bytes"), Reason(Cause.DRIVER, "lost")


def test_every_way_through() -> None:
    """Every sequence of five steps ends where its documentation says."""
    for steps in itertools.product(GraphStep, repeat=5):
        progress = GraphProgress()
        proved = False
        for step in steps:
            before = progress.state
            possible = progress.may(step)
            assert progress.take(step) == possible
            assert possible or progress.state is before
            proved |= progress.state is State.PROVED
            assert proved or progress.state is not State.LAUNCHED
            if before in (State.REFUSED, State.CLOSED):
                assert progress.state in (before, State.CLOSED)
            if before is State.LAUNCHED:
                assert progress.state is not State.PROVED
        assert (progress.state is State.CLOSED) == (GraphStep.CLOSE in steps)


def test_the_first_reason_stays() -> None:
    progress = GraphProgress()
    assert progress.refuse(ONE) and not progress.refuse(OTHER)
    assert progress.reason is ONE and progress.state is State.REFUSED
    assert not any(
        progress.may(step) for step in (GraphStep.RESTORE, GraphStep.PROVE, GraphStep.LAUNCH)
    )
    assert str(ONE) == "golden: other bytes"


def test_a_closed_one_is_not_refused() -> None:
    progress = GraphProgress()
    assert progress.take(GraphStep.CLOSE)
    assert not progress.refuse(ONE) and progress.reason is None
