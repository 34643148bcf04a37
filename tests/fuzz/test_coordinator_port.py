"""Anything at all on the coordinator's port: it refuses with a clear status, and lives."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mx import codec
from mx.coordinator.daemon import Coordinator
from mx.core.versions import headers
from mx.wire.client import CoordinatorClient
from mx.wire.documents import pages
from mx.wire.rows import encode_rows
from mx.wire.v1 import coordinator_pb2 as pb
from tests.support.daemon import daemon, terminate
from tests.support.http2 import PREFACE, frames
from tests.support.records import (
    by_digest,
    make_documents,
    make_record,
    registration,
    scattered_rows,
)

pytestmark = pytest.mark.integration

DOCUMENTS = make_documents("A")
SECRET = b"s" * 32
SERVICE = pb.DESCRIPTOR.services_by_name["Coordinator"]


noise = st.binary(max_size=300) | st.lists(frames, max_size=8).map(
    lambda parts: PREFACE + b"".join(parts)
)


def test_raw_bytes() -> None:
    with daemon() as (process, address):
        host, _, port = address.rpartition(":")

        @settings(max_examples=150)
        @given(noise, st.booleans())
        def attack(data: bytes, hang_up: bool) -> None:
            with (
                contextlib.suppress(OSError),  # it has hung up on noise
                socket.create_connection((host, int(port)), timeout=5) as connection,
            ):
                connection.sendall(data)
                if hang_up:
                    connection.shutdown(socket.SHUT_WR)
                    connection.settimeout(0.02)
                    connection.recv(4096)

        attack()

        async def still_there() -> None:
            client = CoordinatorClient(address)
            try:
                assert await client.list_models() == []
            finally:
                await client.close()

        asyncio.run(still_there())
        assert terminate(process) == 0


def valid_requests() -> dict[str, list[bytes]]:
    """A well-formed exchange for every method."""
    rows = scattered_rows(3)
    record = make_record(DOCUMENTS, rows=rows, held=((0, 1),))
    source_id = record.source_id
    digests = [digest for digest, _ in record.ref.documents]
    register = [
        pb.RegisterRequest(source=codec.registration_to_wire(registration(record, SECRET))),
        *(
            pb.RegisterRequest(page=page)
            for digest, data in by_digest([*DOCUMENTS, encode_rows(rows)]).items()
            for page in pages(digest, data)
        ),
    ]
    requests: dict[str, list[Any]] = {
        "Register": register,
        "Missing": [pb.MissingRequest(digests=digests)],
        "Heartbeat": [
            pb.HeartbeatRequest(
                source_id=source_id,
                source_secret=SECRET,
                state=pb.SOURCE_STATE_SERVING,
                gb_per_s=1.5,
            )
        ]
        * 2,
        "Advertise": [
            pb.AdvertiseRequest(
                source_id=source_id,
                generation=1,
                held=codec.ranges_to_wire([(0, 3)]),
                source_secret=SECRET,
            )
        ],
        "Deregister": [pb.DeregisterRequest(source_id=source_id, source_secret=SECRET)],
        "Resolve": [pb.ResolveRequest(name="llama@" + digests[0].hex()[:16], revision="main")],
        "ListBundles": [pb.ListBundlesRequest(name="llama")],
        "ListModels": [pb.ListModelsRequest()],
        "ListSources": [pb.ListSourcesRequest(name="llama", pulls=True)],
        "Progress": [
            pb.ProgressRequest(
                pull=pb.PullProgress(
                    pull_id=source_id,
                    model=codec.key_to_wire(record.model),
                    phase=pb.PullProgress.PHASE_RUNNING,
                    layers=4,
                    ready=b"\x01",
                    nbytes=100,
                    done_bytes=done_bytes,
                    seconds=1.5,
                    sources=["127.0.0.1:7700"],
                )
            )
            for done_bytes in (10, 20)
        ],
    }
    return {
        method: [message.SerializeToString() for message in messages]
        for method, messages in requests.items()
    }


REQUESTS = valid_requests()
#: Nothing that a client can send is our fault.
NEVER = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DEADLINE_EXCEEDED}
#: What grpc.aio may say, with INTERNAL, instead of the status that it was sent: the call has ended
#: while it still writes. Then the call is made again.
OWN_ERROR = "Internal error from Core"


async def call(channel: Any, method: str, messages: list[bytes], tries: int = 5) -> grpc.StatusCode:
    descriptor = SERVICE.methods_by_name[method]
    path = f"/{SERVICE.full_name}/{method}"

    async def stream() -> AsyncIterator[bytes]:
        for message in messages:
            yield message

    request: Any = stream() if descriptor.client_streaming else messages[0]
    kinds = (descriptor.client_streaming, descriptor.server_streaming)
    make = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }[kinds]
    try:
        answer = make(path)(request, timeout=10, metadata=headers())
        if descriptor.server_streaming:
            async for _ in answer:
                pass
        else:
            await answer
    except grpc.aio.AioRpcError as error:
        if error.details() == OWN_ERROR and tries > 1:
            return await call(channel, method, messages, tries - 1)
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


@st.composite
def mangled(draw: st.DrawFn) -> tuple[str, list[bytes]]:
    """A good exchange with bytes changed, cut off or repeated, or messages swapped about."""
    method = draw(st.sampled_from(sorted(REQUESTS)))
    messages = [bytearray(message) for message in REQUESTS[method]]
    for _ in range(draw(st.integers(0, 4))):
        message = draw(st.sampled_from(messages))
        if message:
            message[draw(st.integers(0, len(message) - 1))] = draw(st.integers(0, 255))
    if draw(st.booleans()):
        message = draw(st.sampled_from(messages))
        del message[draw(st.integers(0, len(message))) :]
    if len(messages) > 1 and draw(st.booleans()):
        messages = draw(st.permutations(messages))[: draw(st.integers(1, len(messages)))]
    return method, [bytes(message) for message in messages]


def test_mangled_requests() -> None:
    async def start() -> tuple[Coordinator, CoordinatorClient]:
        coordinator = Coordinator()
        return coordinator, CoordinatorClient(await coordinator.start("127.0.0.1:0"))

    with asyncio.Runner() as runner:
        coordinator, client = runner.run(start())

        @settings(max_examples=300)
        @given(mangled())
        def attack(exchange: tuple[str, list[bytes]]) -> None:
            assert runner.run(call(client.link.channel, *exchange)) not in NEVER

        async def stop() -> None:
            await client.close()
            await coordinator.stop()

        try:
            attack()
            assert runner.run(call(client.link.channel, "Register", REQUESTS["Register"])) in (
                grpc.StatusCode.OK,
                grpc.StatusCode.FAILED_PRECONDITION,  # a mangled one raised the generation
                grpc.StatusCode.PERMISSION_DENIED,  # or took the source id with another secret
                grpc.StatusCode.ALREADY_EXISTS,
            )
            # Whatever was let in, lists can be read, and nothing in them is skipped.
            for asked in (client.list_models(), client.list_sources(), client.overview()):
                runner.run(asked)
            assert not client._lists._said
        finally:
            runner.run(stop())
