"""What a pull is listed with is what it gives, whenever others could first find it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from typing import Any, cast

import pytest

from mx.core import manifest as manifests
from mx.core.digest import chunk_digest
from mx.core.planner import Plan
from mx.core.types import (
    ChunkGrid,
    Chunking,
    Manifest,
    ModelKey,
    Packaging,
    SourceRecord,
    SourceRole,
)
from mx.memory.arena import Arena
from mx.target.connections import ConnectionPool
from mx.target.options import PullOptions
from mx.target.reads import Connection
from mx.target.relay import RelayHost
from mx.target.sharing import Sharing
from mx.target.trading import Trading
from mx.target.transfer import Transfer
from mx.units import MIB
from mx.wire.server import Service, listen
from mx.wire.v1 import peer_pb2, peer_pb2_grpc
from tests.support.records import make_documents, make_record
from tests.unit.test_swarm_node import Heard
from tests.unit.test_transfer import BYTES, HeldSession, Lease, Listener

LAYERS = 3


def manifest_of_three_layers() -> Manifest:
    specs = [
        manifests.TensorSpec(f"model.layers.{n}.mlp.weight", "U8", (MIB,)) for n in range(LAYERS)
    ]
    layout = manifests.plan_layout(specs)
    grid = ChunkGrid(layout, MIB)
    digests = b"".join(
        chunk_digest(segments, [memoryview(BYTES)[s.arena_offset : s.arena_offset + s.nbytes]])
        for chunk in grid
        for segments in [grid.segments(chunk)]
        for s in segments
    )
    return manifests.encode(
        layout, Chunking(MIB, digests), Packaging(), {spec.name: bytes(32) for spec in specs}
    )


class Host:
    """What others find a pull by; keeps what it is to be listed with."""

    def __init__(self) -> None:
        self.listed: list[tuple[int, int]] = []

    async def start(self, *what: Any) -> None: ...

    def record(self) -> SourceRecord | None:
        return None

    async def register(self, coordinator: str) -> None: ...

    def hold(self, layers: Sequence[tuple[int, int]]) -> None:
        self.listed = list(layers)

    async def advertise(self) -> None: ...

    async def close(self) -> None: ...


def given(trading: Trading) -> list[int]:
    """The chunks that a neighbour gets when it asks for each."""
    neighbour = Heard("neighbour")
    number = trading.node.joined(neighbour.record, neighbour.stream, b"", seeds=False)
    found = []
    for chunk in range(LAYERS):
        neighbour.stream._unsent = asyncio.Queue()
        trading.node.heard(number, peer_pb2.SwarmMessage(request=chunk))
        answer = neighbour.stream._unsent.get_nowait()
        if answer.WhichOneof("message") == "allow":
            found.append(answer.allow)
        trading.node.heard(number, peer_pb2.SwarmMessage(finished=chunk))
    trading.node.parted(number)
    return found


@pytest.mark.parametrize("coordinated", [False, True])
def test_what_came_before_is_given_and_nothing_is_listed_that_is_not(coordinated: bool) -> None:
    """One chunk from disk, one read alone, then others come, then the last one."""

    async def main() -> None:
        manifest = manifest_of_three_layers()
        arena = bytearray(BYTES[:MIB]) + bytearray(manifest.layout.arena_nbytes - MIB)
        transfer = Transfer(manifest, memoryview(arena), Listener())
        transfer.start()
        assert transfer.prefill("resume", "/some/folder", [0]) == MIB
        session = HeldSession()
        transfer.add_connection(Connection("held", "peer", session, Lease(), 0.0))
        session.land()
        nothing = cast(Any, None)
        pool = ConnectionPool(Plan((), (), ()), nothing, nothing, nothing, [])
        host, options = Host(), PullOptions("m", coordinator="nowhere:1")
        trading = Trading(
            "own", options, cast(RelayHost, host), transfer, pool, lambda sources: Plan((), (), ())
        )
        try:
            if coordinated:
                trading.node.coordinate()
            trading.begin(ModelKey("m", "main", "checkpoint"), cast(Arena, None), [])
            await asyncio.sleep(0.01)
            assert given(trading) == [0, 1]
            assert host.listed == [(0, 2)]
            session.land()
            await asyncio.sleep(0.01)
            trading.reading_ended()
            if not coordinated:
                trading.node.coordinate()  # others come when it is through
            assert given(trading) == [0, 1, 2]
            assert trading.node.complete
            while host.listed != [(0, LAYERS)]:
                await asyncio.sleep(0.05)
        finally:
            await trading.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_pull_does_not_take_itself_for_somebody_who_gives() -> None:
    async def main() -> None:
        options = PullOptions("m", relay=lambda source_id: cast(RelayHost, Host()))
        sharing = Sharing(options, lambda sources: Plan((), (), ()))
        part = make_record(
            make_documents("w"), source_id=sharing.reader_id, held=(), role=SourceRole.RELAY
        )
        assert not part.whole
        sharing.met([part])
        assert not sharing.others_give

    asyncio.run(main())


class Known(Host):
    """One that others can find."""

    def record(self) -> SourceRecord | None:
        return make_record(make_documents("w"), role=SourceRole.RELAY)


class Unwelcoming(peer_pb2_grpc.PeerServicer):
    """A peer that wants no neighbours."""

    def __init__(self) -> None:
        self.greeted = 0

    async def Trade(self, requests: Any, context: Any) -> None:
        self.greeted += 1
        await context.write(peer_pb2.SwarmMessage(welcome=peer_pb2.Welcome(accepted=False)))
        async for _ in requests:
            pass


def sockets() -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found


def test_peers_that_are_not_talked_to_leave_no_connection_behind() -> None:
    """Others name them, as many as they like."""

    async def main() -> None:
        transfer = Transfer(
            manifest_of_three_layers(), memoryview(bytearray(LAYERS * MIB)), Listener()
        )
        nothing, peer = cast(Any, None), Unwelcoming()
        pool = ConnectionPool(Plan((), (), ()), nothing, nothing, nothing, [])
        service = Service(peer_pb2.DESCRIPTOR.services_by_name["Peer"], peer)
        listening = await listen("0.0.0.0:0", [service], insecure=True)
        options = PullOptions("m", insecure=True)
        trading = Trading(
            "own",
            options,
            cast(RelayHost, Known()),
            transfer,
            pool,
            lambda sources: Plan((), (), ()),
        )
        before = sockets()
        try:
            trading.met(
                [
                    make_record(
                        make_documents("w"),
                        source_id=f"peer{number}",
                        endpoint=f"127.0.0.{number}:{listening.port}",
                        role=SourceRole.RELAY,
                    )
                    for number in range(1, 31)
                ]
            )
            async with asyncio.timeout(60):
                while peer.greeted < 30 or trading.node.peers.any or sockets() > before:
                    await asyncio.sleep(0.05)
        finally:
            await trading.close()
            await listening.stop()

    asyncio.run(main())
