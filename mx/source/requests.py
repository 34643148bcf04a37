"""What comes in at a source: who asks, and whether an honest peer could have sent it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from mx import codec
from mx.core.grants import Principal
from mx.core.topology import Place
from mx.errors import PeerProtocolError
from mx.wire.address import address_of_peer
from mx.wire.v1 import peer_pb2

#: A stream whose first message has not come by then is ended, and so is one that does not take
#: the answer to it.
FIRST_MESSAGE_S = 10.0


def principal_of(context: Any, reader_id: str = "") -> Principal:
    """The principal of a gRPC call.

    Args:
        context: The call's servicer context.
        reader_id: What the pull calls itself.

    Returns:
        Its connection, and the address that this comes from.
    """
    connection = str(context.peer())
    remote = connection.startswith(("ipv4:", "ipv6:"))  # else a unix socket, which has no address
    return Principal(connection, address_of_peer(connection) if remote else connection, reader_id)


def check_open(request: peer_pb2.OpenRequest) -> Place:
    """Check the first message of a lease.

    Args:
        request: The message.

    Returns:
        The reader's place.

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
            raise PeerProtocolError("reader_id: a UUID in lower case is wanted") from None
    return codec.place_from_wire(request.place)


async def first_message(requests: AsyncIterator[Any]) -> Any:
    """A stream's first message, or None if it ends before. Raises PeerProtocolError if none comes
    in time."""
    try:
        async with asyncio.timeout(FIRST_MESSAGE_S):
            return await anext(requests, None)
    except TimeoutError:
        raise PeerProtocolError(f"no message within {FIRST_MESSAGE_S:g} s") from None


async def answer(context: Any, event: peer_pb2.OpenEvent) -> None:
    """Write the first event. Raises PeerProtocolError if the other end does not take it in time."""
    try:
        async with asyncio.timeout(FIRST_MESSAGE_S):
            await context.write(event)
    except TimeoutError:
        raise PeerProtocolError(f"the answer was not taken within {FIRST_MESSAGE_S:g} s") from None
