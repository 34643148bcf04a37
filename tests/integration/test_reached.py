"""The address that a source is registered with is one that others reach."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from benchmarks.hosts import Hosts
from tests.support.commands import HostCommand, Run, RunIn, free_port
from tests.support.tensors import same

#: Many processes, one after the other, on a machine that may be busy.
pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


class Site:
    """A coordinator on one host; `base` is what its users on others say."""

    def __init__(self, hosts: Hosts, run_in: RunIn) -> None:
        self.link = hosts.link("near", "far", mbit_per_s=400, back_mbit_per_s=400)
        self.near, self.far = self.link.addresses
        self.coordinator = f"{self.near}:7600"
        self.base = ("--coordinator", self.coordinator, "--insecure", "--json")
        daemon = run_in("near", "--listen", self.coordinator, "--insecure", daemon=True)
        daemon.until(lambda: "listens" in daemon.err, "listening")
        self.run_in = run_in

    def endpoints(self) -> set[str]:
        listed = self.run_in("near", "sources", *self.base).json()["sources"]
        return {str(source["endpoint"]) for source in listed}

    def serve(self, host: str, checkpoint: Path, *more: str) -> HostCommand:
        return self.run_in(host, "serve", str(checkpoint), "--model", "m", *more, *self.base)


@pytest.fixture
def site(hosts: Hosts, run_in: RunIn) -> Site:
    return Site(hosts, run_in)


def refusal(command: HostCommand) -> str:
    """What a command says that ends with 2."""
    assert command.wait(60) == 2, command.err
    error = json.loads(command.out)["error"]
    assert error["type"] == "ConfigError"
    return str(error["message"] + error["hint"])


def test_loopback_is_not_registered_elsewhere(site: Site, checkpoint: Path) -> None:
    """Also not by a pull that is to hold; the refusal names what would be right."""
    said = refusal(site.serve("far", checkpoint))
    assert f"--listen {site.far}:0" in said
    assert "--advertise" in said
    assert f"--listen {site.far}:0" in refusal(
        site.run_in("far", "pull", "m", "--hold", *site.base)
    )
    advertised = site.serve("far", checkpoint, "--advertise", "127.0.0.1:7601")
    assert "127.0.0.1:7601" in refusal(advertised)
    wildcard = site.serve("far", checkpoint, "--advertise", "0.0.0.0:7601")
    assert "0.0.0.0:7601" in refusal(wildcard)
    # The coordinator's own machine is not an exception: others ask it too.
    assert f"--listen {site.near}:0" in refusal(site.serve("near", checkpoint))
    assert site.endpoints() == set()


def test_a_wildcard_is_registered_as_the_address_towards_the_coordinator(
    hosts: Hosts, site: Site, checkpoint: Path
) -> None:
    hosts.link("far", "other")  # an interface more, which does not lead there
    source = site.serve("far", checkpoint, "--listen", "0.0.0.0:0")
    assert source.json()["endpoint"].startswith(f"{site.far}:")
    assert site.endpoints() == {source.json()["endpoint"]}


def test_a_plain_pull_works_and_says_once_that_it_passes_nothing_on(
    site: Site, large_checkpoint: Path, tmp_path: Path
) -> None:
    source = site.serve("near", large_checkpoint, "--listen", f"{site.near}:0")
    source.json()
    alone = site.run_in("far", "pull", "m", *site.base)
    alone.until(lambda: "passes nothing on" in alone.err, "warning")
    assert site.endpoints() == {source.json()["endpoint"]}
    alone.json(240)
    assert alone.wait() == 0
    assert alone.err.count("passes nothing on") == 1


_FORWARD = """
import socket, sys, threading
def pipe(one, other):
    try:
        while data := one.recv(1 << 16):
            other.sendall(data)
    except OSError:
        pass
    for end in (one, other):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
