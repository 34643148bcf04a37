"""One pull's part in a swarm: its messages to neighbours of different use."""

from __future__ import annotations

import ast
import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from mx.core.grid import ChunkGrid, Layer
from mx.core.holdings import Holdings, HoldingsListener
from mx.core.swarm.neighbours import MOST
from mx.core.types import SourceRecord, SourceRole
from mx.swarm.node import Node
from mx.swarm.stream import PeerStream, from_bytes, to_bytes
from mx.swarm.uploads import Uploads
from mx.units import MIB
from mx.wire.v1 import peer_pb2
from tests.support.fake_host import FakeNeighbour
from tests.support.records import make_documents, make_record

CHUNKS = 3
ALL = to_bytes(0b111)


class Reads:
    """The node of a pull that reaches only the named sources."""

    def __init__(self, reached: Sequence[str]) -> None:
        self.reached = reached
        layer = Layer(0, "layer", CHUNKS * MIB, 0, ((0, CHUNKS * MIB),), 0)
        self.grid = ChunkGrid([layer], MIB)
        self.holdings = Holdings(self.grid)

    def subscribe(self, listener: HoldingsListener) -> int:
        return self.holdings.subscribe(listener)

    def coordinate(self) -> None: ...

    def read_freely(self) -> None: ...

    def allow(self, source: str, chunk: int) -> bool:
        return True

    def withdraw(self, source: str, chunk: int) -> None: ...

    def reaches(self, source: SourceRecord) -> bool:
        return source.source_id in self.reached


def node_of(
    reads: Reads,
    dial: Callable[[SourceRecord], Awaitable[PeerStream]],
    record: SourceRecord | None = None,
) -> Node:
    return Node("own", reads.grid, reads, lambda: record, dial, reads.reaches, lambda: None)


async def settled() -> None:
    """Let everything that is ready run, and what that makes ready."""
    for _ in range(100):
        await asyncio.sleep(0)


async def _never(record: SourceRecord) -> PeerStream:
    raise AssertionError(f"{record.endpoint} was dialled")


async def greeted(
    neighbours: Sequence[FakeNeighbour], reads: Reads, coordinated_first: bool
) -> None:
    """Greet these neighbours, which hold everything; then each requests a chunk that the pull does
    not hold. The neighbours keep the messages that they get."""

    node = node_of(reads, _never)
    listening = []
    try:
        if coordinated_first:
            node.coordinate()
        for each in neighbours:
            number = node.joined(each.record, each.stream, ALL, seeds=False)
            listening.append(asyncio.create_task(each.stream.listen(lambda message: None)))
            node.heard(number, peer_pb2.SwarmMessage(have=ALL))
            node.heard(number, peer_pb2.SwarmMessage(request=0))
        if not coordinated_first:
            node.coordinate()
        await settled()
        assert [record.source_id for _, record in node.reading_from.values()] == ["near"]
    finally:
        for each in neighbours:
            each.stream.close()
        await asyncio.gather(*listening)
        await node.close()


def test_a_neighbour_without_a_path_gets_answers_but_no_requests() -> None:
    for coordinated_first in (True, False):
        near, far = FakeNeighbour("near"), FakeNeighbour("far")
        reads = Reads(["near"])
        asyncio.run(greeted([far, near], reads, coordinated_first))
        assert far.messages == ["reject 0"]
        assert sorted(near.messages) == ["reject 0", "request 0"]


def test_a_neighbour_that_gives_no_more_is_asked_for_nothing_and_may_read_on() -> None:
    async def run() -> list[str]:
        reads, peer = Reads(["peer"]), FakeNeighbour("peer")
        reads.holdings.add(0)
        node = node_of(reads, _never)
        node.coordinate()
        number = node.joined(peer.record, peer.stream, ALL, seeds=False)
        listening = asyncio.create_task(peer.stream.listen(lambda message: None))
        await settled()
        asked = list(peer.messages)
        node.gives_no_more(peer.record.key)
        assert not node.reading_from
        node.heard(number, peer_pb2.SwarmMessage(have=ALL))
        node.heard(number, peer_pb2.SwarmMessage(request=0))
        await settled()
        peer.stream.close()
        await listening
        await node.close()
        assert any(message.startswith("request") for message in asked)
        return peer.messages[len(asked) :]

    assert asyncio.run(run()) == ["allow 0"]


