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
from mx.puller.company import Company
from mx.puller.crew import Crew
from mx.puller.engine import Engine
from mx.puller.lanes import Lane
from mx.puller.options import PullOptions
from mx.puller.relay import RelayHost
from mx.puller.swarming import Swarming
from mx.units import MIB
from mx.wire.server import Service, listen
from mx.wire.v1 import peer_pb2, peer_pb2_grpc
from tests.records import make_documents, make_record
from tests.unit.test_engine import BYTES, HeldSession, Lease, Listener
from tests.unit.test_member import Heard

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


def given(swarming: Swarming) -> list[int]:
    """The chunks that a neighbour gets when it asks for each."""
    neighbour = Heard("neighbour")
    number = swarming.member.joined(neighbour.record, neighbour.talk, b"", seeds=False)
    found = []
    for chunk in range(LAYERS):
        neighbour.talk._unsent = asyncio.Queue()
        swarming.member.heard(number, peer_pb2.SwarmMessage(ask=chunk))
        answer = neighbour.talk._unsent.get_nowait()
        if answer.WhichOneof("message") == "go":
            found.append(answer.go)
        swarming.member.heard(number, peer_pb2.SwarmMessage(done=chunk))
    swarming.member.parted(number)
    return found


@pytest.mark.parametrize("gated", [False, True])
def test_what_came_before_is_given_and_nothing_is_listed_that_is_not(gated: bool) -> None:
    """One chunk from disk, one read alone, then others come, then the last one."""

    async def main() -> None:
        manifest = manifest_of_three_layers()
        arena = bytearray(BYTES[:MIB]) + bytearray(manifest.layout.arena_nbytes - MIB)
        engine = Engine(manifest, memoryview(arena), Listener())
        engine.start()
        assert engine.prefill("resume", "/some/folder", [0]) == MIB
        session = HeldSession()
        engine.add_lane(Lane("held", "peer", session, Lease(), 0.0))
        session.land()
        nothing = cast(Any, None)
        crew = Crew(Plan((), (), ()), nothing, nothing, nothing, [])
        host, options = Host(), PullOptions("m", coordinator="nowhere:1")
        swarming = Swarming(
            "own", options, cast(RelayHost, host), engine, crew, lambda sources: Plan((), (), ())
        )
        try:
            if gated:
                swarming.member.go_gated()
            swarming.begin(ModelKey("m", "main", "checkpoint"), cast(Arena, None), [])
            await asyncio.sleep(0.01)
            assert given(swarming) == [0, 1]
            assert host.listed == [(0, 2)]
            session.land()
            await asyncio.sleep(0.01)
            swarming.reading_ended()
            if not gated:
                swarming.member.go_gated()  # others come when it is through
            assert given(swarming) == [0, 1, 2]
            assert swarming.member.complete
            while host.listed != [(0, LAYERS)]:
                await asyncio.sleep(0.05)
        finally:
            await swarming.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_pull_does_not_take_itself_for_somebody_who_gives() -> None:
    async def main() -> None:
        options = PullOptions("m", relay=lambda source_id: cast(RelayHost, Host()))
        company = Company(options, lambda sources: Plan((), (), ()))
        part = make_record(
            make_documents("w"), source_id=company.reader_id, held=(), role=SourceRole.RELAY
        )
        assert not part.whole
        company.met([part])
        assert not company.others_give

    asyncio.run(main())


class Known(Host):
    """One that others can find."""

    def record(self) -> SourceRecord | None:
        return make_record(make_documents("w"), role=SourceRole.RELAY)


class Unwelcoming(peer_pb2_grpc.PeerServicer):
    """A peer that wants no neighbours."""

    def __init__(self) -> None:
        self.greeted = 0

    async def Mingle(self, requests: Any, context: Any) -> None:
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
        engine = Engine(manifest_of_three_layers(), memoryview(bytearray(LAYERS * MIB)), Listener())
        nothing, peer = cast(Any, None), Unwelcoming()
        crew = Crew(Plan((), (), ()), nothing, nothing, nothing, [])
        service = Service(peer_pb2.DESCRIPTOR.services_by_name["Peer"], peer)
        listening = await listen("0.0.0.0:0", [service], insecure=True)
        options = PullOptions("m", insecure=True)
        swarming = Swarming(
            "own", options, cast(RelayHost, Known()), engine, crew, lambda sources: Plan((), (), ())
        )
        before = sockets()
        try:
            swarming.met(
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
                while peer.greeted < 30 or swarming.member.acquaintances.any or sockets() > before:
                    await asyncio.sleep(0.05)
        finally:
            await swarming.close()
            await listening.stop()

    asyncio.run(main())
