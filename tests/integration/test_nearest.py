"""Hosts that have a copy of their own read that one, whoever else reads what over the links."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from mx.errors import EXIT_OK
from tests.integration.lan import TARGETS, Lan, Pull, check, lan, pull
from tests.support.commands import HostCommand

__all__ = ["lan", "pull"]  # fixtures

pytestmark = [pytest.mark.integration, pytest.mark.long]

#: So slow that pulls find each other long before their end, and faster than a share of the link.
RATE = "16MB"
#: Of a model's bytes, what a host that has a copy may get over its link, control and all.
MOST = 0.02


@pytest.fixture
def copies(lan: Lan) -> Iterator[dict[str, HostCommand]]:
    """A whole source in each target's host, at its own address."""
    found: dict[str, HostCommand] = {}
    control = [each for each in lan.options if each not in ("--transport", "tcp")]
    with contextlib.ExitStack() as started:
        for host in TARGETS:
            serving = ("serve", str(lan.weights), "--model", "m", *lan.listen(host))
            limited = ("--max-bandwidth", RATE)
            found[host] = HostCommand(lan.hosts, host, *serving, *limited, *control)
            started.callback(found[host].end)
        for source in found.values():
            source.json()
        yield found


def test_each_host_reads_its_own_copy(
    lan: Lan, copies: dict[str, HostCommand], pull: Pull, tmp_path: Path
) -> None:
    before = {host: lan.received(host) for host in TARGETS}
    pulls = {host: pull(host) for host in TARGETS}
    for host, command in pulls.items():
        report = check(lan, command, tmp_path / host)
        at = lan.links[host].address(host)
        assert [path["source"].rpartition(":")[0] for path in report["paths"]] == [at]
    for host in TARGETS:
        assert lan.received(host) - before[host] < MOST * lan.model_nbytes, host


def test_where_the_own_copy_ends_others_are_read(
    lan: Lan, copies: dict[str, HostCommand], pull: Pull, tmp_path: Path
) -> None:
    pulls = {host: pull(host) for host in TARGETS}
    first = TARGETS[0]
    pulls[first].until(lambda: "layer" in pulls[first].err, "bytes")
    copies[first].process.kill()
    for host, command in pulls.items():
        report = command.json(90.0)
        assert command.wait() == EXIT_OK, command.err
        assert sum(path["bytes"] for path in report["paths"]) >= lan.model_nbytes
        own = lan.links[host].address(host)
        others = [path for path in report["paths"] if not path["source"].startswith(own)]
        assert bool(others) is (host == first)
