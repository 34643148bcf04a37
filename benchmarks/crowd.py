"""Measures a call beside 5,000 connections that call Health every 25 s: the coordinator against a
bare grpc.aio server with as many.

    python -m benchmarks.crowd [--rounds 3] [--connections 5000] [--calls 200]

Both servers run all the while, each with a crowd of its own from eight loopback addresses, and are
called in turn, over a new connection in each round.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mx.core.types import Registration
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


async def measure(rounds: int, connections: int, calls: int) -> dict[str, list[list[float]]]:
    """Return the seconds of each call, by server and kind, a list for each round.

    Args:
        rounds: How many.
        connections: Of each crowd.
        calls: Of each kind in each round.
    """
    samples: dict[str, list[list[float]]] = {"bare": [], "health": [], "resolve": []}
    with closing(Cluster()) as cluster:
        reference = f"127.0.0.1:{cluster.start('-c', _BARE).hear()}"
        await _register(cluster.coordinator)
        options = ("--connections", str(connections), "--every", str(EVERY_S))
        crowds = [
            cluster.start(str(LOAD), address, *options)
            for address in (reference, cluster.coordinator)
        ]
        for crowd in crowds:
            await asyncio.to_thread(crowd.hear)  # all are connected
        await asyncio.sleep(EVERY_S)  # then all have called once
        for _ in range(rounds):
            await _register(cluster.coordinator)  # its lease may have ended
            samples["bare"].append(await _timed(reference, calls, _health))
            samples["health"].append(await _timed(cluster.coordinator, calls, _health))
            samples["resolve"].append(await _timed(cluster.coordinator, calls, _resolve))
        for crowd in crowds:
            harness.say(f"a crowd's connections: {await asyncio.to_thread(crowd.ask)}")
    return samples


def rows(rounds: int, connections: int, calls: int) -> list[harness.Row]:
    """Return the rows of an honest call's time beside the crowd; see `measure`."""
    samples = asyncio.run(measure(rounds, connections, calls))
    beside = f"beside {count(connections, 'connection')} that call Health every {EVERY_S} s"
    found = []
    for what, part, bar in (("median", 50, BAR), ("p99", 99, None)):
        by_round = {
            name: [sorted(times)[len(times) * part // 100] for times in each]
            for name, each in samples.items()
        }
        bare_s = harness.median(by_round, "bare")
        for name in ("resolve", "health"):
            own_s = harness.median(by_round, name)
            work = f"{name}, {what} {beside} / Health at a bare server"
            detail = f"{own_s * 1e3:.2f} ms against {bare_s * 1e3:.2f}"
            here = {"mx": by_round[name], "bare": by_round["bare"]}
            value = own_s / bare_s
            if bar is not None and name == "resolve":
                found.append(harness.at_most(work, value, "x", bar, detail, here, digits=2))
            else:
                found.append(harness.shown(work, value, "x", detail, here))
    return found


def main() -> None:
    parser = harness.parser(__doc__, rounds=3)
    parser.add_argument("--connections", type=int, default=5000)
    parser.add_argument("--calls", type=int, default=200)
    given = parser.parse_args()
    found = rows(given.rounds, given.connections, given.calls)
    harness.show(found, as_json=given.json)


if __name__ == "__main__":
    main()
