"""Peers that request slots and read nothing: they may delay the pulls of others, not stop them."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.lan import ORIGIN, Lan, Pull, check, lan, pull
from tests.support.commands import HostCommand

__all__ = ["lan", "pull"]  # fixtures

pytestmark = [
    pytest.mark.integration,
    pytest.mark.long,
    pytest.mark.usefixtures("coordinated"),
    pytest.mark.timeout(300),
]


class Hogging(HostCommand):
    """Hostile peers in a host."""

    def command(self, entry: str) -> list[str]:
        return [*self.prefix, sys.executable, "-m", "tests.integration.slot_hog"]

    def reports(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines(keepends=True) if "\n" in line]

    def slots(self) -> int:
        """Return how many slots they were given so far."""
        return sum(line.get("got") == "allow" for line in self.reports())

    def withdrawn(self) -> set[tuple[str, str, int]]:
        """Return the slots that were given, by (source, id, chunk), and withdrawn."""
        given: set[tuple[str, str, int]] = set()
        back = set()
        for line in self.reports():
            if "got" not in line:
                continue
            slot = line["source"], line["id"], line["chunk"]
            if line["got"] == "allow":
                given.add(slot)
            elif slot in given:
                back.add(slot)
        return back


Hog = Callable[..., Hogging]


@pytest.fixture
def hog(lan: Lan) -> Iterator[Hog]:
    """Begin to hog from a host, and wait for the first slots."""
    started: list[Hogging] = []

    def start(host: str, *more: str, slots: int = 2) -> Hogging:
        at = lan.links[ORIGIN].address(ORIGIN)
        command = Hogging(lan.hosts, host, "--coordinator", f"{at}:7600", *more)
        started.append(command)
        command.until(lambda: command.slots() >= slots, "slots given")
        return command

    yield start
    for command in started:
        assert command.process.poll() is None, command.err
        command.signal(signal.SIGTERM)
        command.end()


@pytest.mark.parametrize(
    "more",
    [(), ("--streams", "6"), ("--ids", "12")],
    ids=["one", "many_streams_of_one_id", "many_ids_of_one_address"],
)
def test_slots_are_withdrawn_from_peers_that_do_not_read(
    lan: Lan, pull: Pull, hog: Hog, tmp_path: Path, more: tuple[str, ...]
) -> None:
    hostile = hog("t0", *more)
    commands = {host: pull(host) for host in ("t1", "t2")}
    for host, command in commands.items():
        check(lan, command, tmp_path / host)
    assert hostile.withdrawn()


def test_pulls_on_the_host_of_the_hogs_complete(
    lan: Lan, pull: Pull, hog: Hog, tmp_path: Path
) -> None:
    """They share its address, as behind a NAT."""
    hostile = hog("t0", "--ids", "8")
    commands = {host: pull(host) for host in ("t0", "t1")}
    for host, command in commands.items():
        check(lan, command, tmp_path / host)
    assert hostile.withdrawn()


def test_suggestions_that_are_accepted_and_not_fetched_go_to_others(
    lan: Lan, pull: Pull, hog: Hog, tmp_path: Path
) -> None:
    hog("t0", "--ids", "12", "--mute", slots=0)
    commands = {host: pull(host) for host in ("t1", "t2", "t3")}
    for host, command in commands.items():
        check(lan, command, tmp_path / host)
