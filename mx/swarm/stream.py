"""A stream of swarm messages between two peers; both ends use the same class."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from mx.core.types import SourceRecord
from mx.errors import MxError, PeerProtocolError
from mx.tasks import end_tasks
from mx.transport import TlsFiles
from mx.wire.address import host_of
from mx.wire.channel import Remote, Role, cut, dial
from mx.wire.rpc import MalformedMessage, Stub
from mx.wire.v1 import peer_pb2
from mx.wire.v1.peer_pb2 import SwarmMessage

#: Messages that the other end may leave unread; a chunk takes a few.
_MAX_UNREAD = 4096
#: How long a peer that was refused has to end the stream by itself.
REFUSED_S = 5.0


def to_bytes(chunks: int) -> bytes:
    """Return a bit set of chunks as messages carry it: little-endian, without trailing zeros."""
    return chunks.to_bytes((chunks.bit_length() + 7) // 8, "little")


def from_bytes(data: bytes, chunk_count: int) -> int:
    """Return the bit set that a message carries.

    Raises:
        PeerProtocolError: It names chunks that do not exist.
    """
    chunks = int.from_bytes(data, "little")
    if chunks.bit_length() > chunk_count:
        raise PeerProtocolError(
            f"a peer named chunk {chunks.bit_length() - 1} of a model with {chunk_count} chunks"
        )
    return chunks


class PeerStream:
    """One end of a stream; on the loop. `send` never waits; `listen` runs until either end has
    closed."""

    def __init__(
        self,
        peer: str,
        read: Callable[[], Awaitable[Any]],
        write: Callable[[Any], Awaitable[None]],
        end: Callable[[], object] = lambda: None,
        address: str = "",
    ) -> None:
        """
        Args:
            peer: Names the other end in errors and logs.
            read: Returns the next message; None, or gRPC's EOF, at the end.
            write: Sends a message.
            end: Closes the stream.
            address: The other end's, without its port: where it dials from, or is dialled.
        """
        self.peer = peer
        self.address = address
        self._read = read
        self._write = write
        self._end = end
        self._unsent: asyncio.Queue[SwarmMessage] = asyncio.Queue(_MAX_UNREAD)
        self._closed = asyncio.Event()

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def send(self, message: SwarmMessage) -> None:
        """Send a message, without waiting. A message to a closed stream is lost; a stream whose
        other end leaves too many messages unread is closed."""
        if self.closed:
            return
        try:
            self._unsent.put_nowait(message)
        except asyncio.QueueFull:
            self.close()

    async def receive(self) -> SwarmMessage | None:
        """Return the next message; None at the end. Raises PeerProtocolError."""
        try:
            message = await self._read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return None
        if isinstance(message, MalformedMessage):
            raise message.error()
        return message if isinstance(message, SwarmMessage) else None

    async def refuse(self) -> None:
        """Answer a hello with a refusal, and end the stream: at once if the other end does, else
        after `REFUSED_S`."""
        self.send(SwarmMessage(welcome=peer_pb2.Welcome(accepted=False)))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REFUSED_S):
                await self.listen(lambda message: None)

    async def listen(self, heard: Callable[[SwarmMessage], None]) -> MxError | None:
        """Send the queued messages and call `heard` with each received one, until the stream ends.

        Returns:
            What the other end did wrong: an MxError that `heard` raised, or a malformed message,
            ends the stream. None if nothing.
        """
        listening = asyncio.create_task(self._listen(heard), name="mx-stream-listen")
        pumping = asyncio.create_task(self._pump(), name="mx-stream-send")
        closing = asyncio.create_task(self._closed.wait(), name="mx-stream-end")
        tasks = (listening, pumping, closing)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if listening.done():
                listening.result()
            return None
        except MxError as error:
            return error
        finally:
            self.close()
            await end_tasks(*tasks)

    async def _listen(self, heard: Callable[[SwarmMessage], None]) -> None:
        while (message := await self.receive()) is not None:
            heard(message)

    async def _pump(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self._write(await self._unsent.get())

    def close(self) -> None:
        """Close the stream. Idempotent."""
        if not self.closed:
            self._closed.set()
            self._end()


class StreamDialer:
    """Opens streams to peers; on the loop. `close` it when they have ended."""

    def __init__(self, tls: TlsFiles | None, insecure: bool) -> None:
        self._tls = tls
        self._insecure = insecure
        self._ending: set[asyncio.Task[None]] = set()  # close the channels of ended streams

    async def dial(self, record: SourceRecord) -> PeerStream:
        """Open a stream to the source. Raises MxError."""
        endpoint = record.endpoint
        service = peer_pb2.DESCRIPTOR.services_by_name["Peer"]
        # Peers name the endpoints to dial: a channel per stream ends with its stream.
        channel = dial(endpoint, tls=self._tls, insecure=self._insecure)
        call = Stub(channel, service, Remote(Role.SOURCE, endpoint)).Trade()

        def end() -> None:
            cut(call)
            ending = asyncio.create_task(channel.close(None), name="mx-stream-channel")
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

        return PeerStream(endpoint, call.read, call.write, end, address=host_of(endpoint))

    async def close(self) -> None:
        """Wait until the channels of streams that have ended are closed."""
        await asyncio.gather(*self._ending)
