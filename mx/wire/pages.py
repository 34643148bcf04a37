"""Pages on the wire: the block digests of layers, asked of any source.

A message has a piece of a page, or several small pages where the asker can take these. Releases
that can't ignore that it says so, and get or give one page in a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence

import grpc.aio

from mx.codec import ranges_to_wire
from mx.core.holdings import ranges_of
from mx.core.types import ManifestRef
from mx.errors import PeerProtocolError, PeerTimeoutError
from mx.units import KIB, MIB
from mx.wire.channel import Remote, translating
from mx.wire.rpc import Stub
from mx.wire.v1 import peer_pb2

#: The most bytes of a page in one message.
PIECE_BYTES = MIB
#: The most bytes of several pages in the first message, which the first layer waits for; each
#: further one has up to twice as many,
FIRST_BATCH_BYTES = 4 * KIB
#: up to this.
BATCH_BYTES = 128 * KIB
#: The least rate of a page.
LEAST_BYTES_PER_S = MIB


def page_messages(
    pages: Iterable[tuple[int, bytes]], *, batches: bool
) -> Iterator[peer_pb2.LayerPage]:
    """Yield the messages that carry pages, in their order.

    Args:
        pages: Layers and their pages, which are not empty.
        batches: True if messages may have several pages.
    """
    most_nbytes = FIRST_BATCH_BYTES if batches else 0
    batch: dict[int, bytes] = {}
    nbytes = 0
    for layer, page in pages:
        if batch and nbytes + len(page) > most_nbytes:
            yield _batch(batch)
            batch, nbytes = {}, 0
            most_nbytes = min(2 * most_nbytes, BATCH_BYTES)
        if len(page) <= most_nbytes:
            batch[layer] = page
            nbytes += len(page)
            continue
        for offset in range(0, len(page), PIECE_BYTES):
            data = page[offset : offset + PIECE_BYTES]
            yield peer_pb2.LayerPage(layer=layer, offset=offset, data=data)
        most_nbytes = min(2 * most_nbytes, BATCH_BYTES)
    if batch:
        yield _batch(batch)


def _batch(pages: dict[int, bytes]) -> peer_pb2.LayerPage:
    layers = ranges_to_wire(ranges_of(pages))
    return peer_pb2.LayerPage(data=b"".join(pages.values()), layers=layers)


async def fetch_pages(
    channel: grpc.aio.Channel,
    who: Remote,
    ref: ManifestRef,
    layers: Sequence[int],
    nbytes_of: Callable[[int], int],
    *,
    stall_timeout_s: float,
) -> AsyncGenerator[list[tuple[int, bytes]], None]:
    """Ask a source for pages, and yield those of each message, (layer, page), unchecked.

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
    request = peer_pb2.PagesRequest(
        identity=ref.identity, layout=ref.layout, layers=ranges, batches=True
    )
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
                if piece.layers:
                    pages = None if page else _taken(piece, wanted, nbytes_of)
                    if pages is None:
                        raise _not_asked_for(who)
                    yield pages
                    until_s = loop.time() + stall_timeout_s
                    continue
                if not page:
                    layer = piece.layer
                    until_s += nbytes_of(layer) / LEAST_BYTES_PER_S if layer in wanted else 0.0
                fits = layer in wanted and len(page) + len(piece.data) <= nbytes_of(layer)
                if not fits or (piece.layer, piece.offset) != (layer, len(page)) or not piece.data:
                    raise _not_asked_for(who)
                page += piece.data
                if len(page) == nbytes_of(layer):
                    wanted.remove(layer)
                    yield [(layer, bytes(page))]
                    page.clear()
                    until_s = loop.time() + stall_timeout_s
    finally:
        stream.cancel()


def _taken(
    batch: peer_pb2.LayerPage, wanted: set[int], nbytes_of: Callable[[int], int]
) -> list[tuple[int, bytes]] | None:
    """Return the pages of a message with several, whose layers are not `wanted` any more. None: it
    has others, or not all of their bytes, or more."""
    data, at = batch.data, 0
    found: list[tuple[int, bytes]] = []
    for each in batch.layers:
        if each.begin >= each.end:
            return None
        for layer in range(each.begin, each.end):
            if layer not in wanted:
                return None
            wanted.remove(layer)
            end = at + nbytes_of(layer)
            found.append((layer, data[at:end]))
            at = end
    return found if at == len(data) else None


def _not_asked_for(who: Remote) -> PeerProtocolError:
    return PeerProtocolError(
        f"{who.address} sent block digests that were not asked for", peer=who.address
    )
