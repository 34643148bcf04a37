"""Pages on the wire: the block digests of layers, asked of any source."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

import grpc.aio

from mx.codec import ranges_to_wire
from mx.core.holdings import ranges_of
from mx.core.types import ManifestRef
from mx.errors import PeerProtocolError, PeerTimeoutError
from mx.units import MIB
from mx.wire.channel import Remote, translating
from mx.wire.rpc import Stub
from mx.wire.v1 import peer_pb2

#: The most bytes in one message.
PIECE_BYTES = MIB
#: The least rate of a page.
LEAST_BYTES_PER_S = MIB


async def fetch_pages(
    channel: grpc.aio.Channel,
    who: Remote,
    ref: ManifestRef,
    layers: Sequence[int],
    nbytes_of: Callable[[int], int],
    *,
    stall_timeout_s: float,
) -> AsyncGenerator[tuple[int, bytes], None]:
    """Ask a source for pages, and yield (layer, page) as they arrive, unchecked.

    Args:
        channel: A channel to the source.
        who: The source.
        ref: The manifest.
        layers: The layers whose pages are wanted, ascending.
        nbytes_of: Returns how long the page of a layer is.
        stall_timeout_s: How long to wait for the next message, and for a page beyond the time that
            the least rate allows.

    Raises:
        PeerProtocolError: The source sends what was not asked for.
        PeerTimeoutError: Nothing comes any more.
        MxError: As `translate`, if the RPC fails.
    """
    stub = Stub(channel, peer_pb2.DESCRIPTOR.services_by_name["Peer"], who)
    ranges = ranges_to_wire(ranges_of(layers))
    request = peer_pb2.PagesRequest(identity=ref.identity, layout=ref.layout, layers=ranges)
    wanted = set(layers)
    layer, page = -1, bytearray()
    loop = asyncio.get_running_loop()
    until_s = loop.time() + stall_timeout_s
    stream = stub.Pages(request)
    messages = aiter(stream)
    try:
        with translating(who):
            while True:
                try:
                    async with asyncio.timeout_at(min(until_s, loop.time() + stall_timeout_s)):
                        piece = await anext(messages)
                except StopAsyncIteration:
                    break
                except TimeoutError:
                    raise PeerTimeoutError(
                        f"{who.address} sends no block digests any more", peer=who.address
                    ) from None
                if not page:
                    layer = piece.layer
                    until_s += nbytes_of(layer) / LEAST_BYTES_PER_S if layer in wanted else 0.0
                fits = layer in wanted and len(page) + len(piece.data) <= nbytes_of(layer)
                if not fits or (piece.layer, piece.offset) != (layer, len(page)) or not piece.data:
                    raise PeerProtocolError(
                        f"{who.address} sent block digests that were not asked for",
                        peer=who.address,
                    )
                page += piece.data
                if len(page) == nbytes_of(layer):
                    wanted.remove(layer)
                    yield layer, bytes(page)
                    page.clear()
                    until_s = loop.time() + stall_timeout_s
    finally:
        stream.cancel()
