"""A rank of a trainer, or a replica, of `benchmarks.trainer`: does what its standard input says."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from blake3 import blake3
from torch._C._distributed_c10d import PrefixStore, TCPStore

import mx
from mx import config
from mx.engines.replica.ahead import AheadPull

RANKS = 2
#: Rows of a matrix are so long.
WIDTH = 1024


def free_port(address: str) -> int:
    """Return a port that nothing listens at."""
    with socket.socket() as sock:
        sock.bind((address, 0))
        return int(sock.getsockname()[1])


def shapes(mb: int) -> dict[str, tuple[int, int]]:
    """Return the names and shapes of bfloat16 matrices of so many MB, most of them of one layer's
    sizes."""
    found: dict[str, tuple[int, int]] = {}
    left = mb * 10**6 // (2 * WIDTH) // RANKS * RANKS
    sizes = [4096, 1024, 256, 256, 1024, 2816, 2816]
    while left:
        rows = min(left, sizes[len(found) % len(sizes)])
        found[f"layers.{len(found) // 7}.m{len(found) % 7}"] = (rows, WIDTH)
        left -= rows
    return found


class Follower:
    """What both kinds have: a group for gloo's broadcast, of the first rank and the replicas."""

    def __init__(self, about: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.about, self.shapes = about, shapes(about["mb"])
        flags = {"insecure": True, "listen": f"{about['own']}:0"}
        self.settings = config.load({} if about["own"] == LOOPBACK else flags)
        self.whole: dict[str, torch.Tensor] = {}
        self.group: Any = None

    def join(self, port: int, rank: int) -> None:
        """Join the group of the broadcast."""
        os.environ["GLOO_SOCKET_IFNAME"] = self.about["device"]
        store = TCPStore(
            self.about["address"], port, self.about["replicas"] + 1, rank == 0,
            wait_for_workers=False,
        )  # fmt: skip
        self.group = dist.ProcessGroupGloo(
            PrefixStore("weights", store), rank, self.about["replicas"] + 1,
            timedelta(seconds=120),
        )  # fmt: skip

    def broadcast(self) -> None:
        """Send the first rank's tensors to all replicas."""
        if self.group is None:
            return
        options = dist.BroadcastOptions()
        options.rootRank = 0
        for tensor in self.whole.values():
            self.group.broadcast([tensor], options).wait()

    def hashed(self) -> None:
        """The same, with digests at both ends."""
        if self.about["kind"] == "rank":
            self._hash()
        self.broadcast()
        if self.about["kind"] == "replica":
            self._hash()

    def _hash(self) -> None:
        for tensor in self.whole.values():
            blake3(tensor.view(torch.uint8).numpy().data).digest()


class Rank(Follower):
    """One rank of the trainer."""

    def __init__(self, about: dict[str, Any]) -> None:
        super().__init__(about)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        self.rank = about["rank"]
        if self.rank == 0:
            port = free_port(LOOPBACK)
            print(port, flush=True)
        else:
            port = int(sys.stdin.readline())
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        where = f"tcp://{LOOPBACK}:{port}"
        dist.init_process_group("gloo", init_method=where, rank=self.rank, world_size=RANKS)
        mesh = init_device_mesh("cpu", (RANKS,))
        self.local, tensors = {}, {}
        for name, shape in self.shapes.items():
            rows = list(torch.arange(shape[0]).chunk(RANKS))
            mine = len(rows[self.rank]) if self.rank < len(rows) else 0
            self.local[name] = torch.zeros((mine, shape[1]), dtype=torch.bfloat16)
            tensors[name] = DTensor.from_local(
                self.local[name], mesh, [Shard(0)], shape=torch.Size(shape), stride=(WIDTH, 1)
            )
        if self.rank == 0:
            self.whole = {
                name: torch.zeros(shape, dtype=torch.bfloat16)
                for name, shape in self.shapes.items()
            }
            port = free_port(about["address"])
            print(port, flush=True)
            self.join(port, 0)
        self.source = mx.serve(
            tensors, model=about["name"], copy=False, coordinator=about["coordinator"],
            settings=self.settings,
        )  # fmt: skip
        self.change = contextlib.ExitStack()

    def enter(self) -> None:
        self.change.enter_context(self.source.changing())

    def fill(self, version: str) -> None:
        for tensor in self.local.values():
            tensor.fill_(int(version) % 251)

    def leave(self) -> None:
        self.change.close()

    def move(self, _: str) -> None:
        self.leave()

    def gather(self) -> None:
        """Gather all shards on the first rank."""
        for name, shard in self.local.items():
            whole = self.whole.get(name)
            if whole is None:
                dist.gather(shard, None, 0)
            else:
                dist.gather(shard, list(whole.chunk(RANKS)), 0)


class Replica(Follower):
    """One replica."""

    def __init__(self, about: dict[str, Any]) -> None:
        super().__init__(about)
        self.whole = {
            name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in self.shapes.items()
        }
        self.join(int(sys.stdin.readline()), about["rank"] + 1)

    def expect(self, version: str) -> None:
        """Wait for the revision of a version, as vLLM's workers do."""
        self.ahead = AheadPull(
            self.about["name"], f"main.{int(version) + 1}", into=self.whole, wait_s=60,
            coordinator=self.about["coordinator"], settings=self.settings,
        )  # fmt: skip

    def move(self, _: str) -> None:
        """Wait until it is here."""
        self.ahead.pull(60).wait()
        self.ahead.close()

    def check(self, version: str) -> None:
        wanted = int(version) % 251
        for name, tensor in self.whole.items():
            assert bool((tensor == wanted).all()), name


LOOPBACK = "127.0.0.1"


def main() -> None:
    """Answer each line with one."""
    about = json.loads(sys.argv[1])
    follower: Any = Rank(about) if about["kind"] == "rank" else Replica(about)
    print(2 * WIDTH * sum(rows for rows, _ in follower.shapes.values()), flush=True)
    for line in sys.stdin:
        method, *arguments = line.split()
        began_s = time.perf_counter()
        getattr(follower, method)(*arguments)
        print(time.perf_counter() - began_s, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
