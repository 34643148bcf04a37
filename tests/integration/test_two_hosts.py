"""Two hosts that share nothing but a network."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from benchmarks.hosts import Hosts
from tests.support.commands import RunIn
from tests.support.tensors import same

pytestmark = pytest.mark.integration


def test_a_model_crosses_the_network(
    hosts: Hosts, run_in: RunIn, checkpoint: Path, tmp_path: Path
) -> None:
    source_address, target_address = hosts.link("near", "far").addresses
    coordinator = f"{source_address}:7600"
    base = ("--coordinator", coordinator, "--insecure", "--json")
    daemon = run_in("near", "--listen", coordinator, "--insecure", daemon=True)
    daemon.until(lambda: "listens" in daemon.err, "listening")
    serving = ("serve", str(checkpoint), "--model", "m", "--listen", f"{source_address}:0")
    source = run_in("near", *serving, *base)
    assert source.json()["endpoint"].startswith(source_address)
    # The same machine, but another host by its places: no shared memory.
    out = tmp_path / "out"
    target = ("--listen", f"{target_address}:0", *base)
    report = run_in("far", "pull", "m", "--out", str(out), *target).json()
    assert [path["transport"] for path in report["paths"]] == ["tcp"]
    assert same(load_file(out / "model.safetensors"), load_file(checkpoint))
    # It becomes a source for the host that it came from.
    relay = run_in("far", "pull", "m", "--hold", *target)
    relay.json()
    relay.until(
        lambda: len(run_in("near", "sources", *base).json()["sources"]) == 2, "second source"
    )
    source.process.kill()
    source.wait()
    back = run_in("near", "pull", "m", "--out", str(tmp_path / "back"), *base).json()
    (path,) = back["paths"]
    assert path["transport"] == "tcp"
    assert path["source"].startswith(target_address)
    # Without --insecure all of this is refused.
    refused = run_in("far", "pull", "m", "--coordinator", coordinator)
    assert refused.wait() == 2
    assert "--insecure" in refused.err


def test_a_subnet_that_is_not_connected_delays_nothing(
    hosts: Hosts, run_in: RunIn, checkpoint: Path, tmp_path: Path
) -> None:
    addresses = hosts.link("near", "far").addresses
    apart = ("10.99.0.1", "10.99.0.2")  # such as those of a bridge for containers
    for host, address in zip(("near", "far"), apart, strict=True):
        hosts.dead_end(host, address)
    source_address = addresses[0]
    base = ("--coordinator", f"{source_address}:7600", "--insecure", "--json")
    daemon = run_in("near", "--listen", f"{source_address}:7600", "--insecure", daemon=True)
    daemon.until(lambda: "listens" in daemon.err, "listening")
    nics = ("--nics", "eth0,eth1")
    at = ("--listen", f"{source_address}:0")
    run_in("near", "serve", str(checkpoint), "--model", "m", *at, *nics, *base).json()
    out = tmp_path / "out"
    # What waits for an answer from that subnet fails by the time at which this gives up.
    stalls = ("--stall-timeout-s", "600")
    pull = run_in("far", "pull", "m", "--out", str(out), *stalls, *nics, *base)
    report = pull.json()
    assert pull.wait() == 0, pull.err
    assert {path["rail"] for path in report["paths"]} == {"eth0→eth0"}
    assert same(load_file(out / "model.safetensors"), load_file(checkpoint))
