"""Sources that lie about where they are, between real processes on hosts of their own: they attract
no more than what is measured, and nothing is dialled on their word."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from benchmarks.hosts import Hosts, Link
from mx import discovery
from mx.errors import EXIT_NO_SOURCE, EXIT_OK
from tests.support.commands import RunIn, environment
from tests.support.daemon import ROOT
from tests.support.lying import LAYER_NBYTES, LAYERS
from tests.support.outcomes import until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

NBYTES = LAYERS * LAYER_NBYTES
FIRST_ID = "00000000-0000-4000-8000-000000000000"  # first among equals
END_S = 120.0
#: As in the links' /24.
PREFIX = 24


class Helper:
    """`tests.integration.liar` in a host; `lines` are what it printed."""

    def __init__(self, hosts: Hosts, host: str, *arguments: str) -> None:
        command = [sys.executable, "-m", "tests.integration.liar", *arguments]
        environ = environment(PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'transports'}")
        self._process = hosts.start(host, command, env=environ, stdout=subprocess.PIPE)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        until(lambda: self.lines, f"line of {arguments}", END_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.decode().strip())

    def end(self) -> None:
        self._process.kill()
        self._process.wait(30)
        self._reader.join(30)

    @property
    def connections(self) -> int:
        return self.lines.count("connected")


@dataclass
class Site:
    """Four hosts in one subnet; the coordinator is on "honest"."""

    hosts: Hosts
    links: dict[str, Link]
    coordinator: str
    helpers: list[Helper]

    def address(self, host: str) -> str:
        return self.links[host].address(host)

    def serve(self, host: str, **lies: Any) -> str:
        """Start a source on this host; return its endpoint."""
        at = (self.coordinator, self.address(host), json.dumps(lies))
        return self._help(host, "serve", *at).lines[0]

    def count(self, host: str, address: str | None = None) -> tuple[str, int, Helper]:
        """Return a port there that must get no connection."""
        address = address or self.address(host)
        counter = self._help(host, "count", address)
        return address, int(counter.lines[0]), counter

    def _help(self, host: str, *arguments: str) -> Helper:
        self.helpers.append(Helper(self.hosts, host, *arguments))
        return self.helpers[-1]

    @property
    def options(self) -> tuple[str, ...]:
        return ("--coordinator", self.coordinator, "--insecure", "--json")


@pytest.fixture
def site(hosts: Hosts, run_in: RunIn) -> Iterator[Site]:
    rates = {"liar": 20.0, "honest": 400.0}
    links = hosts.star(["honest", "liar", "target", "third"], up_mbit_per_s={
        "target": 1000.0, "third": 1000.0, **rates})  # fmt: skip
    coordinator = f"{links['honest'].address('honest')}:7600"
    daemon = run_in("honest", "--listen", coordinator, "--insecure", daemon=True)
    daemon.until(lambda: "listens" in daemon.err, "listening")
    made = Site(hosts, links, coordinator, [])
    yield made
    for helper in made.helpers:
        helper.end()


def as_if_in(site: Site, host: str) -> dict[str, Any]:
    """Return the fields of a place by which a process in this host is known to share its memory."""
    namespace = os.stat(f"/run/netns/{site.hosts.namespace(host)}").st_ino
    return {"hostname": discovery.here().hostname, "net_namespace": namespace}


def fast_nic(address: str) -> dict[str, Any]:
    return {"name": "eth0", "state": "up", "addresses": [f"{address}/{PREFIX}"],
            "speed_mbit_per_s": 8_000_000}  # fmt: skip


def test_a_claim_to_be_here_ranks_no_better_than_the_network(site: Site, run_in: RunIn) -> None:
    """The liar claims the target's kernel, network and user and 8 Tbit/s; its link is slow."""
    honest = site.serve("honest")
    place = {**as_if_in(site, "target"), "nics": [fast_nic(site.address("liar"))]}
    liar = site.serve("liar", place=place, source_id=FIRST_ID)
    planned = run_in("target", "plan", "m", *site.options).json(END_S)
    paths = {(path["source"], path["transport"]): path for path in planned["paths"]}
    assert paths[liar, "shm"]["use"] == "impossible"
    assert not any(path.get("attach") for path in planned["paths"])
    assert paths[liar, "tcp"]["gb_per_s"] <= paths[honest, "tcp"]["gb_per_s"]
    pull = run_in("target", "pull", "m", *site.options)
    report = pull.json(END_S)
    assert pull.wait(END_S) == EXIT_OK
    carried = dict.fromkeys((honest, liar), 0)
    for path in report["paths"]:
        assert path["transport"] == "tcp"
        carried[path["source"]] += path["bytes"]
    assert sum(carried.values()) == NBYTES
    assert carried[liar] < carried[honest]  # its link has a twentieth of the other's speed


def lies_about(site: Site, ports: list[tuple[str, int]]) -> dict[str, Any]:
    """Data at these ports, and interfaces that have their addresses."""
    nics = [fast_nic(address) for address in dict.fromkeys(address for address, _ in ports)]
    nics = [{**nic, "name": f"eth{number}"} for number, nic in enumerate(nics)]
    return {
        "place": {"nics": nics, "addresses": [address for address, _ in ports]},
        "addresses": ports,
        "source_id": FIRST_ID,
    }


@pytest.mark.parametrize(
    "beside_an_honest_one",
    [pytest.param(True, id="beside"), pytest.param(False, id="alone", marks=pytest.mark.long)],
)
def test_no_port_of_a_third_party_is_dialled(
    site: Site, run_in: RunIn, beside_an_honest_one: bool
) -> None:
    honest = site.serve("honest") if beside_an_honest_one else ""
    counters = [
        site.count("third"),
        site.count("target", "127.0.0.1"),
        site.count("target"),
        site.count("honest"),
    ]
    liar = site.serve("liar", **lies_about(site, [(a, port) for a, port, _ in counters]))
    pull = run_in("target", "pull", "m", *site.options, "--transport", "tcp")
    if honest:
        report = pull.json(END_S)
        assert pull.wait(END_S) == EXIT_OK
        assert {path["source"] for path in report["paths"]} == {honest}
        assert sum(path["bytes"] for path in report["paths"]) == NBYTES
    else:
        assert pull.wait(END_S) == EXIT_NO_SOURCE
        assert "proved" in pull.err and liar in pull.err
    assert [counter.connections for _, _, counter in counters] == [0, 0, 0, 0]


def test_an_address_that_is_proved_is_read_from(hosts: Hosts, run_in: RunIn) -> None:
    """Control by one link, data by another: the second address proves itself."""
    control, data = (hosts.link("near", "far") for _ in range(2))
    at = control.address("near")
    daemon = run_in("near", "--listen", f"{at}:7600", "--insecure", daemon=True)
    daemon.until(lambda: "listens" in daemon.err, "listening")
    site = Site(hosts, {"near": control}, f"{at}:7600", [])
    counter = Helper(hosts, "near", "count", data.address("near"))
    try:
        endpoint = site.serve("near")
        pull = run_in("far", "pull", "m", *site.options, "--nics", data.device("far"))
        (path,) = pull.json(END_S)["paths"]
        assert pull.wait(END_S) == EXIT_OK
        assert (path["source"], path["bytes"]) == (endpoint, NBYTES)
        assert path["rail"] == f"{data.device('far')}→{data.device('near')}"
        assert counter.connections == 0
    finally:
        for helper in (counter, *site.helpers):
            helper.end()
