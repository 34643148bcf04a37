"""Measures a call beside 5,000 connections that call Health every 25 s: the coordinator against a
bare grpc.aio server with as many.

    python -m benchmarks.crowd [--rounds 3] [--connections 5000] [--calls 200]

Both servers run all the while, each with a crowd of its own from eight loopback addresses, and are
called in turn, over a new connection in each round. Prints a JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mx.core.registration import Registration
from mx.units import count

from . import harness
from .coordinator_load import SECRET, manifest_of, record_of
from .processes import Cluster

LOAD = Path(__file__).with_name("crowd_load.py")
EVERY_S = 25
BAR = 5.0
_BARE = """
import asyncio, resource
import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc

async def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()

asyncio.run(main())
"""

Call = Callable[[], Awaitable[object]]


class Crowd:
    """A crowd on one server, as a child."""

    def __init__(self, address: str, connections: int) -> None:
        command = [sys.executable, str(LOAD), address]
        command += ["--connections", str(connections), "--every", str(EVERY_S)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()

    def _read(self) -> dict[str, int]:
        assert self._process.stdout is not None
        found: dict[str, int] = json.loads(self._process.stdout.readline())
        return found

    def end(self) -> dict[str, int]:
        """End it, and return what became of its connections."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found = self._read()
        self._process.communicate()
        return found


async def _timed(address: str, calls: int, make: Callable[[Any], Call]) -> list[float]:
    """Return the seconds of each call over a new connection."""
    times = []
    async with grpc.aio.insecure_channel(
        address, options=[("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        ask = make(channel)
        await ask()  # connects
        for _ in range(calls):
            begin_s = time.perf_counter()
            await ask()
            times.append(time.perf_counter() - begin_s)
            await asyncio.sleep(0.01)
    return times


def _health(channel: Any) -> Call:
    check = health_pb2_grpc.HealthStub(channel).Check
    return lambda: check(health_pb2.HealthCheckRequest())


def _resolve(channel: Any) -> Call:
    from mx.wire.channel import Remote, Role
    from mx.wire.rpc import Stub
    from mx.wire.v1 import coordinator_pb2 as pb

    service = pb.DESCRIPTOR.services_by_name["Coordinator"]
    stub = Stub(channel, service, Remote(Role.COORDINATOR, "the coordinator"))

    async def ask() -> object:
        return await stub.Resolve(pb.ResolveRequest(name="model-0"))

    return ask


async def _register(address: str) -> None:
    from mx.wire.client import CoordinatorClient

    client = CoordinatorClient(address)
    try:
        await client.register(Registration(record_of(0), SECRET), manifest_of(0).documents)
    finally:
        await client.close()


async def measure(rounds: int, connections: int, calls: int) -> dict[str, Any]:
    """Return the milliseconds of a call at each server, the ratios, and what became of the crowds.

    Args:
        rounds: How many.
        connections: Of each crowd.
        calls: Of each kind in each round.
    """
    bare = subprocess.Popen([sys.executable, "-c", _BARE], stdout=subprocess.PIPE, text=True)
    cluster = Cluster()
    crowds: list[Crowd] = []
    samples: dict[str, list[list[float]]] = {"bare": [], "health": [], "resolve": []}
    try:
        assert bare.stdout is not None
        reference = f"127.0.0.1:{int(bare.stdout.readline())}"
        await _register(cluster.coordinator)
        for address in (reference, cluster.coordinator):
            crowds.append(await asyncio.to_thread(Crowd, address, connections))
        await asyncio.sleep(EVERY_S)  # then all have called once
        for _ in range(rounds):
            await _register(cluster.coordinator)  # its lease may have ended
            samples["bare"].append(await _timed(reference, calls, _health))
            samples["health"].append(await _timed(cluster.coordinator, calls, _health))
            samples["resolve"].append(await _timed(cluster.coordinator, calls, _resolve))
        crowded = [await asyncio.to_thread(crowd.end) for crowd in crowds]
    finally:
        bare.kill()
        bare.communicate()
        cluster.close()
    found: dict[str, Any] = {"machine": harness.machine(), "crowds": crowded}
    for name, each in samples.items():
        found[f"{name}_ms"] = [round(1e3 * statistics.median(times), 3) for times in each]
        found[f"{name}_p99_ms"] = [
            round(1e3 * sorted(times)[len(times) * 99 // 100], 3) for times in each
        ]
    for name in ("health", "resolve"):
        for kind in ("ms", "p99_ms"):
            own = statistics.median(found[f"{name}_{kind}"])
            found[f"{name}_{kind}_ratio"] = round(own / statistics.median(found[f"bare_{kind}"]), 2)
    return found


def rows(rounds: int = 3, connections: int = 5000, calls: int = 200) -> list[harness.Row]:
    """Return the row of an honest call's time beside the crowd."""
    found = asyncio.run(measure(rounds, connections, calls))
    value = found["resolve_ms_ratio"]
    work = f"a call beside {count(connections, 'connection')} that call Health every {EVERY_S} s"
    return [harness.Row(work, value, "x", f"<= {BAR:g} x", value <= BAR, json.dumps(found))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connections", type=int, default=5000)
    parser.add_argument("--calls", type=int, default=200)
    given = parser.parse_args()
    found = asyncio.run(measure(given.rounds, given.connections, given.calls))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
