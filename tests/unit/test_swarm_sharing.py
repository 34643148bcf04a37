"""A pull gives exactly the chunks that it is listed with, whenever others could first find it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any

import pytest

from benchmarks.roots import root_of
from mx.core import manifest as manifests
from mx.core.digest import block_digest
from mx.core.pages import Pages
from mx.core.paths import Medium
from mx.core.swarm.neighbours import REFUSALS
from mx.core.types import Manifest, Packaging, SourceRole
from mx.errors import LocalError
from mx.fetching.transfer import Transfer
from mx.source.service import PeerServicer
from mx.swarm.node import Node
from mx.swarm.sharing import Sharing
from mx.swarm.stream import StreamDialer
from mx.units import MIB
from mx.wire.server import Service, listen
from mx.wire.v1 import peer_pb2
from tests.support.fake_host import FakeHost, FakeNeighbour
from tests.support.held_sessions import BYTES, HeldSession, Listener, connection_of
from tests.support.records import make_documents, make_record

LAYERS = 3


def manifest_of_three_layers() -> Manifest:
    specs = [
        manifests.TensorSpec(f"model.layers.{n}.mlp.weight", "U8", (MIB,)) for n in range(LAYERS)
    ]
    layout = manifests.plan_layout(specs)
    roots = {spec.name: root_of(BYTES[n * MIB : (n + 1) * MIB]) for n, spec in enumerate(specs)}
    return manifests.encode(layout, Packaging(), roots)


def transfer_of(manifest: Manifest, arena: bytearray) -> Transfer:
    """Return a transfer that knows every page."""
    pages = Pages.whole(
        manifest, [block_digest(BYTES[n * MIB : (n + 1) * MIB]) for n in range(LAYERS)]
    )
    return Transfer(manifest, pages, memoryview(arena), Listener())


def sharing_of(transfer: Transfer, host: FakeHost | None, *, always: bool = False) -> Sharing:
    return Sharing(
        "own",
        transfer.manifest.grid,
        transfer,
        None if host is None else lambda: host,
        lambda _: True,
        lambda: None,
        coordinate_always=always,
    )


def node_of(sharing: Sharing) -> Node:
    """Return the node, which there is since others may find the pull."""
    assert sharing._node is not None
    return sharing._node


def given(node: Node) -> list[int]:
    """Return the chunks that a neighbour is allowed when it requests each."""
    neighbour = FakeNeighbour("neighbour")
    number = node.joined(neighbour.record, neighbour.stream, b"", seeds=False)
    found = []
    for chunk in range(LAYERS):
        neighbour.stream._unsent = asyncio.Queue()
        node.heard(number, peer_pb2.SwarmMessage(request=chunk))
        answer = neighbour.stream._unsent.get_nowait()
        if answer.WhichOneof("message") == "allow":
            found.append(answer.allow)
        node.heard(number, peer_pb2.SwarmMessage(finished=chunk))
    node.parted(number)
    return found


@pytest.mark.parametrize("coordinated", [False, True])
def test_earlier_chunks_are_given_and_no_chunk_is_listed_that_is_not(coordinated: bool) -> None:
    """A chunk is from disk, one is read alone, then other pulls come, then the last chunk."""

    async def main() -> None:
        manifest = manifest_of_three_layers()
        arena = bytearray(BYTES[:MIB]) + bytearray(manifest.layout.arena_nbytes - MIB)
        transfer = transfer_of(manifest, arena)
        transfer.start()
        assert transfer.prefill("resume", "/some/folder", [0]) == MIB
        session = HeldSession()
        transfer.add_connection(connection_of(session))
        session.land()
        host = FakeHost()
        sharing = sharing_of(transfer, host)
        try:
            if coordinated:
                sharing.coordinate()
            sharing.reading_began()
            async with asyncio.timeout(30):
                while host.listed != ((0, 2),):
                    await asyncio.sleep(0.01)
            node = node_of(sharing)
            assert given(node) == [0, 1]
            session.land()
            await asyncio.sleep(0.01)
            if not coordinated:
                sharing.coordinate()  # other pulls come when it is complete
            sharing.reading_ended()
            assert given(node) == [0, 1, 2]
            assert node.complete
            async with asyncio.timeout(30):
                while host.listed != ((0, LAYERS),):
                    await asyncio.sleep(0.01)
        finally:
            await sharing.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_pull_does_not_count_itself_as_a_source_of_parts() -> None:
    async def main() -> None:
        sharing = sharing_of(transfer_of_three_layers(), FakeHost())
        documents = make_documents("w")
        try:
            own = make_record(documents, source_id="own", held=(), role=SourceRole.RELAY)
            assert not own.whole
            sharing.met([own])
            sharing.no_whole_source()
            assert not sharing.coordinated
            other = make_record(documents, source_id="other", held=(), role=SourceRole.RELAY)
            sharing.met([own, other])
            sharing.no_whole_source()
            assert sharing.coordinated
        finally:
            await sharing.close()

    asyncio.run(main())


def test_without_a_host_a_pull_reads_freely() -> None:
    """Others could not read from it, so it takes no part in a swarm."""

    async def main() -> None:
        sharing = sharing_of(transfer_of_three_layers(), None)
        try:
            sharing.coordinate()
            assert not sharing.coordinated and not sharing.begun
        finally:
            await sharing.close()

    asyncio.run(main())


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("medium", Medium)
def test_readers_of_one_source_coordinate_where_they_share_a_link(
    medium: Medium, always: bool
) -> None:
    async def run() -> bool:
        sharing = sharing_of(transfer_of_three_layers(), FakeHost(), always=always)
        try:
            sharing.shared(medium)
            return sharing.coordinated
        finally:
            await sharing.close()

    assert asyncio.run(run()) is (always or medium is Medium.NETWORK)


def test_without_a_word_of_others_there_is_no_node_and_no_host() -> None:
    """What a pull that is over soon does not need is not made; what became of sources meanwhile is
    not forgotten."""

    async def main() -> None:
        made: list[FakeHost] = []
        transfer = transfer_of_three_layers()

        def make() -> FakeHost:
            made.append(FakeHost(make_record(make_documents("w"), role=SourceRole.RELAY)))
            return made[0]

        sharing = Sharing(
            "own", transfer.manifest.grid, transfer, make, lambda _: True, lambda: None
        )
        liar = make_record(make_documents("w"), source_id="liar")
        silent = make_record(make_documents("w"), source_id="silent")
        try:
            sharing.met([liar, silent])
            sharing.reading_began()
            sharing.lost(liar.key, for_good=True)
            sharing.gives_no_more(silent.key)
            sharing.shared(Medium.MEMORY)
            assert not made and sharing.record() is None
            sharing.shared(Medium.NETWORK)
            assert sharing.coordinated and len(made) == 1
            node = node_of(sharing)
            async with asyncio.timeout(30):  # the host listens: all sources that are known are met
                while not node.peers.known.banned(liar.key):
                    await asyncio.sleep(0.01)
            assert not node.reaches(silent)
            assert not node.peers.any
        finally:
            await sharing.close()

    asyncio.run(main())


class Unwelcoming(PeerServicer):
    """A peer that refuses every hello."""

    def __init__(self) -> None:
        self.greeted = 0

    async def Trade(self, requests: Any, context: Any) -> None:
        self.greeted += 1
        await context.write(peer_pb2.SwarmMessage(welcome=peer_pb2.Welcome(accepted=False)))
        async for _ in requests:
            pass


def transfer_of_three_layers() -> Transfer:
    return transfer_of(manifest_of_three_layers(), bytearray(LAYERS * MIB))


def sockets() -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found


def test_peers_that_refuse_leave_no_channel_behind() -> None:
    """Other peers may name any number of them."""

    async def main() -> None:
        peer, streams = Unwelcoming(), StreamDialer(None, insecure=True)
        service = Service(peer_pb2.DESCRIPTOR.services_by_name["Peer"], peer)
        listening = await listen("0.0.0.0:0", [service], insecure=True)
        known = FakeHost(make_record(make_documents("w"), role=SourceRole.RELAY))
        known.dial = streams.dial  # type: ignore[method-assign]
        sharing = sharing_of(transfer_of_three_layers(), known)
        sharing.begin()
        before = sockets()
        try:
            named = [
                make_record(
                    make_documents("w"),
                    source_id=f"peer{number}",
                    endpoint=f"127.0.0.{number}:{listening.port}",
                    role=SourceRole.RELAY,
                )
                for number in range(1, 31)
            ]
            for greeted in (REFUSALS, len(named)):  # the second list goes on with the others
                sharing.met(named)
                async with asyncio.timeout(60):
                    while (
                        peer.greeted < greeted or node_of(sharing).peers.any or sockets() > before
                    ):
                        await asyncio.sleep(0.05)
        finally:
            await sharing.close()
            await streams.close()
            await listening.stop()

    asyncio.run(main())


class SlowHost(FakeHost):
    """Takes a moment to listen, and may fail to."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__()
        self.fails = fails
        self.steps: list[str] = []

    async def start(self, node: Node) -> None:
        self.steps.append("starts")
        await asyncio.sleep(0.05)
        self.steps.append("started")
        if self.fails:
            raise LocalError("no transport can serve it")

    async def close(self) -> None:
        self.steps.append("closed")


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_host_is_closed_whatever_became_of_its_start(fails: bool, at_once: bool) -> None:
    async def main() -> None:
        host, transfer = SlowHost(fails=fails), transfer_of_three_layers()
        sharing = sharing_of(transfer, host)
        sharing.coordinate()
        coordinated = [sharing.coordinated]
        while not at_once and "started" not in host.steps:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)  # what follows from that
        coordinated.append(sharing.coordinated)
        assert coordinated == [True, at_once or not fails]
        await sharing.close()
        assert host.steps == ["starts", "started", "closed"]

    asyncio.run(main())
