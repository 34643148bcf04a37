"""An origin, and hosts that pull from it, around one switch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from benchmarks.checkpoints import write_checkpoint
from benchmarks.hosts import Hosts, Link, unavailable
from mx.errors import EXIT_OK
from tests.support.commands import HostCommand
from tests.support.tensors import same

ORIGIN = "origin"
TARGETS = ("t0", "t1", "t2", "t3")
MBIT_PER_S = 70
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


def check(lan: Lan, command: HostCommand, out: Path) -> dict[str, Any]:
    report = command.json(END_S)
    assert command.wait() == EXIT_OK, command.err
    assert same(load_file(out / "model.safetensors"), load_file(lan.weights))
    assert sum(path["bytes"] for path in report["paths"]) == lan.model_nbytes
    return report
