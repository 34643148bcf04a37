"""What a node has around it: the host of its pull, and a neighbour."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from mx.core.holdings import Holdings
from mx.core.types import SourceRecord
from mx.swarm.node import Node
from mx.swarm.stream import PeerStream
from mx.wire.v1 import peer_pb2
from tests.support.records import make_documents, make_record


class FakeNeighbour:
    """A neighbour's end: keeps every message that it was sent."""

    def __init__(self, source_id: str) -> None:
        self.record = make_record(make_documents("w"), source_id=source_id)
        self.messages: list[str] = []
        self.stream = PeerStream(source_id, self._read, self._write)

    async def _read(self) -> Any:
        await asyncio.Event().wait()

    async def _write(self, message: peer_pb2.SwarmMessage) -> None:
        kind = message.WhichOneof("message")
        self.messages.append(f"{kind} {getattr(message, str(kind))}")


class FakeHost:
    """The host of a pull; keeps what it is listed with."""

    def __init__(self, record: SourceRecord | None = None) -> None:
        self.found = record
        self.listed: tuple[tuple[int, int], ...] = ()

    async def start(self, node: Node) -> None: ...

    def record(self) -> SourceRecord | None:
        return self.found

    async def dial(self, record: SourceRecord) -> PeerStream:
        raise AssertionError(f"{record.endpoint} was dialled")

    async def keep_listed(
        self, holdings: Holdings, sources: Callable[[], Sequence[SourceRecord]]
    ) -> None:
        while not holdings.whole:
            self.listed = holdings.layers()
            await asyncio.sleep(0.01)
        self.listed = holdings.layers()

    async def close(self) -> None: ...