def test_the_pull_is_woken_by_news_once_it_has_waited_in_vain() -> None:
    """It sleeps until an event: what revives its hope is one."""

    async def run() -> list[str]:
        woken: list[str] = []
        reads, peer, other = Reads(["peer", "other"]), FakeNeighbour("peer"), FakeNeighbour("other")
        node = Node(
            "own",
            reads.grid,
            reads,
            lambda: None,
            _never,
            reads.reaches,
            lambda: woken.append(now),
        )
        try:
            now = "free"
            number = node.joined(peer.record, peer.stream, b"", seeds=False)
            assert not woken and node.waits_until_s == -math.inf
            now = "coordinated"
            node.coordinate()
            now = "hopes"
            node.heard(number, peer_pb2.SwarmMessage(have=to_bytes(0)))
            for now in ("news", "a peer"):
                node._patience._news_at_s = -1000.0
                assert node.waits_until_s < time.monotonic()
                if now == "news":
                    node.heard(number, peer_pb2.SwarmMessage(have=to_bytes(0)))
                else:
                    node.joined(other.record, other.stream, b"", seeds=False)
                assert node.waits_until_s > time.monotonic()
            return woken
        finally:
            peer.stream.close()
            other.stream.close()
            await node.close()

    assert asyncio.run(run()) == ["coordinated", "news", "a peer"]


@pytest.mark.parametrize("step", range(8))
def test_a_node_that_is_made_while_chunks_land_announces_every_one(step: int) -> None:
    """Each is in what it says first, or is announced; none is lost between."""
    count = 400

    async def run() -> int:
        reads, peer = Reads(["peer"]), FakeNeighbour("peer")
        layer = Layer(0, "layer", count * MIB, 0, ((0, count * MIB),), 0)
        reads.grid = ChunkGrid([layer], MIB)
        reads.holdings, lock = Holdings(reads.grid), threading.Lock()
        begun = threading.Event()

        def land() -> None:
            for chunk in range(count):
                if chunk == step * count // 8:
                    begun.set()
                with lock:
                    reads.holdings.add(chunk)
                time.sleep(1e-5)  # so that the other thread runs

        def subscribe(listener: HoldingsListener) -> int:
            with lock:
                return reads.holdings.subscribe(listener)

        reads.subscribe = subscribe  # type: ignore[method-assign]
        landing = threading.Thread(target=land)
        landing.start()
        begun.wait()
        node = node_of(reads, _never)
        known = node.held
        node.joined(peer.record, peer.stream, b"", seeds=False)
        listening = asyncio.create_task(peer.stream.listen(lambda message: None))
        try:
            landing.join()
            async with asyncio.timeout(20):
                while known.bit_count() < count:
                    await asyncio.sleep(0.01)
                    for message in peer.messages:
                        kind, _, value = message.partition(" ")
                        if kind == "have":
                            known |= from_bytes(ast.literal_eval(value), count)
        finally:
            peer.stream.close()
            await listening
            await node.close()
        assert not node._receiver.left
        return known

    assert asyncio.run(run()) == (1 << count) - 1


def test_a_pull_that_was_withdrawn_gives_nothing() -> None:
    async def run() -> list[str]:
        reads, peer = Reads(["peer"]), FakeNeighbour("peer")
        reads.holdings.add(0)
        node = node_of(reads, _never)
        number = node.joined(peer.record, peer.stream, to_bytes(0), seeds=False)
        listening = asyncio.create_task(peer.stream.listen(lambda message: None))
        assert node.gives(0) and not node.gives(1) and node.held == 1
        node.withdrawn()
        assert not node.gives(0) and node.held == 0
        node.heard(number, peer_pb2.SwarmMessage(request=0))
        await settled()
        peer.stream.close()
        await listening
        await node.close()
        return peer.messages

    assert asyncio.run(run()) == ["reject 0"]


