"""Two hosts that share nothing but a network: namespaces joined by a veth pair."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.integration.conftest import Command, environment
from tests.integration.test_main_job import same

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None,
        reason="making network namespaces needs root and iproute2",
    ),
]

SOURCE, TARGET = "10.213.7.1", "10.213.7.2"


class HostCommand(Command):
    """A command inside one of the namespaces."""

    def __init__(self, host: str, *arguments: str, daemon: bool = False) -> None:
        self.prefix = ("ip", "netns", "exec", host)
        super().__init__(*arguments, daemon=daemon, env=environment())

    def command(self, entry: str) -> list[str]:
        return [*self.prefix, *super().command(entry)]


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """The names of two namespaces that reach each other at SOURCE and TARGET."""
    names = (f"mx-{os.getpid()}-a", f"mx-{os.getpid()}-b")
    links = (f"mxa{os.getpid() % 100000}", f"mxb{os.getpid() % 100000}")

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    try:
        ip("netns", "add", names[0])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this container may not make namespaces: {error.stderr.decode().strip()}")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for name, link, address in zip(names, links, (SOURCE, TARGET), strict=True):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def test_a_model_crosses_the_network(
    hosts: tuple[str, str], checkpoint: Path, tmp_path: Path
) -> None:
    started: list[Command] = []

    def run(host: str, *arguments: str, daemon: bool = False) -> Command:
        started.append(HostCommand(host, *arguments, daemon=daemon))
        return started[-1]

    near, far = hosts
    coordinator = f"{SOURCE}:7600"
    base = ("--coordinator", coordinator, "--insecure", "--json")
    try:
        daemon = run(near, "--listen", coordinator, "--insecure", daemon=True)
        daemon.until(lambda: "listens" in daemon.err, "listening")
        source = run(
            near, "serve", str(checkpoint), "--model", "m", "--listen", f"{SOURCE}:0", *base
        )
        assert source.json()["endpoint"].startswith(SOURCE)
        # The same machine, but another host as far as anyone can tell: no shared memory.
        out = tmp_path / "out"
        target = ("--listen", f"{TARGET}:0", *base)
        report = run(far, "pull", "m", "--out", str(out), *target).json()
        assert [path["transport"] for path in report["paths"]] == ["tcp"]
        assert same(load_file(out / "model.safetensors"), load_file(checkpoint))
        # It becomes a source for the host that it came from.
        relay = run(far, "pull", "m", "--hold", *target)
        relay.json()
        relay.until(
            lambda: len(json.loads(sources(near, coordinator))["sources"]) == 2, "second source"
        )
        source.process.kill()
        source.wait()
        back = run(near, "pull", "m", "--out", str(tmp_path / "back"), *base).json()
        (path,) = back["paths"]
        assert path["transport"] == "tcp"
        assert path["source"].startswith(TARGET)
        # Without saying --insecure nothing of this is done.
        refused = run(far, "pull", "m", "--coordinator", coordinator)
        assert refused.wait() == 2
        assert "--insecure" in refused.err
    finally:
        for command in reversed(started):
            command.end()


def sources(host: str, coordinator: str) -> str:
    done = subprocess.run(
        [
            *("ip", "netns", "exec", host, sys.executable, "-m", "mx", "sources"),
            *("--coordinator", coordinator, "--insecure", "--json"),
        ],
        env=environment(),
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout
