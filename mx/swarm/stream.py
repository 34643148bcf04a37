"""One stream of swarm messages between two neighbours; both ends look the same."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from mx.core.types import SourceRecord
from mx.errors import MxError, PeerProtocolError
from mx.transport import TlsFiles
from mx.wire.address import host_of
from mx.wire.channel import Remote, Role, cut, dial
from mx.wire.rpc import Malformed, Stub
from mx.wire.v1 import peer_pb2
from mx.wire.v1.peer_pb2 import SwarmMessage

#: Messages that the other end may leave unread. One that reads sends and gets a few per chunk.
_MAX_UNREAD = 4096
#: One that is not welcome has so long to end the stream by itself.
REFUSED_S = 5.0


def to_bytes(chunks: int) -> bytes:
    """A bit set of chunks as it is sent."""
    return chunks.to_bytes((chunks.bit_length() + 7) // 8, "little")


def from_bytes(data: bytes, chunk_count: int) -> int:
    """Raises PeerProtocolError where chunks are named that do not exist."""
    chunks = int.from_bytes(data, "little")
    if chunks.bit_length() > chunk_count:
        raise PeerProtocolError(f"chunk {chunks.bit_length() - 1} of {chunk_count} was named")
    return chunks


class PeerStream:
    """One end; on the loop. `say` never waits; `listen` runs until either end has closed.

    `read` gives the next message or None (or grpc's EOF) at the end, `write` sends one, `end`
    closes the stream.
    """

    def __init__(
        self,
        peer: str,
        read: Callable[[], Awaitable[Any]],
        write: Callable[[Any], Awaitable[None]],
        end: Callable[[], object] = lambda: None,
        address: str = "",
    ) -> None:
        """`address` is the other end's, without its port: where it dials from, or is dialled at."""
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
        """Send `SwarmMessage(**message)`. What a neighbour that is gone was told is lost; one
        that does not listen any more is left."""
        if self.closed:
            return
        try:
            self._unsent.put_nowait(message)
        except asyncio.QueueFull:
            self.close()

    async def receive(self) -> SwarmMessage | None:
        """The next message; None at the end. Raises PeerProtocolError."""
        try:
            message = await self._read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return None
        if isinstance(message, Malformed):
            raise message.error()
        return message if isinstance(message, SwarmMessage) else None

    async def refuse(self) -> None:
        """Answer a greeting: not welcome. Ends, whether the other end does or not."""
        self.send(SwarmMessage(welcome=peer_pb2.Welcome(accepted=False)))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REFUSED_S):
                await self.listen(lambda message: None)

    async def listen(self, heard: Callable[[SwarmMessage], None]) -> MxError | None:
        """Send what is said and tell what is heard, until the end. Returns what the other end did
        wrong: what `heard` raises ends the talk."""
        listening = asyncio.create_task(self._listen(heard), name="mx-talk-listen")
        pumping = asyncio.create_task(self._pump(), name="mx-talk-say")
        closing = asyncio.create_task(self._closed.wait(), name="mx-talk-end")
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
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(self, heard: Callable[[SwarmMessage], None]) -> None:
        while (message := await self.receive()) is not None:
            heard(message)

    async def _pump(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self._write(await self._unsent.get())

    def close(self) -> None:
        """End the talk. Idempotent."""
        if not self.closed:
            self._closed.set()
            self._end()


class StreamDialer:
    """Opens streams to peers, on the loop. `close` it when they have ended."""

    def __init__(self, tls: TlsFiles | None, insecure: bool) -> None:
        self._tls = tls
        self._insecure = insecure
        self._ending: set[asyncio.Task[None]] = set()  # channels of streams that are over

    async def dial(self, record: SourceRecord) -> PeerStream:
        """Open a stream to the source. Raises MxError."""
        endpoint = record.endpoint
        service = peer_pb2.DESCRIPTOR.services_by_name["Peer"]
        # A channel for each stream, since peers name whom to dial: it ends with the stream.
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
