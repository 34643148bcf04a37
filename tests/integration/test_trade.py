"""A source's swarm stream with neighbours that lie, keep silent or send invalid messages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from mx import api, codec, runtime
from mx.core.types import AddressTable, SourceRecord, SourceRole
from mx.swarm.origin import MOST_OF_READER
from mx.swarm.stream import from_bytes
from mx.wire.channel import Remote, Role, dial
from mx.wire.place import place_to_wire
from mx.wire.rpc import Stub
from mx.wire.v1 import peer_pb2

pytestmark = pytest.mark.integration

NEWCOMER = "00000000-0000-4000-8000-00000000000{}"
SILENCE_S = 0.3
ANSWER_S = 60.0


@pytest.fixture
def origin(checkpoint: Path, coordinator: str) -> Iterator[api.Source]:
    with api.serve(checkpoint, model="m", coordinator=coordinator) as source:
        yield source


class Neighbour:
    """One end of a raw swarm stream."""

    def __init__(self, call: Any, record: SourceRecord) -> None:
        self.call = call
        self.record = record

    async def send(self, **message: Any) -> None:
        await self.call.write(peer_pb2.SwarmMessage(**message))

    async def hello(self, source_id: str, have: bytes = b"", number: int = 1) -> None:
        own = replace(
            self.record,
            source_id=NEWCOMER.format(number),
            role=SourceRole.RELAY,
            table=AddressTable(self.record.ref.layout, ()),
        )
        hello = peer_pb2.Hello(source_id=source_id, own=codec.source_to_wire(own), have=have)
        await self.send(hello=hello)

    async def receive(self) -> peer_pb2.SwarmMessage | None:
        """Return the next message, None once the other end has closed."""
        try:
            message = await asyncio.wait_for(self.call.read(), ANSWER_S)
        except Exception as error:
            if type(error).__name__ != "AioRpcError":
                raise
            return None
        return message if isinstance(message, peer_pb2.SwarmMessage) else None


Script = Callable[[Neighbour, str], Awaitable[None]]


def stream(origin: api.Source, *scripts: Script) -> None:
    """Run the scripts at the same time, each as a neighbour of its own."""

    async def one(channel: Any, record: SourceRecord, script: Script) -> None:
        service = peer_pb2.DESCRIPTOR.services_by_name["Peer"]
        call = Stub(channel, service, Remote(Role.SOURCE, origin.endpoint)).Trade()
        try:
            await script(Neighbour(call, record), record.source_id)
        finally:
            call.cancel()

    async def all_of_them(channel: Any, stub: Stub, record: SourceRecord) -> None:
        await asyncio.gather(*(one(channel, record, script) for script in scripts))

    _with_channel(origin, all_of_them)


def call_source(
    origin: api.Source, script: Callable[[Stub, SourceRecord], Awaitable[None]]
) -> None:
    """Run a script that makes calls of its own to the source."""
    _with_channel(origin, lambda channel, stub, record: script(stub, record))


def _with_channel(
    origin: api.Source, script: Callable[[Any, Stub, SourceRecord], Awaitable[None]]
) -> None:
    async def run() -> None:
        channel = dial(origin.endpoint)
        service = peer_pb2.DESCRIPTOR.services_by_name["Peer"]
        stub = Stub(channel, service, Remote(Role.SOURCE, origin.endpoint))
        described = await stub.Describe(peer_pb2.DescribeRequest())
        record = codec.source_from_wire(described.sources[0])
        try:
            await script(channel, stub, record)
        finally:
            await channel.close(None)

    loop = runtime.acquire()
    try:
        loop.run(run())
    finally:
        runtime.release(loop)


async def welcomed(neighbour: Neighbour, source_id: str, number: int = 1) -> None:
    await neighbour.hello(source_id, number=number)
    message = await neighbour.receive()
    assert message is not None
    assert message.welcome.accepted
    assert message.welcome.seeds
    assert not message.welcome.coordinated  # no other pull reads


def still_serves(origin: api.Source) -> None:
    stream(origin, welcomed)
    with api.pull("m", coordinator=origin.coordinator_address, attach=False) as pull:
        assert pull.wait(30).bytes == origin.manifest.layout.payload_nbytes


@pytest.mark.parametrize(
    "invalid",
    [
        {"request": 1 << 31},
        {"finished": 4000000000},
        {"have": b"\xff" * 1000},
        {"allow": 0},
        {"suggest": 0},
        {"peers": peer_pb2.Peers()},
        {"welcome": peer_pb2.Welcome(accepted=True)},
    ],
    ids=lambda invalid: next(iter(invalid)),
)
def test_an_invalid_message_ends_the_stream_and_nothing_else(
    origin: api.Source, invalid: dict[str, Any]
) -> None:
    async def script(neighbour: Neighbour, source_id: str) -> None:
        await welcomed(neighbour, source_id)
        await neighbour.send(**invalid)
        assert await neighbour.receive() is None

    stream(origin, script)
    still_serves(origin)


def test_a_message_that_only_a_later_release_knows_is_ignored(origin: api.Source) -> None:
    async def script(neighbour: Neighbour, source_id: str) -> None:
        await welcomed(neighbour, source_id)
        await neighbour.send()
        await neighbour.send(request=0)
        answer = await neighbour.receive()
        assert answer is not None, "the stream has ended"
        assert answer.WhichOneof("message") in ("allow", "reject", "have"), answer

    stream(origin, script)


def test_a_stream_begins_with_a_hello_to_a_source_that_is_there(origin: api.Source) -> None:
    async def rude(neighbour: Neighbour, source_id: str) -> None:
        await neighbour.send(request=0)
        assert await neighbour.receive() is None

    async def lost(neighbour: Neighbour, source_id: str) -> None:
        await neighbour.hello(NEWCOMER.format(7))
        assert await neighbour.receive() is None

    async def boastful(neighbour: Neighbour, source_id: str) -> None:
        await neighbour.hello(source_id, have=b"\xff" * 100_000)
        assert await neighbour.receive() is None

    async def other(neighbour: Neighbour, source_id: str) -> None:
        ref = replace(neighbour.record.ref, layout=bytes(32))
        table = replace(neighbour.record.table, layout_digest=ref.layout)
        neighbour.record = replace(neighbour.record, ref=ref, table=table)
        await neighbour.hello(source_id)
        assert await neighbour.receive() is None

    stream(origin, rude, lost, boastful, other)
    still_serves(origin)


def test_a_newcomer_gets_a_list_of_the_other_pulls(origin: api.Source) -> None:
    there, seen = asyncio.Event(), asyncio.Event()

    async def first(neighbour: Neighbour, source_id: str) -> None:
        await welcomed(neighbour, source_id, 1)
        there.set()
        await asyncio.wait_for(seen.wait(), ANSWER_S)

    async def second(neighbour: Neighbour, source_id: str) -> None:
        await there.wait()
        await welcomed(neighbour, source_id, 2)
        message = await neighbour.receive()
        assert message is not None
        (known,) = message.peers.sources
        assert known.source_id == NEWCOMER.format(1)
        seen.set()

    stream(origin, first, second)


def test_a_request_without_a_suggestion_is_rejected(origin: api.Source) -> None:
    """A seeding source serves its suggestions first; a chunk set has one bit for each chunk."""

    async def script(neighbour: Neighbour, source_id: str) -> None:
        await welcomed(neighbour, source_id)
        await neighbour.send(request=1)
        message = await neighbour.receive()
        assert message is not None
        assert message.WhichOneof("message") == "reject"
        assert message.reject == 1

    stream(origin, script)
    assert from_bytes(b"\x02", 2) == 2


def test_a_lone_reader_is_notified_when_another_comes(origin: api.Source) -> None:
    """On its lease, since it may have no stream; and only pulls that can be part of a swarm."""

    async def opened(stub: Stub, record: SourceRecord, reader_id: str) -> tuple[Any, bool]:
        call = stub.Open()
        request = peer_pb2.OpenRequest(
            source_id=record.source_id,
            identity=record.ref.identity,
            generation=record.generation,
            place=place_to_wire(record.place),
            reader_id=reader_id,
        )
        await call.write(request)
        event = await asyncio.wait_for(call.read(), ANSWER_S)
        return call, event.granted.coordinated

    async def script(stub: Stub, record: SourceRecord) -> None:
        first, coordinated = await opened(stub, record, NEWCOMER.format(1))
        assert not coordinated
        again, coordinated = await opened(stub, record, NEWCOMER.format(1))
        assert not coordinated, "it is the same pull"
        other, coordinated = await opened(stub, record, "")
        assert not coordinated, "it is not a part of a swarm"
        second, coordinated = await opened(stub, record, NEWCOMER.format(2))
        assert coordinated
        for call in (first, again):
            event = await asyncio.wait_for(call.read(), ANSWER_S)
            assert event.WhichOneof("event") == "coordinated"
        for call in (other, second):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(call.read(), SILENCE_S)
        for call in (first, again, other, second):
            call.cancel()

    call_source(origin, script)


def test_a_refused_stream_that_is_not_ended_is_closed(origin: api.Source) -> None:
    async def crowd(channel: Any, stub: Stub, record: SourceRecord) -> None:
        calls = [stub.Trade() for _ in range(MOST_OF_READER + 1)]
        try:
            for call in calls[:-1]:
                await welcomed(Neighbour(call, record), record.source_id)
            refused = Neighbour(calls[-1], record)
            await refused.hello(record.source_id)
            answer = await refused.receive()
            assert answer is not None and not answer.welcome.accepted
            async with asyncio.timeout(60):
                assert await refused.call.code() is grpc.StatusCode.OK
        finally:
            for call in calls:
                call.cancel()

    _with_channel(origin, crowd)
