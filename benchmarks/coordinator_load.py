"""Puts load on a coordinator, as a process of its own: sources, watchers and resolves.

All sources connect and register at once, each over its own connection, and then send a heartbeat
each second. Calls are timed once all are registered: first with the heartbeats spread over the
second, then with all of them at its beginning. Prints a line of JSON at each step; the last one has
the results.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import re
import sys
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import grpc.aio

from mx import codec
from mx.core.digest import document_digest
from mx.core.manifest import TensorSpec, encode, plan_layout
from mx.core.topology import Nic, NumaNode, Place
from mx.core.types import (
    AddressTable,
    Manifest,
    ModelKey,
    PackagedFile,
    Packaging,
    Region,
    Registration,
    SourceRecord,
    SourceState,
)
from mx.errors import MxError
from mx.transport import TlsFiles
from mx.wire.address import host_of
from mx.wire.channel import Remote, Role, cut, dial
from mx.wire.client import CoordinatorClient
from mx.wire.rpc import Stub
from mx.wire.v1 import coordinator_pb2 as pb

MODELS = 10
LAYERS = 82
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
SECRET = b"benchmark secret"
_REGISTER_TIMEOUT_S = 120.0


@dataclass
class Found:
    """The results of the load.

    `lost` counts heartbeat streams and watches that ended by themselves, `refused` calls that
    failed, `retries` attempts to register that were repeated. `seconds` are those of the calls that
    are timed now.
    """

    lost: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    retries: int = 0
    registered: int = 0
    events: int = 0
    seconds: list[float] = field(default_factory=list)


@cache
def manifest_of(model: int) -> Manifest:
    """Return a model's manifest; all models share the layout."""
    specs = [
        TensorSpec(f"model.layers.{layer}.{part}.weight".ljust(64, "."), "BF16", (64, 64))
        for layer in range(LAYERS)
        for part in ("attention", "gate", "up", "down")
    ]
    names = tuple(spec.name for spec in specs)
    roots = {name: document_digest(f"{model} {name}".encode()) for name in names}
    packaging = Packaging((PackagedFile("model.safetensors", None, names),))
    return encode(plan_layout(specs), packaging, roots)


def record_of(number: int, host: str = "") -> SourceRecord:
    """Return the record of a source as a server with two interfaces registers it, at an address
    of its own, or at the host that its certificate names."""
    model = number % MODELS
    ref = manifest_of(model).ref
    nics = tuple(
        Nic(f"eth{i}", "up", (f"10.{i}.{number >> 8 & 255}.{number & 255}/16",), 100_000, 9000, 0)
        for i in range(2)
    )
    place = Place(
        boot_id=str(uuid.UUID(int=number)),
        hostname=f"host-{number}",
        uid=1000,
        pid=number + 1,
        addresses=(host,) if host else tuple(nic.addresses[0].partition("/")[0] for nic in nics),
        nics=nics,
        numa_nodes=(NumaNode(0, "0-63", 256 << 30, (10, 21)), NumaNode(1, "64-127", 256 << 30)),
    )
    region = Region(0, "cpu", 0x7F00_0000_0000, 141 << 30, (0, LAYERS))
    return SourceRecord(
        source_id=str(uuid.uuid4()),
        model=ModelKey(f"model-{model}"),
        ref=ref,
        endpoint=f"{host or f'10.0.{number >> 8 & 255}.{number & 255}'}:7601",
        place=place,
        generation=1,
        table=AddressTable(ref.layout, (region,), held=((0, LAYERS),)),
        transports=("shm", "tcp", "ucx"),
    )


