"""Measures a real coordinator while N hosts pull one model at once. Their bytes are simulated.

    python -m benchmarks.fleet [--n 10 100 1000] [--seconds 120] [--slow 1] [--json FILE]
        [--svg FILE]

Each host makes the calls of a pull over a connection of its own: it looks the model up, registers,
sends heartbeats, reports its progress and its layers, and looks up again as often as a pull does.
The machines of mx's swarm choose who reads what from whom, as in `benchmarks.swarm_sim`, with the
peers that the coordinator lists, in real time; `--seconds` is how long one link takes for the
model. Each row has the finish in multiples of that, the coordinator's CPU time and what it sent and
got, by target.

One process makes the calls of all hosts, and a core does not suffice for a thousand in real time:
with `--slow 4` all of it, leases too, takes four times as long, and nothing else changes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mx import codec
from mx.core.holdings import members, ranges_of
from mx.core.types import ModelKey, Registration, SourceRecord, SourceRole, SourceState
from mx.fetching.connections import ORDINARY_S, ordinary_pause_s
from mx.fetching.progress import FIRST_S, INTERVAL_S
from mx.wire.channel import Remote, Role, cut, dial
from mx.wire.client import CoordinatorClient
from mx.wire.rpc import Stub
from mx.wire.v1 import coordinator_pb2 as pb

from . import svg
from .coordinator_load import LAYERS, MODELS, SECRET, manifest_of, record_of
from .processes import Cluster, cpu_s
from .swarm_nodes import ORIGIN, Node, Swarm
from .swarm_setting import Setting

NAME = "fleet"
_TIMEOUT_S = 60.0
_PUMP_S = 0.01
_ADVERTISE_S = 1.0


@dataclass(frozen=True)
class Row:
    """What one fleet took; `finish` and `finish_mean` in multiples of the model's time over one
    link. `late_s` is by how much the simulation fell behind the clock at most."""

    n: int
    seconds: float
    finish: float
    finish_mean: float
    cpu_s: float
    calls: dict[str, int]
    sent_bytes: int
    received_bytes: int
    late_s: float

    @property
    def messages(self) -> float:
        """The messages of the coordinator by target, both ways."""
        return sum(self.calls.values()) / self.n

    def __str__(self) -> str:
        return (
            f"{self.n:6,} {self.finish:7.3f} {self.finish_mean:7.3f} {self.cpu_s:8.2f} "
            f"{1e3 * self.cpu_s / self.n:9.2f} {self.messages:9.1f} "
            f"{self.sent_bytes / self.n / 1e3:10.1f} {self.received_bytes / self.n / 1e3:10.1f} "
            f"{self.late_s:6.2f}"
        )


HEAD = (
    f"{'hosts':>6} {'finish':>7} {'mean':>7} {'CPU s':>8} {'ms/target':>9} {'messages':>9} "
    f"{'kB sent':>10} {'kB got':>10} {'late s':>6}"
)


class Host:
    """One host's calls to the coordinator."""

    def __init__(self, fleet: Fleet, node: Node) -> None:
        self.id = str(uuid.uuid4())
        self._fleet = fleet
        self._node = node
        self._channel = dial(fleet.address)
        remote = Remote(Role.COORDINATOR, fleet.address)
        self._stub = Stub(self._channel, pb.DESCRIPTOR.services_by_name["Coordinator"], remote)
        self._source_count = 0
        base = record_of(node.number * MODELS)  # of the one model
        table = replace(base.table, held=())
        self._record = replace(
            base, source_id=self.id, model=ModelKey(NAME), role=SourceRole.RELAY, table=table
        )

    async def run(self) -> None:
        """Make a pull's calls until all hosts are done."""
        try:
            await self.look()
            await self._register()
            self._fleet.joined(self, self._node)
            async with asyncio.TaskGroup() as tasks:
                for work in (self._beat, self._report, self._advertise, self._look_again):
                    tasks.create_task(work())
        finally:
            await self._channel.close(None)

    def _held(self) -> tuple[tuple[int, int], ...]:
        return tuple(ranges_of(members(self._node.receiver.held)))

    @property
    def _whole(self) -> bool:
        return self._held() == ((0, LAYERS),)

    async def _call(self, name: str, request: Any) -> Any:
        answer = await getattr(self._stub, name)(request, timeout=_TIMEOUT_S)
        self._fleet.count(name, request, answer)
        return answer

    async def look(self) -> None:
        """Look the model up."""
        answer = await self._call("Resolve", pb.ResolveRequest(name=NAME))
        self._source_count = answer.source_count
        self._fleet.listed[self.id] = [each.source_id for each in answer.sources]

    async def _look_again(self) -> None:
        while not self._whole:
            await self._fleet.sleep(ordinary_pause_s(self._source_count))
            await self.look()
            self._fleet.looked(self._node)

    async def _register(self) -> None:
        digests = [digest for digest, _ in self._record.documents]
        missing = await self._call("Missing", pb.MissingRequest(digests=digests))
        assert not missing.digests  # the origin has sent them
        source = codec.registration_to_wire(Registration(self._record, SECRET), b"", b"")
        request = pb.RegisterRequest(source=source)

        async def requests() -> AsyncIterator[pb.RegisterRequest]:
            yield request

        answer = await self._stub.Register(requests(), timeout=_TIMEOUT_S)
        self._fleet.count("Register", request, answer)
        self._lease_s = answer.lease_s

    async def _beat(self) -> None:
        call = self._stub.Heartbeat()
        request = pb.HeartbeatRequest(
            source_id=self.id,
            source_secret=SECRET,
            state=codec.state_to_wire(SourceState.SERVING),
        )
        try:
            while True:
                await call.write(request)
                self._fleet.count("Heartbeat", request, await call.read())
                if await self._fleet.over(self._lease_s / 3):
                    return
        finally:
            cut(call)

    async def _report(self) -> None:
        call = self._stub.Progress()
        try:
            await self._fleet.sleep(FIRST_S)
            while True:
                held = self._node.receiver.held
                whole = self._whole
                phases = pb.PullProgress
                pull = pb.PullProgress(
                    pull_id=self.id,
                    model=codec.key_to_wire(ModelKey(NAME)),
                    host=f"host-{self._node.number}",
                    phase=phases.PHASE_COMPLETE if whole else phases.PHASE_RUNNING,
                    layers=LAYERS,
                    ready=held.to_bytes((LAYERS + 7) // 8, "little"),
                    seconds=self._fleet.now_s,
                )
                request = pb.ProgressRequest(pull=pull)
                await call.write(request)
                self._fleet.count("Progress", request, None)
                if whole:
                    await call.done_writing()
                    await call
                    return
                await self._fleet.sleep(INTERVAL_S)
        finally:
            cut(call)

    async def _advertise(self) -> None:
        reported: tuple[tuple[int, int], ...] = ()
        while reported != ((0, LAYERS),):
            await self._fleet.sleep(_ADVERTISE_S)
            held = self._held()
            if held != reported:
                request = pb.AdvertiseRequest(
                    source_id=self.id,
                    generation=self._record.generation,
                    held=codec.ranges_to_wire(held),
                    source_secret=SECRET,
                )
                await self._call("Advertise", request)
                reported = held


class Fleet(Swarm):
    """The simulation in real time, in which hosts know the peers that the coordinator lists."""

    def __init__(self, setting: Setting, address: str, slow: float) -> None:
        super().__init__(replace(setting, join_s=float("inf")))
        self.address = address
        self._dilation = slow
        self.calls: Counter[str] = Counter()
        self.sent_bytes = self.received_bytes = 0
        #: The ids of the sources in each host's last answer, by the host's id.
        self.listed: dict[str, list[str]] = {}
        self._hosts: dict[int, Host] = {}
        self._numbers: dict[str, int] = {}
        self._began_s = time.monotonic()
        self._over = asyncio.Event()
        self.late_s = 0.0

    @property
    def now_s(self) -> float:
        return (time.monotonic() - self._began_s) / self._dilation

    async def sleep(self, seconds: float) -> None:
        """Sleep so long by the simulation's clock."""
        await asyncio.sleep(seconds * self._dilation)

    def count(self, name: str, request: Any, answer: Any) -> None:
        """Count a message of a host, and its answer, None for none."""
        self.calls[name] += 1
        self.received_bytes += request.ByteSize()
        if answer is not None:
            self.calls[name] += 1
            self.sent_bytes += answer.ByteSize()

    async def over(self, seconds: float) -> bool:
        """Wait so long, or until all hosts are done, and return True then."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._over.wait()
        return self._over.is_set()

    def joined(self, host: Host, node: Node) -> None:
        """Let a host that is registered pull."""
        self._hosts[node.number] = host
        self._numbers[host.id] = node.number
        node.joined_s = self.network.now_s
        super()._join(node)

    def _join(self, node: Node) -> None:
        """Not by time: see `joined`."""

    def _discover(self, node: Node) -> None:
        self.looked(node)
        self._discover_more(node)

    def looked(self, node: Node) -> None:
        """Connect to peers of a host's last answer."""
        if node.finish_s is None:
            there = map(self._numbers.get, self.listed[self._hosts[node.number].id])
            self._greet(node, node.neighbours.listed(str(each) for each in there if each))

    def _discover_more(self, node: Node) -> None:
        """Connect to the origin; `looked` does to peers."""
        if node.finish_s is None:
            self._discover_origin(node)
            self.network.at(self.network.now_s + ORDINARY_S, self._discover_more, node)

    async def _pump(self) -> None:
        while not self._over.is_set():
            target_s = self.now_s
            self.network.run(limit_s=target_s)
            self.network.now_s = target_s
            self.late_s = max(self.late_s, self.now_s - target_s)
            await asyncio.sleep(_PUMP_S)

    def _finished(self) -> None:
        self._unfinished -= 1
        if not self._unfinished:
            self._over.set()

    async def pull(self) -> None:
        """Run all hosts until each has the model."""
        self._began_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pump())
            for node in self.nodes:
                if node.number != ORIGIN:
                    tasks.create_task(Host(self, node).run())


