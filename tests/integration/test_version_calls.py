"""Every call to, and of, a process of another version: real servers, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mx.core.topology import Place
from mx.core.versions import HINT, VERSIONS_KEY, WIRE_VERSION, headers, own
from mx.errors import (
    CoordinatorError,
    CoordinatorVersionError,
    PeerProtocolError,
    PeerVersionError,
    UnknownModelError,
)
from mx.swarm.stream import StreamDialer
from mx.wire.channel import dial
from mx.wire.client import CoordinatorClient
from mx.wire.lease import Lease
from mx.wire.rpc import Stub
from mx.wire.server import Service, listen
from mx.wire.status import DETAIL_KEY, Remote, Role, encode_detail, translating
from mx.wire.v1 import common_pb2, coordinator_pb2, peer_pb2
from tests.support.records import make_documents, make_record

pytestmark = pytest.mark.integration

SERVICES = [
    coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"],
    peer_pb2.DESCRIPTOR.services_by_name["Peer"],
    common_pb2.DESCRIPTOR.services_by_name["Documents"],
]
METHODS = [method for service in SERVICES for method in service.methods]
RESOLVE = SERVICES[0].methods_by_name["Resolve"]
NEWER = f"wire={WIRE_VERSION + 1},layout=2,digest=2"
OLDER = "wire 1 (an older mx, which sends no versions)"
#: What a peer sends, and what is said of it.
OTHERS = {
    "older": ((), OLDER),
    "newer": (((VERSIONS_KEY, NEWER),), f"wire {WIRE_VERSION + 1}, layout 2, digest 2"),
    "unreadable": (((VERSIONS_KEY, "what"),), "versions that can't be read: 'what'"),
    "twice": (headers() * 2, "versions that can't be read: 2 texts"),
}
other = pytest.mark.parametrize(("metadata", "said"), OTHERS.values(), ids=OTHERS)


def versions_of(metadata: Any) -> list[str]:
    return [value for key, value in metadata if key == VERSIONS_KEY]


class Untouched:
    """Implements every method; none may be called."""

    def __getattr__(self, name: str) -> Any:
        async def called(requests: Any, context: Any) -> Any:
            raise AssertionError(f"{name} was called")

        return called


@asynccontextmanager
async def server_of(service: ServiceDescriptor) -> AsyncIterator[Any]:
    """A server of this mx, and a channel to it."""
    listening = await listen("127.0.0.1:0", [Service(service, Untouched())])
    channel = dial(f"127.0.0.1:{listening.port}")
    try:
        yield channel
    finally:
        await channel.close(None)
        await listening.stop(0)


class Foreign(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """A server that answers every call with one empty message, or none, or an error; what it says
    of its versions is given."""

    def __init__(
        self, metadata: Any, *, empty: bool = False, detail: bytes = b"", at_the_end: bool = False
    ) -> None:
        self._metadata = tuple(metadata)
        self._empty = empty
        self._detail = detail
        self._at_the_end = at_the_end

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        maker: Any = grpc.stream_stream_rpc_method_handler
        return maker(self._answer)

    async def _answer(self, requests: Any, context: Any) -> None:
        async for _ in requests:
            break
        if self._detail:
            trailers = ((DETAIL_KEY, self._detail), *self._metadata)
            code = grpc.StatusCode.NOT_FOUND
            await context.abort(code, "the text of the error", trailing_metadata=trailers)
        if self._at_the_end:
            context.set_trailing_metadata(self._metadata)
        else:
            await context.send_initial_metadata(self._metadata)
        if not self._empty:
            await context.write(b"")


@asynccontextmanager
async def foreign(metadata: Any, **options: Any) -> AsyncIterator[str]:
    server = grpc.aio.server(handlers=[Foreign(metadata, **options)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def called(address: str, method: MethodDescriptor, role: Role) -> Any:
    """Call a method as the clients of mx do, and return the first message of the answer."""
    channel = dial(address)
    remote = Remote(role, address)
    stub = Stub(channel, method.containing_service, remote)
    request = GetMessageClass(method.input_type)()
    try:
        with translating(remote):
            begin = getattr(stub, method.name)
            if not method.client_streaming:
                call = begin(request, timeout=30)
            else:
                call = begin(timeout=30)
                await call.write(request)
                await call.done_writing()
            if not method.server_streaming:
                return await call
            if method.client_streaming:
                return await call.read()
            return await anext(call, None)
    finally:
        await channel.close(None)


# -- a client of another version ------------------------------------------------------------------


@other
@pytest.mark.parametrize("service", SERVICES, ids=lambda service: service.name)
async def test_a_client_of_another_version_is_refused_before_its_call_is_looked_at(
    service: ServiceDescriptor, metadata: Any, said: str
) -> None:
    async with server_of(service) as channel:
        for method in service.methods:
            path, garbage = f"/{service.full_name}/{method.name}", b"\xff not a message"
            if method.client_streaming:
                call = channel.stream_stream(path)(metadata=metadata)
                await call.write(garbage)
                await call.done_writing()
            else:
                call = channel.unary_stream(path)(garbage, metadata=metadata)
            assert await call.code() is grpc.StatusCode.PERMISSION_DENIED, path
            details = await call.details()
            assert f"speaks {own()}; you speak {said}" in details
            assert HINT in details
            assert versions_of(await call.trailing_metadata()) == [own().encode()]


async def test_what_refuses_names_itself() -> None:
    said = {}
    for service in SERVICES:
        async with server_of(service) as channel:
            method = f"/{service.full_name}/{service.methods[0].name}"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(method)(b"")
            said[service.name] = (caught.value.details() or "").split(" speaks")[0]
    assert said == {
        "Coordinator": "this coordinator", "Peer": "this source", "Documents": "this process"
    }  # fmt: skip


async def test_a_silent_stream_of_another_version_is_refused_too() -> None:
    """Its first message is waited for, but not for long."""
    async with server_of(SERVICES[1]) as channel:
        call = channel.stream_stream("/mx.wire.v1.Peer/Open")()
        async with asyncio.timeout(30):
            assert await call.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_refusal_is_not_lost_while_the_first_message_is_sent() -> None:
    """gRPC reports INTERNAL for a call that ends while its client writes."""
    async with server_of(SERVICES[1]) as channel:
        for _ in range(100):
            call = channel.stream_stream("/mx.wire.v1.Peer/Open")()
            await call.write(b"x" * 1000)
            assert await call.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_method_that_a_newer_version_has_added_is_refused_with_the_versions() -> None:
    async with server_of(SERVICES[0]) as channel:
        for path in ("/mx.wire.v1.Coordinator/Added", "/mx.wire.v3.Coordinator/Resolve"):
            ask = channel.unary_unary(path)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(b"", metadata=((VERSIONS_KEY, NEWER),))
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert f"you speak wire {WIRE_VERSION + 1}, layout 2" in (caught.value.details() or "")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(b"", metadata=headers())
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert versions_of(caught.value.trailing_metadata()) == [own().encode()]


async def test_health_checks_need_no_versions() -> None:
    async with server_of(SERVICES[0]) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service=""))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


# -- a server of another version ------------------------------------------------------------------


@other
async def test_no_answer_of_a_server_of_another_version_is_used(metadata: Any, said: str) -> None:
    async with foreign(metadata) as address:
        for method in METHODS:
            with pytest.raises(CoordinatorVersionError) as caught:
                await called(address, method, Role.COORDINATOR)
            assert caught.value.message == (
                f"the coordinator at {address} speaks {said}; this mx speaks {own()}"
            )
            assert caught.value.hint == HINT
            with pytest.raises(PeerVersionError) as caught_too:
                await called(address, method, Role.SOURCE)
            assert caught_too.value.peer == address


async def test_an_answer_of_the_same_version_is_used() -> None:
    async with foreign(headers()) as address:
        for method in METHODS:
            answer = await called(address, method, Role.SOURCE)
            assert isinstance(answer, GetMessageClass(method.output_type))


async def test_a_single_answer_may_have_the_versions_at_its_end() -> None:
    async with foreign(headers(), at_the_end=True) as address:
        for method in METHODS:
            if not method.server_streaming:
                await called(address, method, Role.SOURCE)


async def test_an_empty_stream_is_an_answer_too() -> None:
    """An old coordinator that lists nothing does not pass for one that knows no model."""
    async with foreign((), empty=True) as address:
        for method in METHODS:
            if method.server_streaming:
                with pytest.raises(PeerVersionError):
                    await called(address, method, Role.SOURCE)


@other
async def test_an_error_of_another_version_names_both_and_keeps_its_text(
    metadata: Any, said: str
) -> None:
    detail = encode_detail(UnknownModelError("no such model"))
    async with foreign(metadata, detail=detail) as address:
        for method in METHODS:
            with pytest.raises(CoordinatorVersionError) as caught:
                await called(address, method, Role.COORDINATOR)
            assert caught.value.message == (
                f"the coordinator at {address} speaks {said}; this mx speaks {own()}; it "
                "answered: the text of the error"
            )


async def test_an_error_of_the_same_version_is_what_it_was() -> None:
    detail = encode_detail(UnknownModelError("no such model"))
    async with foreign(headers(), detail=detail) as address:
        with pytest.raises(UnknownModelError, match="no such model"):
            await called(address, RESOLVE, Role.COORDINATOR)


async def test_what_does_not_answer_or_is_not_mx_is_not_taken_for_an_older_mx() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        with pytest.raises(CoordinatorError, match="is not an mx coordinator"):
            await called(f"127.0.0.1:{port}", RESOLVE, Role.COORDINATOR)
    finally:
        await server.stop(None)
    with pytest.raises(CoordinatorError, match="no coordinator answers") as caught:
        await called(f"127.0.0.1:{port}", RESOLVE, Role.COORDINATOR)
    assert type(caught.value) is CoordinatorError


# -- the calls that a pull and a source keep open -------------------------------------------------


@other
async def test_a_lease_of_another_version_is_not_taken(metadata: Any, said: str) -> None:
    async with foreign(metadata) as address:
        channel = dial(address)
        record = make_record(make_documents("a"), endpoint=address)
        lease = Lease(channel, record, lambda: None)
        try:
            with pytest.raises(PeerVersionError) as caught:
                await lease.open(Place(), ["tcp"], 30.0)
            assert f"speaks {said}" in caught.value.message
        finally:
            await lease.close()
            await channel.close(None)


@other
async def test_a_peer_of_another_version_is_dropped(metadata: Any, said: str) -> None:
    async with foreign(metadata) as address:
        dialer = StreamDialer(None, insecure=False)
        stream = await dialer.dial(make_record(make_documents("a"), endpoint=address))
        stream.send(peer_pb2.SwarmMessage(hello=peer_pb2.Hello()))
        heard: list[Any] = []
        async with asyncio.timeout(30):
            error = await stream.listen(heard.append)
        await dialer.close()
        assert not heard and isinstance(error, PeerVersionError)
        assert f"speaks {said}" in error.message


async def test_a_watch_and_a_list_of_an_older_coordinator_are_errors() -> None:
    async with foreign((), empty=True) as address:
        client = CoordinatorClient(address)
        try:
            with pytest.raises(CoordinatorVersionError):
                await client.list_models()
            with pytest.raises(CoordinatorVersionError):
                await anext(client.watch())
        finally:
            await client.close()


def test_both_families_say_whose_fault_it_is() -> None:
    assert issubclass(CoordinatorVersionError, CoordinatorError)
    # Not the error of a path: no other path to the same source would do.
    assert not issubclass(PeerVersionError, PeerProtocolError)
