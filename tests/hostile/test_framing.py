"""Peers that pass for others, so that these are blamed for what they do."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from mx.core.types import SourceRecord, SourceRole
from mx.swarm.stream import PeerStream
from tests.support.records import make_documents, make_record
from tests.unit.test_swarm_node import FakeNeighbour, Reads, node_of

HONEST = "10.0.0.1:7000"


async def test_a_peer_that_claims_the_id_of_another_source() -> None:
    """The id of a source is in every listing: what a peer does that greets with it is not the
    source's fault, which is dialled all the same."""
    dialled: list[str] = []
    there = asyncio.Event()

    async def dial(record: SourceRecord) -> PeerStream:
        dialled.append(record.endpoint)
        there.set()
        return FakeNeighbour(record.source_id).stream

    liar = FakeNeighbour("source")
    claimed = replace(liar.record, role=SourceRole.RELAY)
    honest = replace(claimed, endpoint=HONEST)
    node = node_of(Reads(["source"]), dial, make_record(make_documents("w"), source_id="own"))
    try:
        trading = asyncio.create_task(node.trade(claimed, b"", liar.stream))
        await asyncio.sleep(0)
        node.lost("source", for_good=True)  # as after wrong bytes from the liar
        liar.stream.close()
        await trading
        node.peers.met([honest])
        await asyncio.wait_for(there.wait(), 5)
        assert dialled == [HONEST]
    finally:
        await node.close()