async def _origin(address: str) -> tuple[CoordinatorClient, asyncio.Task[None]]:
    """List the origin, and keep it listed."""
    record: SourceRecord = replace(record_of(0), model=ModelKey(NAME))
    client = CoordinatorClient(address)
    registration = Registration(record, SECRET)

    async def register() -> object:
        return await client.register(registration, manifest_of(0).documents)

    await register()
    return client, asyncio.create_task(client.keep_alive(lambda: record, register))


async def _measure(n: int, seconds: float, slow: float, cluster: Cluster) -> Row:
    client, listed = await _origin(cluster.coordinator)
    # One chunk is one layer, so that its size follows from the link's rate and the time.
    setting = Setting(n=n, k=LAYERS)
    rate = setting.gbit_per_s * 1e9 / 8
    fleet = Fleet(
        replace(setting, chunk_nbytes=round(rate * seconds / LAYERS)), cluster.coordinator, slow
    )
    try:
        before_s = cpu_s(cluster.coordinator_pid)
        await fleet.pull()
        used_s = cpu_s(cluster.coordinator_pid) - before_s
    finally:
        listed.cancel()
        await asyncio.gather(listed, return_exceptions=True)
        await client.close()
    finishes = [
        (node.joined_s + node.finish_s) / seconds
        for node in fleet.nodes[1:]
        if node.finish_s is not None
    ]
    assert len(finishes) == n
    return Row(
        n,
        seconds,
        round(max(finishes), 3),
        round(sum(finishes) / n, 3),
        round(used_s, 2),
        dict(fleet.calls),
        fleet.sent_bytes,
        fleet.received_bytes,
        round(fleet.late_s, 2),
    )


def picture(rows: Sequence[Row]) -> str:
    """Return the rows as a picture: what each target costs the coordinator."""
    groups = [
        (
            f"{row.n:,} hosts: finish {row.finish:.2f} x one link's time",
            [
                svg.Bar("CPU ms by target", 1e3 * row.cpu_s / row.n, svg.MX),
                svg.Bar("messages by target", row.messages),
                svg.Bar("kB sent by target / 10", row.sent_bytes / row.n / 1e4),
            ],
        )
        for row in rows
    ]
    return svg.bars("What a pull costs the coordinator, as the fleet grows", groups, unit="")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fleet",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--n", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--slow", type=float, default=1.0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--svg", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    rows = []
    print(HEAD)
    settings = ("--lease-s", str(5 * options.slow))
    with asyncio.Runner() as runner:  # one loop, since gRPC's poller stays with its first
        for n in options.n:
            with closing(Cluster(options=settings, stderr=subprocess.DEVNULL)) as cluster:
                rows.append(runner.run(_measure(n, options.seconds, options.slow, cluster)))
            print(rows[-1], flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if options.svg is not None:
        options.svg.write_text(picture(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
