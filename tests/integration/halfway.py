"""A pull that is slow enough to be caught in its middle: two hosts, 60 Mbit/s between them."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

from benchmarks.checkpoints import llama_shapes, write_checkpoint
from benchmarks.hosts import Hosts, Link
from tests.support.commands import HostCommand, RunIn

NEAR, FAR = "near", "far"
SHAPES = llama_shapes(8, 384, 1024, 2048)
LAYERS = 10


@dataclass
class Net:
    """A source in NEAR, coordinator and target in FAR, some seconds between them."""

    hosts: Hosts
    link: Link
    run_in: RunIn
    weights: Path
    nbytes: int

    @property
    def coordinator(self) -> str:
        return f"{self.link.address(FAR)}:7600"

    def start_coordinator(self) -> HostCommand:
        command = self.run_in(
            FAR, "--listen", self.coordinator, "--insecure", "--json", daemon=True
        )
        command.json()
        return command

    def serve(self, port: int, *more: str) -> HostCommand:
        command = self.run_in(
            NEAR, "serve", str(self.weights), "--model", "m", "--json", "--insecure",
            "--coordinator", self.coordinator, "--listen", f"{self.link.address(NEAR)}:{port}",
            *more,
        )  # fmt: skip
        command.json()
        return command

    def pull(self, *more: str) -> HostCommand:
        return self.run_in(
            FAR, "pull", "m", "--json", "--insecure", "--coordinator", self.coordinator,
            "--transport", "tcp", *more,
        )  # fmt: skip

    def sent_nbytes(self) -> int:
        return self.hosts.sent_nbytes(self.link, NEAR)

    def until_sent(self, pull: HostCommand, part: float) -> None:
        enough = self.sent_nbytes() + part * self.nbytes
        pull.until(lambda: self.sent_nbytes() > enough, f"{part:.0%} of the model")


def net_of(hosts: Hosts, run_in: RunIn, folder: Path) -> Net:
    """Its checkpoint is made in `folder`: about 31 MB in 10 layers."""
    weights = folder / "model.safetensors"
    nbytes = write_checkpoint(weights, SHAPES)
    link = hosts.link(NEAR, FAR, mbit_per_s=60)
    return Net(hosts, link, run_in, weights, nbytes)


def kill(command: HostCommand) -> None:
    command.signal(signal.SIGKILL)
    command.wait()
