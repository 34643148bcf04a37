"""Pages in messages: several in one where the asker takes these, else one in each. What was not
asked for is refused either way."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from typing import Any

import grpc
import pytest

from mx.core.types import ManifestRef
from mx.core.versions import headers
from mx.errors import PeerProtocolError
from mx.units import KIB, MIB
from mx.wire.channel import Remote, Role, dial
from mx.wire.pages import BATCH_BYTES, FIRST_BATCH_BYTES, fetch_pages, page_messages
from mx.wire.rpc import Stub
from mx.wire.server import Service, listen
from mx.wire.v1 import common_pb2, peer_pb2

REF = ManifestRef(bytes(32), bytes([1]) * 32, b"", (0, 0, 0))
#: Many small ones, some larger ones, and one of several pieces.
SIZES = [32] * 300 + [3 * KIB] * 5 + [200 * KIB] + [2 * MIB + 32] + [32] * 3
PAGES = {layer: bytes([layer % 251]) * nbytes for layer, nbytes in enumerate(SIZES)}
SMALL = {layer: PAGES[layer] for layer in range(4)}
Answer = Callable[[peer_pb2.PagesRequest], Iterable[peer_pb2.LayerPage]]


def batch(pages: dict[int, bytes], *layers: tuple[int, int]) -> peer_pb2.LayerPage:
    ranges = [common_pb2.Range(begin=begin, end=end) for begin, end in layers]
    return peer_pb2.LayerPage(data=b"".join(pages.values()), layers=ranges)


def honest(request: peer_pb2.PagesRequest) -> Iterable[peer_pb2.LayerPage]:
    layers = [layer for each in request.layers for layer in range(each.begin, each.end)]
    return page_messages(((n, PAGES[n]) for n in layers), batches=request.batches)


def earlier_release(request: peer_pb2.PagesRequest) -> Iterable[peer_pb2.LayerPage]:
    """Does not know that an asker takes batches."""
    request.ClearField("batches")
    return honest(request)


async def fetched(answer: Answer, layers: Iterable[int]) -> list[list[tuple[int, bytes]]]:
    class Servicer:
        async def Pages(
            self, request: peer_pb2.PagesRequest, context: Any
        ) -> AsyncIterator[peer_pb2.LayerPage]:
            for message in answer(request):
                yield message

        async def Describe(self, request: Any, context: Any) -> None: ...
        async def Open(self, request: Any, context: Any) -> None: ...
        async def Trade(self, request: Any, context: Any) -> None: ...

    service = Service(peer_pb2.DESCRIPTOR.services_by_name["Peer"], Servicer())
    listening = await listen("127.0.0.1:0", [service])
    channel = dial(listening.address)
    stream = fetch_pages(
        channel,
        Remote(Role.SOURCE, listening.address),
        REF,
        list(layers),
        lambda layer: len(PAGES[layer]),
        stall_timeout_s=30.0,
    )
    try:
        async with aclosing(stream) as found:
            return [each async for each in found]
    finally:
        await channel.close(None)
        await listening.stop(0)


async def test_several_pages_travel_in_a_message() -> None:
    found = await fetched(honest, PAGES)
    assert [each for message in found for each in message] == list(PAGES.items())
    assert len(found) < 20
    sizes = [sum(len(page) for _, page in message) for message in found]
    assert sizes[0] <= FIRST_BATCH_BYTES  # the first layer waits for few others
    together = [size for size, message in zip(sizes, found, strict=True) if len(message) > 1]
    assert max(together) <= BATCH_BYTES


@pytest.mark.parametrize("answer", [honest, earlier_release])
async def test_any_layers_are_asked_for(answer: Answer) -> None:
    layers = [0, 2, 3, 7, 299, 302, 306, 308]
    found = await fetched(answer, layers)
    assert [each for message in found for each in message] == [(n, PAGES[n]) for n in layers]


async def test_a_source_of_an_earlier_release_gives_one_page_in_a_message() -> None:
    found = await fetched(earlier_release, PAGES)
    assert found == [[each] for each in PAGES.items()]


def test_a_reader_of_an_earlier_release_gets_one_page_in_a_message() -> None:
    messages = list(page_messages(PAGES.items(), batches=False))
    assert not any(each.layers for each in messages)
    assert all(len(each.data) <= MIB for each in messages)
    found: dict[int, bytes] = {}
    for each in messages:
        assert each.offset == len(found.setdefault(each.layer, b""))
        found[each.layer] += each.data
    assert list(found.items()) == list(PAGES.items())


async def test_fewer_pages_and_another_order_are_tolerated() -> None:
    """A pull that gives to others may lack some."""
    answer = [batch({3: PAGES[3], 1: PAGES[1]}, (3, 4), (1, 2)), batch({0: PAGES[0]}, (0, 1))]
    assert await fetched(lambda _: answer, SMALL) == [
        [(3, PAGES[3]), (1, PAGES[1])],
        [(0, PAGES[0])],
    ]
    assert await fetched(lambda _: [], SMALL) == []


async def test_a_stream_that_ends_at_once_is_of_this_release() -> None:
    """Its versions are in its end, too: grpc.aio may not see its beginning."""

    async def pages(request: Any, context: Any) -> AsyncIterator[bytes]:
        context.set_trailing_metadata(headers())
        none: list[bytes] = []
        for message in none:
            yield message

    service = peer_pb2.DESCRIPTOR.services_by_name["Peer"]
    handlers = {"Pages": grpc.unary_stream_rpc_method_handler(pages)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service.full_name, handlers),)
    )
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    channel = dial(address)
    stub = Stub(channel, service, Remote(Role.SOURCE, address))
    try:
        assert [each async for each in stub.Pages(peer_pb2.PagesRequest())] == []
        assert await stub.Pages(peer_pb2.PagesRequest()).read() is grpc.aio.EOF  # type: ignore[attr-defined]
    finally:
        await channel.close(None)
        await server.stop(0)


WRONG: dict[str, list[peer_pb2.LayerPage]] = {
    "others": [batch(SMALL, (1, 5))],
    "more": [batch({n: PAGES[n] for n in range(5)}, (0, 5))],
    "far more": [batch(SMALL, (0, 1 << 31))],
    "repeated in a message": [batch({**SMALL, 9: PAGES[0]}, (0, 4), (0, 1))],
    "repeated": [batch(SMALL, (0, 4)), batch({0: PAGES[0]}, (0, 1))],
    "repeated as a piece": [
        batch(SMALL, (0, 4)),
        peer_pb2.LayerPage(layer=0, data=PAGES[0]),
    ],
    "too short": [batch({n: PAGES[n] for n in range(3)}, (0, 4))],
    "too long": [batch({**SMALL, 4: b"\0"}, (0, 4))],
    "huge": [batch({0: bytes(3 * MIB)}, (0, 4))],
    "empty": [batch({}, (0, 4))],
    "of no layer": [batch({}, (1, 1))],
    "backwards": [batch(SMALL, (4, 0))],
    "within a page": [peer_pb2.LayerPage(layer=0, data=PAGES[0][:16]), batch(SMALL, (0, 4))],
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_what_was_not_asked_for_is_refused(wrong: str) -> None:
    with pytest.raises(PeerProtocolError, match="not asked for"):
        await fetched(lambda _: WRONG[wrong], SMALL)
