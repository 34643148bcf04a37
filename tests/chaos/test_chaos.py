"""A bounded part of the campaign of `make chaos PULLS=N`, with fixed seeds."""

from __future__ import annotations

import pytest

from tests.chaos.play import Play
from tests.chaos.processes import Violation
from tests.chaos.run import Runner, places, play, site
from tests.chaos.schedule import Damage, Fault, PullSpec, Round, What, Wire, draw

PULLS = 100
SEED = 1
#: Rounds that once found a defect: a call of gRPC's that was never released; a pull that kept
#: connecting to a source that had lied, or that broke every connection; a pull that sent requests
#: to neighbours without a path to them.
REGRESSIONS = (1143, 1289, 1601, 258)

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.long]


@pytest.mark.timeout(240)
def test_every_pull_ends_with_right_bytes_or_a_typed_error() -> None:
    can = places()
    runner = Runner(PULLS, SEED, can, REGRESSIONS)
    play(runner, can)
    assert runner.failure is None, runner.failure
    assert runner.tally.pulls >= PULLS
    # A campaign in which every pull fails, or none, would show nothing.
    assert runner.tally.ends["whole"] > PULLS // 3
    assert len(runner.tally.ends) > 2
    assert runner.tally.retries


FLIPPED = Round(
    seed=0,
    place="loopback",
    model="one",
    pulls=(PullSpec("t0", 0.0, wires=(Wire(Damage.FLIP, "s0", offset=300_000, once=False),)),),
    faults=(),
)


@pytest.mark.timeout(120)
def test_without_verification_wrong_bytes_are_noticed() -> None:
    with (
        site("loopback", believe_everything=True) as here,
        pytest.raises(Violation, match="wrong bytes: t0 accepted model"),
    ):
        Play(here, FLIPPED).run()


def test_a_seed_means_the_same_round_everywhere() -> None:
    rounds = [draw(seed) for seed in range(300)]
    assert rounds == [draw(seed) for seed in range(300)]
    assert {round_.place for round_ in rounds} == {"loopback", "hosts"}
    for there, here in zip(rounds, (draw(seed, ["loopback"]) for seed in range(300)), strict=True):
        assert here.place == "loopback"
        assert here == there or there.place == "hosts"


def test_everything_is_drawn() -> None:
    rounds = [draw(seed) for seed in range(2000)]
    assert {fault.what for round_ in rounds for fault in round_.faults} == set(What)
    pulls = [pull for round_ in rounds for pull in round_.pulls]
    assert {wire.damage for pull in pulls for wire in pull.wires} == set(Damage)
    for flag in ("attach", "strong", "out", "full_disk", "hold", "command"):
        assert {getattr(pull, flag) for pull in pulls} == {False, True}


@pytest.mark.parametrize(
    ("fault", "must"),
    [
        (Fault(What.KILL, "s0", 0.1), True),
        (Fault(What.KILL, "t0", 0.1), False),
        (Fault(What.STOP, "c", 0.1, for_s=1.0), False),
        (Fault(What.STOP, "c", 0.1, for_s=1.0, reading=True), True),
    ],
)
def test_which_pulls_must_succeed(fault: Fault, must: bool) -> None:
    pull = PullSpec("t0", 0.0)
    assert Round(0, "loopback", "two", (pull,), (fault,)).must_succeed(pull) == must
    assert not Round(0, "loopback", "one", (pull,), (Fault(What.STOP, "s0", 0.1),)).must_succeed(
        pull
    )