class Load:
    """All sources, watchers and resolvers, in one event loop."""

    def __init__(self, address: str, tls: TlsFiles | None = None) -> None:
        self._address, self._tls = address, tls
        self._remote = Remote(Role.COORDINATOR, address)
        self._ending = asyncio.Event()
        self._storm_over = False
        #: The part of a second over which heartbeats are spread.
        self._spread_s = 1.0
        self._sources = 1
        self.found = Found()

    def _stub(self, channel: grpc.aio.Channel) -> Stub:
        return Stub(channel, pb.DESCRIPTOR.services_by_name["Coordinator"], self._remote)

    @staticmethod
    def _name(error: BaseException) -> str:
        """Return a name for the error's cause, without ids."""
        if isinstance(error, grpc.aio.AioRpcError):
            text = f"{error.code().name}: {error.details()}"
        else:
            text = f"{type(error).__name__}: {error}"
        return _UUID.sub("ID", text)[:200]

    async def source(self, number: int, registered: asyncio.Queue[int]) -> None:
        """Register a source and send its heartbeats until the end."""
        record = record_of(number, host_of(self._address) if self._tls else "")
        client = CoordinatorClient(self._address, tls=self._tls, timeout_s=60.0)
        channel = dial(self._address, tls=self._tls)
        try:
            async with asyncio.timeout(_REGISTER_TIMEOUT_S):
                while True:
                    try:
                        documents = manifest_of(number % MODELS).documents
                        await client.register(Registration(record, SECRET), documents)
                        break
                    except MxError as error:
                        self.found.refused[f"register: {self._name(error)}"] += 1
                        self.found.retries += 1
                        await asyncio.sleep(random.uniform(0.1, 0.5))
            self.found.registered += 1
            await self._beat(number, self._stub(channel), record, registered)
        finally:
            await client.close()
            await channel.close(None)

    async def _beat(
        self, number: int, stub: Stub, record: SourceRecord, registered: asyncio.Queue[int]
    ) -> None:
        call = stub.Heartbeat()
        request = pb.HeartbeatRequest(
            source_id=record.source_id,
            source_secret=SECRET,
            state=codec.state_to_wire(SourceState.SERVING),
        )
        counted = False
        try:
            while not self._ending.is_set():
                start_s = time.monotonic()
                await call.write(request)
                answer = await call.read()
                if not isinstance(answer, pb.HeartbeatResponse):
                    self.found.lost[f"heartbeat: {(await call.code()).name}"] += 1
                    return
                self._timed(start_s)
                if not counted:
                    counted = True
                    registered.put_nowait(1)
                await asyncio.sleep(self._until_due_s(number))
        except grpc.aio.AioRpcError as error:
            self.found.lost[f"heartbeat: {self._name(error)}"] += 1
        except asyncio.InvalidStateError:
            self.found.lost[f"heartbeat: {(await call.code()).name}"] += 1
        finally:
            if not counted:
                registered.put_nowait(1)
            cut(call)

    def _until_due_s(self, number: int) -> float:
        """Return how long it is until a source's next heartbeat."""
        now = time.monotonic() - self._spread_s * number / self._sources
        return math.floor(now) + 1 - now

    def _timed(self, start_s: float) -> None:
        if self._storm_over:
            self.found.seconds.append(time.monotonic() - start_s)

    async def watcher(self) -> None:
        """Watch everything until the end. Changes are counted, not decoded."""
        channel = dial(self._address, tls=self._tls)
        call = self._stub(channel).Watch(pb.WatchRequest(batches=True))
        try:
            async for message in call:
                self.found.events += len(message.batch) or 1
        except grpc.aio.AioRpcError as error:
            self.found.lost[f"watch: {self._name(error)}"] += 1
        finally:
            cut(call)
            await channel.close(None)

    async def resolver(self, per_s: float) -> None:
        """Resolve some model `per_s` times a second, without waiting for answers."""
        channels = [dial(self._address, tls=self._tls) for _ in range(MODELS)]
        stubs = [self._stub(channel) for channel in channels]
        try:
            async with asyncio.TaskGroup() as calls:
                for number in range(sys.maxsize):
                    if self._ending.is_set():
                        return
                    model = number % MODELS
                    calls.create_task(self._resolve(stubs[model], f"model-{model}"))
                    await asyncio.sleep(1 / per_s)
        finally:
            for channel in channels:
                await channel.close(None)

    async def _resolve(self, stub: Stub, name: str) -> None:
        start_s = time.monotonic()
        try:
            await stub.Resolve(pb.ResolveRequest(name=name), timeout=60)
        except grpc.aio.AioRpcError as error:
            # A model is unknown until its first source has registered.
            if self._storm_over or error.code() is not grpc.StatusCode.NOT_FOUND:
                self.found.refused[f"resolve: {self._name(error)}"] += 1
            return
        self._timed(start_s)

    async def run(self, sources: int, watchers: int, resolves: float, seconds: float) -> Any:
        self._sources = sources
        registered: asyncio.Queue[int] = asyncio.Queue()
        start_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            watching = [tasks.create_task(self.watcher()) for _ in range(watchers)]
            if resolves:
                tasks.create_task(self.resolver(resolves))
            for number in range(sources):
                tasks.create_task(self.source(number, registered))
            for _ in range(sources):
                await registered.get()
            storm_s = time.monotonic() - start_s
            _say(storm_s=storm_s)
            spread = await self._measure("spread", 1.0, seconds)
            once = await self._measure("once", 0.0, seconds)
            self._ending.set()
            for task in watching:
                task.cancel()
        found = self.found
        return {
            "registered": found.registered,
            "retries": found.retries,
            "lost": dict(found.lost),
            "refused": dict(found.refused),
            "events": found.events,
            "storm_s": round(storm_s, 2),
            "spread": spread,
            "once": once,
        }

    async def _measure(self, name: str, spread_s: float, seconds: float) -> dict[str, float | None]:
        """Time calls while heartbeats are spread over a part of each second."""
        self._spread_s = spread_s
        await asyncio.sleep(3.0)  # until what went before is done
        times: list[float] = []
        self.found.seconds = times
        self._storm_over = True
        _say(timing=name)
        await asyncio.sleep(seconds)
        self._storm_over = False
        _say(timed=name)
        times.sort()
        count = len(times)
        return {
            "calls": count,
            "p50_ms": round(1e3 * times[count // 2], 2) if count else None,
            "p99_ms": round(1e3 * times[count * 99 // 100], 2) if count else None,
        }


def _say(**found: object) -> None:
    print(json.dumps(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("coordinator")
    parser.add_argument("--sources", type=int, default=1000)
    parser.add_argument("--watchers", type=int, default=50)
    parser.add_argument("--resolves", type=float, default=50, help="per second")
    parser.add_argument("--seconds", type=float, default=10, help="of each way to send heartbeats")
    parser.add_argument("--tls", nargs=3, metavar=("CERT", "KEY", "CA"))
    given = parser.parse_args()

    async def run() -> Any:
        load = Load(given.coordinator, TlsFiles(*given.tls) if given.tls else None)
        return await load.run(given.sources, given.watchers, given.resolves, given.seconds)

    print(json.dumps(asyncio.run(run())), flush=True)


if __name__ == "__main__":
    main()
