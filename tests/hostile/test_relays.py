"""Pulls that pass on other bytes than they have verified, in a swarm and after it."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from mx.errors import EXIT_INTEGRITY
from tests.hostile.site import Started, Weights, failed, left, succeeded
from tests.support.commands import Run, environment, serve, start_coordinator

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(240)]

COORDINATED = environment(MX_PEER_COORDINATED_READING="always")
MISMATCH = "match the model's identity"
#: Slow enough that relays have something to give.
SLOW = ("--max-bandwidth", "2MB/s")


@pytest.mark.parametrize(
    "lies",
    [
        {"bytes": "forged"},
        {"bytes": "others", "truths": 3},
        {"bytes": "others", "boasts": True},
    ],
    ids=["forged", "after the truth", "boasting"],
)
def test_a_relay_that_lies_while_it_receives(
    run: Run, start: Started, weights: Weights, lies: Any
) -> None:
    coordinator, _ = start_coordinator(run)
    serve(run, weights.folder, "m", coordinator, *SLOW)
    here: dict[str, Any] = {"model": f"m@{weights.identity}", "coordinator": coordinator}
    liar = start.module("relay", COORDINATED, **here, **lies).json()["endpoint"]
    options: dict[str, Any] = {"transport": "tcp", "attach": False, "right": weights.hashes}
    pull = start.module("puller", COORDINATED, **here, **options)
    report = succeeded(pull, weights)
    assert report["retries"] > 0  # it has read from the liar
    assert MISMATCH in left(report)[liar]


@pytest.mark.parametrize(
    ("how", "way"),
    [
        pytest.param("forged", {"transport": "tcp"}, id="forged"),
        pytest.param("forged", {"attach": False, "verify": "strong"}, id="forged, copied"),
        pytest.param("others", {"verify": "strong"}, id="attached"),
    ],
)
def test_a_relay_that_lies_when_it_has_everything(
    run: Run, start: Started, weights: Weights, how: str, way: dict[str, Any]
) -> None:
    coordinator, _ = start_coordinator(run)
    origin = serve(run, weights.folder, "m", coordinator)
    here: dict[str, Any] = {"model": f"m@{weights.identity}", "coordinator": coordinator}
    liar = start.module("relay", **here, bytes=how, hold=True).json()["endpoint"]
    here |= {"right": weights.hashes, **way}
    report = succeeded(start.module("puller", **here), weights)
    assert MISMATCH in left(report)[liar]
    origin.signal(signal.SIGKILL)
    origin.wait()
    failed(start.module("puller", **here), liar, MISMATCH, code=EXIT_INTEGRITY)


def test_a_relay_passes_on_nothing_that_it_has_not_verified(
    run: Run, start: Started, weights: Weights
) -> None:
    """A process of this user is believed for oneself alone: others would blame the relay."""
    coordinator, _ = start_coordinator(run)
    liar = start.liar(coordinator, bytes="forged")
    pinned = f"m@{weights.identity}"
    where = ("--coordinator", coordinator, "--from", f"peer={liar}", "--json")
    failed(run("pull", pinned, *where, "--hold"), liar, MISMATCH, code=EXIT_INTEGRITY)
