"""Several targets pull one model from one origin at a time: they exchange chunks; a failed target
costs chunks, not pulls. Shares are judged with a wide tolerance, times not at all."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from mx.errors import EXIT_INCOMPLETE, EXIT_NO_SOURCE
from tests.integration.lan import END_S, LAYER_NBYTES, ORIGIN, TARGETS, Lan, Pull, check, lan, pull

__all__ = ["lan", "pull"]  # fixtures

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("coordinated")]


def sources_of(report: dict[str, Any]) -> set[str]:
    return {path["source"].partition(":")[0] for path in report["paths"]}


def test_targets_exchange_chunks(lan: Lan, pull: Pull, tmp_path: Path) -> None:
    before = lan.sent(ORIGIN)
    commands = {host: pull(host) for host in TARGETS}
    reports = [check(lan, command, tmp_path / host) for host, command in commands.items()]
    # Each would have taken one whole model from it.
    assert lan.sent(ORIGIN) - before < 3 * lan.model_nbytes
    at = lan.links[ORIGIN].address(ORIGIN)
    assert all(sources_of(report) - {at} for report in reports)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_target_that_dies_or_stops_costs_the_others_little(
    lan: Lan, pull: Pull, tmp_path: Path, number: int
) -> None:
    before = lan.sent("t1")
    commands = {host: pull(host) for host in TARGETS}
    victim = commands.pop("t1")
    victim.until(lambda: lan.sent("t1") - before > 2 * LAYER_NBYTES, "something given")
    victim.signal(number)
    for host, command in commands.items():
        check(lan, command, tmp_path / host)


def test_sent_chunks_are_available_without_the_origin_and_the_coordinator(
    lan: Lan, pull: Pull, tmp_path: Path
) -> None:
    commands = {host: pull(host, "--hold") for host in TARGETS[:3]}
    first = commands["t0"]
    # Later than the others, so that it has much to get when the first one is through.
    commands["t0"].until(lambda: lan.sent("t0") > 4 * LAYER_NBYTES, "something given")
    late = pull("t3")
    late.until(lambda: lan.received("t3") > LAYER_NBYTES, "something received")
    first.json(END_S)
    lan.origin.signal(signal.SIGKILL)
    lan.daemon.signal(signal.SIGKILL)
    report = check(lan, late, tmp_path / "t3")
    assert sources_of(report) - {lan.links[ORIGIN].address(ORIGIN)}
    for command in commands.values():
        command.json(END_S)


def test_a_pull_does_not_wait_for_ever_for_chunks_that_no_peer_holds(lan: Lan, pull: Pull) -> None:
    # So that no peer holds all of it, however long this test looks: 45 MB come in 60 s.
    lan.hosts.throttle(lan.links[ORIGIN], 6, ORIGIN)
    commands = [pull(host) for host in TARGETS[:3]]
    commands[0].until(lambda: lan.sent("t0") > LAYER_NBYTES, "something given", 60)
    assert lan.sent(ORIGIN) < lan.model_nbytes
    lan.origin.signal(signal.SIGKILL)
    for command in commands:
        error = command.json(END_S)["error"]
        assert command.wait() in (EXIT_NO_SOURCE, EXIT_INCOMPLETE)
        assert "stopped after" in error["message"]
        assert "Traceback" not in command.err
