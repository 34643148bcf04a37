"""Several targets pull one model from one origin at a time: they exchange chunks; a failed target
costs chunks, not pulls. Shares are judged with a wide tolerance, times not at all."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from benchmarks.checkpoints import write_checkpoint
from benchmarks.hosts import Hosts, Link, unavailable
from mx.errors import EXIT_INCOMPLETE, EXIT_NO_SOURCE, EXIT_OK
from tests.integration.conftest import HostCommand
from tests.integration.test_main_job import same

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("coordinated")]

ORIGIN = "origin"
TARGETS = ("t0", "t1", "t2", "t3")
MBIT_PER_S = 100
LAYERS = 24
LAYER_NBYTES = 2 << 20
END_S = 90.0


@dataclass
class Lan:
    """An origin and its coordinator, one process each, and hosts for targets around a switch."""

    hosts: Hosts
    links: dict[str, Link]
    weights: Path
    daemon: HostCommand
    origin: HostCommand

    @property
    def options(self) -> tuple[str, ...]:
        at = self.links[ORIGIN].address(ORIGIN)
        return ("--coordinator", f"{at}:7600", "--insecure", "--json", "--transport", "tcp")

    def listen(self, host: str) -> tuple[str, str]:
        return ("--listen", f"{self.links[host].address(host)}:0")

    def sent(self, host: str) -> int:
        return self.hosts.sent_nbytes(self.links[host], host)

    def received(self, host: str) -> int:
        return self.hosts.sent_nbytes(self.links[host], self.links[host].b)

    @property
    def model_nbytes(self) -> int:
        return LAYERS * LAYER_NBYTES


@pytest.fixture
def lan(tmp_path: Path) -> Iterator[Lan]:
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    weights = tmp_path / "model.safetensors"
    shapes = {
        f"model.layers.{n}.mlp.up_proj.weight": (1024, LAYER_NBYTES // 2048) for n in range(LAYERS)
    }
    write_checkpoint(weights, shapes)
    with Hosts() as hosts, contextlib.ExitStack() as started:
        names = (ORIGIN, *TARGETS)
        links = hosts.star(names, up_mbit_per_s=MBIT_PER_S, down_mbit_per_s=MBIT_PER_S)
        at = links[ORIGIN].address(ORIGIN)
        daemon = HostCommand(hosts, ORIGIN, "--listen", f"{at}:7600", "--insecure", daemon=True)
        started.callback(daemon.end)
        daemon.until(lambda: "listens" in daemon.err, "listening")
        control = ("--coordinator", f"{at}:7600", "--insecure", "--json")
        serving = ("serve", str(weights), "--model", "m", "--listen", f"{at}:0", *control)
        origin = HostCommand(hosts, ORIGIN, *serving)
        started.callback(origin.end)
        origin.json()
        yield Lan(hosts, links, weights, daemon, origin)


Pull = Callable[..., HostCommand]


@pytest.fixture
def pull(lan: Lan, tmp_path: Path) -> Iterator[Pull]:
    """Begin to pull in a host, into `tmp_path`/HOST."""
    started: list[HostCommand] = []

    def start(host: str, *more: str) -> HostCommand:
        out = ("--out", str(tmp_path / host))
        started.append(
            HostCommand(lan.hosts, host, "pull", "m", *out, *lan.listen(host), *lan.options, *more)
        )
        return started[-1]

    yield start
    for command in started:
        command.end()


def sources_of(report: dict[str, Any]) -> set[str]:
    return {path["source"].partition(":")[0] for path in report["paths"]}


def check(lan: Lan, command: HostCommand, out: Path) -> dict[str, Any]:
    report = command.json(END_S)
    assert command.wait() == EXIT_OK, command.err
    assert same(load_file(out / "model.safetensors"), load_file(lan.weights))
    assert sum(path["bytes"] for path in report["paths"]) == lan.model_nbytes
    return report


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
    commands = [pull(host) for host in TARGETS[:3]]
    commands[0].until(lambda: lan.sent("t0") > LAYER_NBYTES, "something given")
    assert lan.sent(ORIGIN) < lan.model_nbytes  # so that no peer holds all of it
    lan.origin.signal(signal.SIGKILL)
    for command in commands:
        error = command.json(END_S)["error"]
        assert command.wait() in (EXIT_NO_SOURCE, EXIT_INCOMPLETE)
        assert "stopped after" in error["message"]
        assert "Traceback" not in command.err
