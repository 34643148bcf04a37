"""Coordinators that lie, and that have restarted and heard a stranger first."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mx import api
from mx.core.types import SourceRole
from mx.errors import ManifestError
from tests.hostile.site import CONFIG, END_S, SIDE_FILE, Started, Weights, failed, succeeded
from tests.support.commands import Command, Run, free_port, serve, start_coordinator

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(240)]

OWN_DIGESTS = {"bytes": "others", "digests": "own"}


@dataclass
class Restarted:
    """A coordinator that has restarted; its sources have not noticed. `honest` stands still; it
    was listed under the id `honest_id`."""

    run: Run
    start: Started
    coordinator: str
    honest: Command
    honest_id: str

    @classmethod
    def of(cls, run: Run, start: Started, weights: Weights, *, relay: bool = False) -> Restarted:
        port = free_port()
        coordinator, daemon = start_coordinator(run, port=port)
        honest = origin = serve(run, weights.folder, "m", coordinator)
        if relay:
            honest = run("pull", "m", "--coordinator", coordinator, "--hold", "--json")
            honest.until(lambda: "serving m at" in honest.err, "the model held", END_S)
            origin.signal(signal.SIGKILL)
            origin.wait()
        role = SourceRole.RELAY if relay else SourceRole.ORIGIN
        (known,) = (
            status.record.source_id
            for status in api.list_sources("m", coordinator=coordinator)
            if status.record.role is role
        )
        honest.signal(signal.SIGSTOP)
        daemon.signal(signal.SIGKILL)
        daemon.wait()
        start_coordinator(run, port=port)
        return cls(run, start, coordinator, honest, known)

    def pull(self, pin: str, out: Path) -> Command:
        """Let the honest source go on, and pull by its pin."""
        self.honest.signal(signal.SIGCONT)
        where = ("--coordinator", self.coordinator, "--out", str(out), "--transport", "tcp")
        return self.run("pull", f"m@{pin}", *where, "--json", "--wait", "30")


def other_weights(restarted: Restarted, others: Weights) -> None:
    serve(restarted.run, others.folder, "m", restarted.coordinator)


def garbage_layout(restarted: Restarted, others: Weights) -> None:
    """It is not listed: a coordinator decodes what it lists."""
    lies: dict[str, Any] = {"layout": "garbage", **OWN_DIGESTS}
    restarted.start.refused(ManifestError, restarted.coordinator, **lies)


def another_layout(restarted: Restarted, others: Weights) -> None:
    """Nor is this, although the layout describes the weights: one follows from them."""
    lies: dict[str, Any] = {"layout": "backwards", **OWN_DIGESTS}
    restarted.start.refused(ManifestError, restarted.coordinator, **lies)


def the_honest_id(restarted: Restarted, others: Weights) -> None:
    """It is in every listing."""
    restarted.start.liar(restarted.coordinator, source_id=restarted.honest_id, **OWN_DIGESTS)


@pytest.mark.parametrize(
    "stranger",
    [other_weights, garbage_layout, another_layout, the_honest_id],
    ids=lambda each: each.__name__,
)
def test_a_stranger_that_is_first_after_a_restart(
    run: Run,
    start: Started,
    weights: Weights,
    other_weights: Weights,
    tmp_path: Path,
    stranger: Callable[[Restarted, Weights], None],
) -> None:
    out = tmp_path / "out"
    restarted = Restarted.of(run, start, weights)
    stranger(restarted, other_weights)
    succeeded(restarted.pull(weights.pin, out), weights, out)
    assert (out / SIDE_FILE).read_bytes() == CONFIG


@pytest.mark.parametrize(
    "stranger", [garbage_layout, another_layout], ids=lambda each: each.__name__
)
def test_a_stranger_that_is_first_beside_a_relay(
    run: Run,
    start: Started,
    weights: Weights,
    other_weights: Weights,
    tmp_path: Path,
    stranger: Callable[[Restarted, Weights], None],
) -> None:
    out = tmp_path / "out"
    restarted = Restarted.of(run, start, weights, relay=True)
    stranger(restarted, other_weights)
    succeeded(restarted.pull(weights.identity, out), weights, out)


@pytest.mark.parametrize("named", ["identity", "pin"])
def test_a_coordinator_that_answers_a_pin_with_other_weights(
    run: Run, start: Started, weights: Weights, other_weights: Weights, tmp_path: Path, named: str
) -> None:
    coordinator = start.module("false_coordinator").json()["address"]
    serve(run, other_weights.folder, "m", coordinator)
    out, pinned = tmp_path / "out", f"m@{getattr(weights, named)}"
    pulling: tuple[Any, ...] = ("pull", pinned, "--coordinator", coordinator, "--json")
    failed(run(*pulling, "--out", str(out)), coordinator, out=out)


def test_a_coordinator_that_answers_a_pin_with_other_files(
    run: Run, start: Started, weights: Weights, other_files: Weights, tmp_path: Path
) -> None:
    coordinator = start.module("false_coordinator").json()["address"]
    serve(run, other_files.folder, "m", coordinator)
    with_files, alone = tmp_path / "with files", tmp_path / "alone"
    where = ("--coordinator", coordinator, "--json", "--out")
    failed(run("pull", f"m@{weights.pin}", *where, str(with_files)), coordinator, out=with_files)
    succeeded(run("pull", f"m@{weights.identity}", *where, str(alone)), weights, alone)
