"""Checks of the requests that reach a source, and the principal behind each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from mx import codec
from mx.core.grants import Principal
from mx.core.topology import Place
from mx.errors import PeerProtocolError
from mx.wire.address import address_of_peer
from mx.wire.place import place_from_wire
from mx.wire.v1 import peer_pb2

#: A stream ends if its first message does not come within this time, or if the other end does not
#: take the answer within it.
FIRST_MESSAGE_S = 10.0


def principal_of(context: Any, reader_id: str = "", name: str = "") -> Principal:
    """Return the principal of a gRPC call: its connection and that connection's address.

    Args:
        context: The call's servicer context.
        reader_id: The pull's own id, "" if it gives none.
        name: The principal that its certificate names, "" without one.
    """
    connection = str(context.peer())
    remote = connection.startswith(("ipv4:", "ipv6:"))  # else a unix socket, which has no address
    return Principal(
        connection, address_of_peer(connection) if remote else connection, reader_id, name
    )


def check_open(request: peer_pb2.OpenRequest) -> Place:
    """Check the first message of a lease, and return the reader's place.

    Raises:
        PeerProtocolError: A field is malformed.
    """
    codec.source_id_from_wire(request.source_id)
    codec.digest_from_wire(request.identity, "identity")
    codec.transports_from_wire(request.transports)
    if request.reader_id:
        try:
            codec.source_id_from_wire(request.reader_id)
        except PeerProtocolError:
            raise PeerProtocolError("reader_id must be a UUID in lower case") from None
    return place_from_wire(request.place)


async def first_message(requests: AsyncIterator[Any]) -> Any:
    """Return a stream's first message, or None if the stream ends before it.

    Raises:
        PeerProtocolError: No message comes within `FIRST_MESSAGE_S`.
    """
    try:
        async with asyncio.timeout(FIRST_MESSAGE_S):
            return await anext(requests, None)
    except TimeoutError:
        raise PeerProtocolError(f"no message within {FIRST_MESSAGE_S:g} s") from None


async def answer(context: Any, event: object) -> None:
    """Write the first event of a lease.

    Raises:
        PeerProtocolError: The other end does not take it within `FIRST_MESSAGE_S`.
    """
    try:
        async with asyncio.timeout(FIRST_MESSAGE_S):
            await context.write(event)
    except TimeoutError:
        raise PeerProtocolError(f"the answer was not taken within {FIRST_MESSAGE_S:g} s") from None
