"""A hostile peer in a process of its own: it speaks the real protocol to every source of a model,
requests slots, accepts suggestions, and reads nothing.

    python -m tests.integration.slot_hog --coordinator HOST:PORT [--ids N] [--streams N] [--mute]

It prints one JSON object a line: {"got": "allow" | "reject", "source": ENDPOINT, "id": ID,
"chunk": N} for what a source sends, {"left": ENDPOINT, "id": ID} where a source ends a stream.
Sources that start later are attacked as well.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import uuid
from dataclasses import replace
from typing import Any

import grpc.aio

from mx import codec
from mx.core.types import AddressTable, SourceRecord, SourceRole
from mx.errors import MxError
from mx.wire.channel import Remote, Role, dial
from mx.wire.client import CoordinatorClient
from mx.wire.rpc import Stub
from mx.wire.v1 import peer_pb2

LOOK_S = 0.3
AGAIN_S = 1.0
#: Beyond this many streams in all it opens no more.
MOST_STREAMS = 400


def report(**what: Any) -> None:
    print(json.dumps(what), flush=True)


class Hog:
    """One identity: `streams` streams to each source that it is sent to."""

    def __init__(self, own_id: str, *, mute: bool) -> None:
        self.own_id = own_id
        self._mute = mute  # accepts suggestions without even requesting the chunks

    async def attack(self, record: SourceRecord) -> None:
        """Occupy the source until the process ends."""
        channel = dial(record.endpoint, insecure=True)
        service = peer_pb2.DESCRIPTOR.services_by_name["Peer"]
        stub = Stub(channel, service, Remote(Role.SOURCE, record.endpoint))
        lease = asyncio.create_task(self._lease(stub, record))
        try:
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, MxError):
                    await self._stream(stub, record)
                report(left=record.endpoint, id=self.own_id)
                await asyncio.sleep(AGAIN_S)
        finally:
            lease.cancel()
            await channel.close(None)

    async def _lease(self, stub: Stub, record: SourceRecord) -> None:
        """A grant, held and renewed, and never used."""
        while True:
            try:
                call = stub.Open()
                request = peer_pb2.OpenRequest(
                    source_id=record.source_id,
                    identity=record.ref.identity,
                    generation=record.generation,
                    reader_id=self.own_id,
                )
                while True:
                    await call.write(request)
                    await call.read()
                    await asyncio.sleep(1.0)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, MxError):
                await asyncio.sleep(AGAIN_S)

    async def _stream(self, stub: Stub, record: SourceRecord) -> None:
        call = stub.Trade()
        own = replace(
            record,
            source_id=self.own_id,
            role=SourceRole.RELAY,
            table=AddressTable(record.ref.layout, ()),
        )
        hello = peer_pb2.Hello(source_id=record.source_id, own=codec.source_to_wire(own))
        await call.write(peer_pb2.SwarmMessage(hello=hello))
        await call.write(peer_pb2.SwarmMessage(coordinated=True))
        requesting = asyncio.create_task(self._request(call))
        try:
            while isinstance(message := await call.read(), peer_pb2.SwarmMessage):
                kind = message.WhichOneof("message")
                if kind == "suggest" and not self._mute:
                    await call.write(peer_pb2.SwarmMessage(request=message.suggest))
                if kind in ("allow", "reject"):
                    chunk = getattr(message, kind)
                    report(got=kind, source=record.endpoint, id=self.own_id, chunk=chunk)
        finally:
            requesting.cancel()

    async def _request(self, call: Any) -> None:
        """Request chunk after chunk, and `unchoke` for every free slot."""
        chunk = 0
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while not self._mute:
                await call.write(peer_pb2.SwarmMessage(request=chunk % 8))
                await call.write(peer_pb2.SwarmMessage(interested=True))
                chunk += 1
                await asyncio.sleep(0.2)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--ids", type=int, default=1)
    parser.add_argument("--streams", type=int, default=1, help="to each source, of each id")
    parser.add_argument(
        "--mute", action="store_true", help="accept suggestions and request nothing"
    )
    arguments = parser.parse_args()
    hogs = [Hog(str(uuid.uuid4()), mute=arguments.mute) for _ in range(arguments.ids)]
    client = CoordinatorClient(arguments.coordinator, insecure=True)
    attacked: dict[str, list[asyncio.Task[None]]] = {}
    streams = 0
    while True:
        try:
            sources = [status.record for status in await client.list_sources("")]
        except MxError:
            sources = []
        for record in sources:
            here = len(hogs) * arguments.streams
            if record.source_id in attacked or streams + here > MOST_STREAMS:
                continue
            streams += here
            attacked[record.source_id] = [
                asyncio.create_task(hog.attack(record))
                for hog in hogs
                for _ in range(arguments.streams)
            ]
        await asyncio.sleep(LOOK_S)


if __name__ == "__main__":
    asyncio.run(main())