def forward(listener, target):
    while True:
        near, _ = listener.accept()
        far = socket.create_connection(target)
        for ends in ((near, far), (far, near)):
            threading.Thread(target=pipe, args=ends, daemon=True).start()
outside, inside, *ports = sys.argv[1:]
for port in map(int, ports):
    listener = socket.create_server((outside, port), backlog=64)
    threading.Thread(target=forward, args=(listener, (inside, port)), daemon=True).start()
print("forwarding", flush=True)
threading.Event().wait()
"""


def test_a_source_behind_address_translation_is_read(
    hosts: Hosts, run_in: RunIn, checkpoint: Path, tmp_path: Path
) -> None:
    """Nothing outside has a route to the source: a gateway publishes two of its ports."""
    towards_inside, inside = hosts.link("gateway", "inside").addresses
    outside, reader = hosts.link("gateway", "outside").addresses
    daemon = run_in("gateway", "--listen", "0.0.0.0:7600", "--insecure", daemon=True)
    daemon.until(lambda: "listens" in daemon.err, "listening")
    hosts.start("gateway", [sys.executable, "-c", _FORWARD, outside, inside, "7601", "7602"])
    serving = ("serve", str(checkpoint), "--model", "m", "--listen", "0.0.0.0:7601", "--insecure")
    published = ("--advertise", f"{outside}:7601", "--data-ports", "7602")
    source = run_in(
        "inside", *serving, *published, "--coordinator", f"{towards_inside}:7600", "--json"
    )
    assert source.json()["endpoint"] == f"{outside}:7601"
    base = ("--insecure", "--json", "--listen", f"{reader}:0")
    for number, where in enumerate(
        (("--coordinator", f"{outside}:7600"), ("--from", f"peer={outside}:7601"))
    ):
        out = tmp_path / f"out{number}"
        report = run_in("outside", "pull", "m", "--out", str(out), *where, *base).json()
        (path,) = report["paths"]
        assert (path["transport"], path["source"]) == ("tcp", f"{outside}:7601")
        assert same(load_file(out / "model.safetensors"), load_file(checkpoint))


def test_the_coordinator_says_that_it_cannot_reach_a_source(
    hosts: Hosts, run_in: RunIn, checkpoint: Path
) -> None:
    """The source sees the coordinator through a gateway, and the other way there is none."""
    towards_inside, inside = hosts.link("gateway", "inside").addresses
    outside, coordinator = hosts.link("gateway", "outside").addresses
    daemon = run_in("outside", "--listen", f"{coordinator}:7600", "--insecure", daemon=True)
    daemon.until(lambda: "listens" in daemon.err, "listening")
    hosts.start("gateway", [sys.executable, "-c", _FORWARD, towards_inside, coordinator, "7600"])
    serving = ("serve", str(checkpoint), "--model", "m", "--listen", "0.0.0.0:7601", "--insecure")
    source = run_in("inside", *serving, "--coordinator", f"{towards_inside}:7600", "--wait", "60")
    source.until(lambda: "stop with Ctrl-C" in source.err, "source")
    daemon.until(lambda: "source.unreached" in daemon.err, "warning")
    assert f"endpoint={inside}:7601" in daemon.err and f"address={outside}" in daemon.err


def test_a_source_waits_for_its_coordinator(run: Run, checkpoint: Path) -> None:
    coordinator = f"127.0.0.1:{free_port()}"
    at = ("--coordinator", coordinator, "--json")
    impatient = run("serve", str(checkpoint), "--model", "m", *at, "--wait", "1")
    assert impatient.wait(60) == 3
    assert "waiting up to 1 s" in impatient.err
    source = run("serve", str(checkpoint), "--model", "m", *at, "--wait", "100")
    source.until(lambda: "waiting up to 100 s" in source.err, "saying that it waits")
    run("--listen", coordinator, daemon=True)
    assert source.json()["coordinator"] == coordinator
    source.signal(signal.SIGTERM)
    assert source.wait() == 0