def test_neighbours_that_were_dialled_are_reported_to_the_server() -> None:
    """Those that dial are known to the server; whether a grant may rest depends on it."""
    traded: list[tuple[str, int]] = []

    async def run() -> None:
        neighbour = FakeNeighbour("near")
        record = replace(neighbour.record, role=SourceRole.RELAY)
        welcome = [peer_pb2.SwarmMessage(welcome=peer_pb2.Welcome(accepted=True))]

        async def read() -> Any:
            if welcome:
                return welcome.pop()
            return await asyncio.Event().wait()

        async def dial(record: SourceRecord) -> PeerStream:
            return PeerStream(record.endpoint, read, neighbour._write)

        node = node_of(Reads(["near"]), dial, record)
        node.watch(lambda name, address: None, lambda name, change: traded.append((name, change)))
        try:
            node.peers.met([record])
            async with asyncio.timeout(60):
                while not traded:
                    await asyncio.sleep(0.01)
            assert traded == [("near", +1)]
            node.peers.leave(record.key)
            async with asyncio.timeout(60):
                while len(traded) < 2:
                    await asyncio.sleep(0.01)
        finally:
            await node.close()

    asyncio.run(run())
    assert traded == [("near", +1), ("near", -1)]


def test_sources_that_a_peer_names_are_not_dialled() -> None:
    """It names pulls, of which few are dialled at a time."""
    dialled: list[str] = []

    async def dial(record: SourceRecord) -> PeerStream:
        dialled.append(record.source_id)
        neighbour = FakeNeighbour(record.source_id)
        return neighbour.stream

    async def run() -> None:
        records = [make_record(make_documents("w"), source_id=name(i)) for i in range(200)]
        relays = [replace(each, role=SourceRole.RELAY) for each in records[100:]]
        reads = Reads([each.source_id for each in records])
        node = node_of(reads, dial, records[0])
        try:
            node.peers.told_of([*records[:100], *relays])
            await settled()
            assert {each.source_id for each in relays}.issuperset(dialled)
            assert 0 < len(dialled) <= MOST
            node.peers.met(records[:1])
            await settled()
            assert records[0].source_id in dialled, "a coordinator lists it"
        finally:
            await node.close()

    def name(number: int) -> str:
        return f"00000000-0000-4000-8000-{number:012}"

    asyncio.run(run())


def test_a_peer_that_claims_the_id_of_another_is_blamed_alone() -> None:
    """The id of a source is in every listing: what a peer does that greets with it is not the
    source's fault, which is dialled all the same."""

    async def run() -> None:
        dialled: list[str] = []
        there = asyncio.Event()

        async def dial(record: SourceRecord) -> PeerStream:
            dialled.append(record.endpoint)
            there.set()
            return FakeNeighbour(record.source_id).stream

        liar = FakeNeighbour("source")
        claimed = replace(liar.record, role=SourceRole.RELAY)
        honest = replace(claimed, endpoint="10.0.0.1:7000")
        node = node_of(Reads(["source"]), dial, make_record(make_documents("w"), source_id="own"))
        try:
            trading = asyncio.create_task(node.trade(claimed, b"", liar.stream))
            await asyncio.sleep(0)
            node.lost(claimed.key, for_good=True)  # as after wrong bytes from the liar
            liar.stream.close()
            await trading
            node.peers.met([claimed, honest])
            await asyncio.wait_for(there.wait(), 60)
            assert dialled == [honest.endpoint]
        finally:
            await node.close()

    asyncio.run(run())


async def test_a_node_sleeps_while_time_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ticks while it reads in coordination, or while a reader has a slot, and not else."""
    monkeypatch.setattr("mx.swarm.node.TICK_S", 0.0)  # once in each turn of the loop
    ticks = 0
    tick = Uploads.tick

    def counted(uploads: Uploads, now_s: float) -> None:
        nonlocal ticks
        ticks += 1
        tick(uploads, now_s)

    async def ticks_in_some_turns() -> int:
        before = ticks
        for _ in range(20):
            await asyncio.sleep(0)
        return ticks - before

    monkeypatch.setattr(Uploads, "tick", counted)
    near, reads = FakeNeighbour("near"), Reads(["near"])
    node = node_of(reads, _never)
    try:
        assert not await ticks_in_some_turns()
        reads.holdings.add(0)
        assert not await ticks_in_some_turns() and node.landed.is_set()
        number = node.joined(near.record, near.stream, to_bytes(0), seeds=False)
        assert not await ticks_in_some_turns()
        node.heard(number, peer_pb2.SwarmMessage(request=0))
        assert await ticks_in_some_turns() > 10  # it has a slot
        node.heard(number, peer_pb2.SwarmMessage(finished=0))
        await ticks_in_some_turns()
        assert not await ticks_in_some_turns()
        node.coordinate()
        assert await ticks_in_some_turns() > 10
    finally:
        near.stream.close()
        await node.close()
