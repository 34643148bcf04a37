"""Routers, replicas and a coordinator on hosts that share nothing but a network, and over TLS."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mx
from benchmarks.hosts import Hosts
from mx import config
from mx.errors import MxError, NotAllowedError
from mx.wire.place import place_from_json
from tests.integration.replica import PORT
from tests.support.certificates import Folder
from tests.support.commands import Run, RunIn, environment, serve

pytestmark = pytest.mark.integration

REPLICA = str(Path(__file__).with_name("replica.py"))

#: Prints what a router on the coordinator's host sees of the replica, and what it estimates.
ROUTER = """
import json, sys, mx
coordinator, far = sys.argv[1:]
requests = []
with mx.Router(coordinator) as router, router.watch("m") as watch:
    for event in watch:
        if event.kind is mx.EventKind.FULLY_LOADED and not event.replica.origin:
            requests.append(event.replica.requests)
            if len(requests) == 2:
                break
    ranked = router.place("m", [far, ""])
    print(json.dumps({
        "requests": requests,
        "attaches": [each.attaches for each in ranked],
        "labels": [path.label for path in ranked[-1].paths],
        "seconds": ranked[-1].seconds_to_ready,
        "measured": ranked[-1].measured,
    }))
"""


class Started:
    """Scripts in hosts, which end with the test."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.processes: list[subprocess.Popen[str]] = []

    def __call__(self, host: str, *arguments: str, **settings: str) -> subprocess.Popen[str]:
        self.processes.append(
            subprocess.Popen(
                [*self.hosts.prefix(host), sys.executable, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment(MX_PEER_INSECURE="1", **settings),
                text=True,
            )
        )
        return self.processes[-1]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


@pytest.fixture
def script_in(hosts: Hosts) -> Iterator[Started]:
    started = Started(hosts)
    yield started
    started.end()


def test_a_replica_elsewhere_is_reached_at_an_address_of_its_host(
    hosts: Hosts, run_in: RunIn, script_in: Started, checkpoint: Path
) -> None:
    near, far = hosts.link("near", "far", mbit_per_s=100).addresses
    coordinator = f"{near}:7600"
    base = ("--coordinator", coordinator, "--insecure", "--json")
    daemon = run_in("near", "--listen", coordinator, "--insecure", daemon=True)
    daemon.until(lambda: "listens" in daemon.err, "listening")
    run_in("near", "serve", str(checkpoint), "--model", "m", "--listen", f"{near}:0", *base).json()
    place = json.dumps(run_in("far", "topo", "--json").json()["place"])
    assert place_from_json(place).addresses
    router = script_in("near", "-c", ROUTER, coordinator, place)
    # One says where it is reached, the other does not: it reports from there. They are not sources,
    # or the far host would have one that a pull there attaches to.
    for where in ({"MX_PEER_LISTEN": f"{far}:0"}, {}):
        script_in("far", REPLICA, coordinator, "m", "alone", "0", **where)
    said = json.loads(router.communicate(timeout=60)[0])
    assert said["requests"] == [f"{far}:{PORT}"] * 2
    # On the source's own host it would be attached; over the link it takes more than two seconds.
    assert said["attaches"] == [True, False]
    assert said["labels"] and all(label.startswith("tcp ") for label in said["labels"])
    assert said["measured"] and said["seconds"] > 1


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
def test_over_tls_and_only_with_the_right_certificate(
    run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    folder = Folder(tmp_path)
    flags = folder.flags("good")
    daemon = run("--listen", "127.0.0.1:0", *flags, daemon=True)
    daemon.until(lambda: "listens on " in daemon.err, "listening")
    address = daemon.err.partition("listens on ")[2].partition(";")[0]
    serve(run, checkpoint, "m", address, *flags)
    names = [f"MX_PEER_{flag.removeprefix('--').replace('-', '_').upper()}" for flag in flags[::2]]
    tls = dict(zip(names, flags[1::2], strict=True))
    replica = subprocess.Popen(
        [sys.executable, REPLICA, address, "m", "plain", "0"],
        stdin=subprocess.PIPE,
        env=environment(**tls),
    )
    try:
        settings = config.load(environ={"HOME": "/nonexistent", **tls})
        with mx.Router(address, settings=settings) as router, router.watch("m") as watch:
            while (event := watch.next(60)) is not None:
                if event.kind is mx.EventKind.ACCEPTS_REQUESTS:
                    break
            assert event is not None and event.replica is not None
            assert event.replica.requests == f"127.0.0.1:{PORT}"
        plain = config.load(environ={"HOME": "/nonexistent"})
        with mx.Router(address, settings=plain) as router, pytest.raises(MxError, match="TLS"):
            router.sources("m")
        foreign = dict(zip(names, folder.flags("foreign")[1::2], strict=True))
        settings = config.load(environ={"HOME": "/nonexistent", **foreign})
        with pytest.raises(NotAllowedError, match="not signed by an authority"):
            mx.Router(address, settings=settings)
    finally:
        replica.kill()
        replica.wait()
        assert replica.stdin is not None
        replica.stdin.close()
