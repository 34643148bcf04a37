"""A reader's lease on one source: a stream that stays open while the pull reads.

The first message opens, each further one renews. The reader counts the lease from when it sent
the request that was answered, the source from when it answered, so that the reader's ends first.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from mx.core.topology import Place
from mx.core.types import SourceRecord
from mx.errors import (
    ClosedError,
    MxError,
    PeerLostError,
    PeerProtocolError,
    PeerRefusedError,
    PeerTimeoutError,
    StaleGenerationError,
)
from mx.wire.channel import Remote, Role, translate
from mx.wire.rpc import Malformed, Stub
from mx.wire.v1 import peer_pb2

#: A source may promise more, but is asked this often whether it is still there.
_MAX_LEASE_S = 60.0


@dataclass(frozen=True, slots=True)
class Granted:
    grant_id: str
    generation: int
    tickets: dict[str, bytes]
    region_nbytes: tuple[int, ...]
    gated: bool = False  # others read there too: ask before reading


class Lease:
    """Made and closed on the loop; `check` may be called from any thread."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        source: SourceRecord,
        on_lost: Callable[[MxError], None],
        reader_id: str = "",
    ) -> None:
        """`reader_id` names the pull, if it can be part of a swarm."""
        self._reader_id = reader_id
        self._source = source
        self._remote = Remote(Role.SOURCE, source.endpoint)
        service = peer_pb2.DESCRIPTOR.services_by_name["Peer"]
        self._stub = Stub(channel, service, self._remote)
        self._on_lost = on_lost
        self._call: Any = None
        self._renewer: asyncio.Task[None] | None = None
        self._valid_until_s = 0.0
        self._lease_s = 0.0
        self._error: MxError | None = None

    @property
    def peer(self) -> str:
        return self._source.endpoint

    async def open(self, place: Place, transports: Sequence[str], timeout_s: float) -> Granted:
        """Ask for a grant. Raises SourceError if the source refuses or does not answer."""
        self._call = self._stub.Open()
        sent_at_s = time.monotonic()
        request = peer_pb2.OpenRequest(
            source_id=self._source.source_id,
            identity=self._source.ref.identity,
            generation=self._source.generation,
            transports=transports,
            place=place.to_json(),
            reader_id=self._reader_id,
        )
        try:
            event = await self._ask(request, timeout_s)
            if event.WhichOneof("event") == "stale":
                raise StaleGenerationError(
                    f"{self.peer} holds generation {event.stale.generation} by now",
                    peer=self.peer,
                )
            if event.WhichOneof("event") != "granted":
                raise PeerProtocolError(f"{self.peer} answered without a grant", peer=self.peer)
            self._lease_s = self._believed_s(event.granted.lease_s)
        except BaseException:
            await self.close()
            raise
        granted = event.granted
        self._valid_until_s = sent_at_s + self._lease_s
        self._renewer = asyncio.create_task(self._renew(), name="mx-lease")
        return Granted(
            granted.grant_id,
            granted.generation,
            {ticket.transport: ticket.ticket for ticket in granted.tickets},
            tuple(granted.region_nbytes),
            granted.gated,
        )

    def check(self) -> MxError | None:
        if self._error is not None:
            return self._error
        if time.monotonic() > self._valid_until_s:
            return PeerTimeoutError(
                f"{self.peer} has not renewed the lease for {self._lease_s:g} s", peer=self.peer
            )
        return None

    async def _ask(self, request: peer_pb2.OpenRequest, timeout_s: float) -> Any:
        """Write one message, read one event. Raises SourceError."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._call.write(request)
                while True:
                    event = await self._next()
                    # Draining tells that no new grants are given: what runs may finish.
                    if event.WhichOneof("event") != "draining":
                        return event
        except TimeoutError:
            raise PeerTimeoutError(
                f"{self.peer} stopped answering (stopped, overloaded or cut off)",
                peer=self.peer,
            ) from None
        except grpc.aio.AioRpcError as error:
            raise translate(error, who=self._remote) from None
        except asyncio.InvalidStateError:  # the call had ended before the write
            raise await self._ending() from None

    async def _next(self) -> Any:
        event = await self._call.read()
        if isinstance(event, Malformed):
            raise event.error()
        if not isinstance(event, peer_pb2.OpenEvent):
            raise await self._ending()
        return event

    async def _renew(self) -> None:
        """Until the lease is lost. A renewal that is not answered is the sign of a stopped
        process."""
        request = peer_pb2.OpenRequest(source_id=self._source.source_id)
        try:
            while True:
                await asyncio.sleep(self._lease_s / 4)
                sent_at_s = time.monotonic()
                event = await self._ask(request, self._lease_s * 0.4)
                if event.WhichOneof("event") != "renewed":
                    raise StaleGenerationError(
                        f"{self.peer} changed its memory during the pull", peer=self.peer
                    )
                self._lease_s = self._believed_s(event.renewed.lease_s)
                self._valid_until_s = sent_at_s + self._lease_s
        except MxError as error:
            self._lose(error)

    def _believed_s(self, lease_s: float) -> float:
        if not 0 < lease_s < math.inf:  # NaN is not either
            raise PeerProtocolError(f"{self.peer} gave a lease of {lease_s} s", peer=self.peer)
        return min(lease_s, _MAX_LEASE_S)

    async def _ending(self) -> MxError:
        """Why the stream ended."""
        code, details = await self._call.code(), await self._call.details()
        if code == grpc.StatusCode.OK:
            return PeerLostError(f"{self.peer} ended the lease", peer=self.peer)
        if code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAVAILABLE):
            return PeerLostError(f"{self.peer}: {details or 'gone'}", peer=self.peer)
        return PeerRefusedError(f"{self.peer} refused: {details}", peer=self.peer)

    def _lose(self, error: MxError) -> None:
        if self._error is None:
            self._error = error
            self._on_lost(error)

    async def close(self) -> None:
        """End the stream; the source withdraws the grant. Idempotent. What is read from now on
        is not believed."""
        self._error = self._error or ClosedError(f"the lease on {self.peer} was given back")
        if self._renewer is not None:
            self._renewer.cancel()
            await asyncio.gather(self._renewer, return_exceptions=True)
            self._renewer = None
        if self._call is not None:
            call, self._call = self._call, None
            call.cancel()
