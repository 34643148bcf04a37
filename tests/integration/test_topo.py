"""`mx topo` as people and scripts see it: alone, with sources, and between two hosts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import mx
from benchmarks.hosts import Hosts
from mx import config
from tests.support.commands import Run, RunIn, serve

pytestmark = pytest.mark.integration


def test_this_machine_whatever_it_lacks(run: Run) -> None:
    command = run("topo", "--json")
    assert command.wait() == 0
    found = command.json()
    assert found["place"]["pid"] == command.process.pid
    assert found["place"]["boot_id"]
    assert found["devices"][0] == "cpu"
    assert set(found["transports"]) >= {"shm", "tcp"}
    assert all(each["works"] or each["reason"] for each in found["transports"].values())
    (own,) = [e for e in found["matrix"] if (e["target"], e["source"]) == ("cpu", "cpu")]
    assert own["paths"][0]["transport"] == "shm"
    assert own["paths"][0]["attach"]
    assert found["sources"] == []
    if not Path("/proc/driver/nvidia").exists():
        assert "no NVIDIA driver" in found["missing"]["gpus"]

    plain = run("topo")
    assert plain.wait() == 0
    for title in ("NUMA nodes", "Network interfaces", "GPUs", "Transports", "From (columns)"):
        assert title in plain.out
    assert plain.err == ""


def test_sources_are_shown_with_the_way_to_them(
    run: Run, coordinator: str, checkpoint: Path, settings: config.Settings
) -> None:
    at = ("--coordinator", coordinator)
    empty = run("topo", "--sources", *at)
    assert empty.wait() == 0
    assert "Sources: the coordinator lists none\n" in empty.out
    unknown = run("topo", "nosuch", *at)
    assert unknown.wait() == 0
    assert "Sources: the coordinator lists none of nosuch\n" in unknown.out
    source = serve(run, checkpoint, "small", coordinator)
    endpoint = json.loads(source.out)["endpoint"]
    found = run("topo", "--sources", "small", *at, "--json").json()["sources"]
    assert [(each["endpoint"], each["device"]) for each in found] == [(endpoint, "cpu")]
    best = found[0]["paths"][0]
    assert (best["target"], best["transport"], best["chosen"]) == ("cpu", "shm", True)
    assert not any(path["chosen"] for path in found[0]["paths"][1:] if path["target"] == "cpu")

    report = mx.topology(sources=True, coordinator=coordinator, settings=settings)
    assert report.sources[0].record.endpoint == endpoint
    assert report.sources[0].plans["cpu"].chosen[0].attach
    text = repr(report)
    assert re.fullmatch(r"<TopologyReport: \d+ interfaces?, \d+ GPUs?, .*, 1 source>", text), text
    assert len(text) < 200


def test_a_coordinator_that_is_not_there_is_an_error_only_if_it_was_asked_for(run: Run) -> None:
    none_opened = ("--coordinator", "127.0.0.1:9")
    assert run("topo", *none_opened).wait() == 0
    asked = run("topo", "--sources", *none_opened, "--json")
    assert asked.wait() == 3
    assert "127.0.0.1:9" in asked.json()["error"]["message"]


@pytest.mark.parametrize("verb", [("topo",), ("plan", "m"), ("pull", "m")])
def test_an_interface_that_is_not_there_is_a_usage_error(
    run: Run, coordinator: str, verb: tuple[str, ...]
) -> None:
    command = run(*verb, "--coordinator", coordinator, "--nics", "nope0", "--json")
    assert command.wait() == 2
    assert "nope0" in command.json()["error"]["message"]
    assert "Traceback" not in command.err


def test_between_two_hosts_the_rail_is_named(hosts: Hosts, run_in: RunIn, checkpoint: Path) -> None:
    link = hosts.link("near", "far")
    source, target = link.addresses
    at = ("--coordinator", f"{source}:7600", "--insecure")
    daemon = run_in("near", "--listen", f"{source}:7600", "--insecure", daemon=True)
    daemon.until(lambda: "listens" in daemon.err, "listening")
    serving = ("serve", str(checkpoint), "--model", "m", "--listen", f"{source}:0")
    run_in("near", *serving, *at, "--json").json()
    found = run_in("far", "topo", "--sources", *at, "--json").json()
    (nic,) = found["place"]["nics"]
    assert nic["name"] == link.device("far")
    assert nic["addresses"] == [f"{target}/30"]
    assert found["place"]["addresses"] == [target]
    paths = found["sources"][0]["paths"]
    assert paths[0]["transport"] == "tcp"
    assert paths[0]["rail"] == f"{link.device('far')}→{link.device('near')}"
    plain = run_in("far", "topo", "--sources", *at)
    assert plain.wait() == 0
    assert f"tcp {nic['name']}→" in plain.out
