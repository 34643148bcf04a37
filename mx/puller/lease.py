"""A reader's lease on one source: a stream that stays open while the pull reads.

The first message opens, each further one renews. The reader counts the lease from when it sent
the request that was answered, the source from when it answered, so that the reader's ends first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc

from mx.core.topology import Place
from mx.core.types import SourceRecord
from mx.errors import (
    MxError,
    PeerLostError,
    PeerProtocolError,
    PeerRefusedError,
    PeerTimeoutError,
    StaleGenerationError,
)
from mx.wire.channel import translate
from mx.wire.v1 import peer_pb2, peer_pb2_grpc


@dataclass(frozen=True, slots=True)
class Granted:
    grant_id: str
    generation: int
    tickets: dict[str, bytes]
    region_nbytes: tuple[int, ...]


class Lease:
    """Made and closed on the loop; `check` may be called from any thread."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        source: SourceRecord,
        on_lost: Callable[[MxError], None],
    ) -> None:
        self._stub = peer_pb2_grpc.PeerStub(channel)
        self._source = source
        self._on_lost = on_lost
        self._call: grpc.aio.StreamStreamCall | None = None  # type: ignore[type-arg]
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
        try:
            async with asyncio.timeout(timeout_s):
                await self._call.write(
                    peer_pb2.OpenRequest(
                        source_id=self._source.source_id,
                        identity=self._source.ref.identity,
                        generation=self._source.generation,
                        transports=transports,
                        place=place.to_json(),
                    )
                )
                event = await self._call.read()
        except TimeoutError:
            await self.close()
            raise PeerTimeoutError(
                f"{self.peer} did not answer within {timeout_s:g} s", peer=self.peer
            ) from None
        except grpc.RpcError as error:
            await self.close()
            raise translate(error, who=self.peer) from None
        if event is grpc.aio.EOF:
            error = await self._ending()
            await self.close()
            raise error
        if event.WhichOneof("event") == "stale":
            await self.close()
            raise StaleGenerationError(
                f"{self.peer} holds generation {event.stale.generation} by now", peer=self.peer
            )
        if event.WhichOneof("event") != "granted" or event.granted.lease_s <= 0:
            await self.close()
            raise PeerProtocolError(f"{self.peer} answered without a grant", peer=self.peer)
        granted = event.granted
        self._lease_s = granted.lease_s
        self._valid_until_s = sent_at_s + granted.lease_s
        self._renewer = asyncio.create_task(self._renew(), name="mx-lease")
        return Granted(
            granted.grant_id,
            granted.generation,
            {ticket.transport: ticket.ticket for ticket in granted.tickets},
            tuple(granted.region_nbytes),
        )

    def check(self) -> MxError | None:
        if self._error is not None:
            return self._error
        if time.monotonic() > self._valid_until_s:
            return PeerTimeoutError(
                f"{self.peer} has not renewed the lease for {self._lease_s:g} s", peer=self.peer
            )
        return None

    async def _renew(self) -> None:
        assert self._call is not None
        try:
            while True:
                await asyncio.sleep(self._lease_s / 4)
                sent_at_s = time.monotonic()
                await self._call.write(peer_pb2.OpenRequest(source_id=self._source.source_id))
                # A renewal that is not answered in time is the sign of a stopped process.
                async with asyncio.timeout_at(
                    asyncio.get_running_loop().time() + self._lease_s * 0.4
                ):
                    if not await self._await_renewed(sent_at_s):
                        return
        except TimeoutError:
            self._lose(
                PeerTimeoutError(
                    f"{self.peer} stopped answering (stopped, overloaded or cut off)",
                    peer=self.peer,
                )
            )
        except grpc.RpcError as error:
            self._lose(translate(error, who=self.peer))
        except asyncio.InvalidStateError:
            self._lose(await self._ending())

    async def _await_renewed(self, sent_at_s: float) -> bool:
        """Read events until the renewal is answered. False: the lease is over."""
        assert self._call is not None
        while True:
            event = await self._call.read()
            if event is grpc.aio.EOF:
                self._lose(await self._ending())
                return False
            kind = event.WhichOneof("event")
            if kind == "renewed":
                self._valid_until_s = sent_at_s + event.renewed.lease_s
                return True
            if kind == "stale":
                self._lose(
                    StaleGenerationError(
                        f"{self.peer} changed its memory during the pull", peer=self.peer
                    )
                )
                return False
            # draining: what runs may finish; new grants are the resolver's business

    async def _ending(self) -> MxError:
        assert self._call is not None
        code = await self._call.code()
        if code == grpc.StatusCode.OK:
            return PeerLostError(f"{self.peer} ended the lease", peer=self.peer)
        if code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAVAILABLE):
            details = await self._call.details()
            return PeerLostError(f"{self.peer}: {details or 'gone'}", peer=self.peer)
        details = await self._call.details()
        return PeerRefusedError(f"{self.peer} refused: {details}", peer=self.peer)

    def _lose(self, error: MxError) -> None:
        if self._error is None:
            self._error = error
            self._on_lost(error)

    async def close(self) -> None:
        """End the stream; the source withdraws the grant. Idempotent."""
        if self._renewer is not None:
            self._renewer.cancel()
            await asyncio.gather(self._renewer, return_exceptions=True)
            self._renewer = None
        if self._call is not None:
            call, self._call = self._call, None
            call.cancel()
