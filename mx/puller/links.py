"""The connections of one pull: a lease per source, a session per way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import grpc.aio

from mx.core.planner import Way
from mx.core.topology import Place
from mx.errors import MxError, PeerProtocolError
from mx.puller.lease import Granted, Lease
from mx.puller.options import PullOptions
from mx.transport import Grant, Session, Transport
from mx.wire.channel import dial


@dataclass(frozen=True)
class Link:
    """An open session and the lease that it stands on."""

    way: Way
    lease: Lease
    session: Session


class Links:
    """Opens links on the loop and closes whatever was opened."""

    def __init__(
        self,
        options: PullOptions,
        place: Place,
        transports: Mapping[str, Transport],
        on_lease_lost: Callable[[MxError], None],
    ) -> None:
        self._options = options
        self._place = place
        self._transports = transports
        self._on_lease_lost = on_lease_lost
        self._channels: list[grpc.aio.Channel] = []
        self._leases: list[Lease] = []

    async def open(self, way: Way, need_nbytes: int) -> Link:
        """A grant from the way's source, and a session on it. `need_nbytes` is what its region
        must hold. Raises SourceError, or LocalError where this side can't."""
        channel = dial(way.source.endpoint, tls=self._options.tls, insecure=self._options.insecure)
        self._channels.append(channel)
        lease = Lease(channel, way.source, self._on_lease_lost)
        self._leases.append(lease)
        granted = await lease.open(self._place, [way.transport], self._options.connect_timeout_s)
        return Link(way, lease, await self._session(way, granted, need_nbytes))

    async def _session(self, way: Way, granted: Granted, need_nbytes: int) -> Session:
        """Connecting blocks, so it has a thread; a cancelled pull waits for it, to close it."""
        transport = self._transports[way.transport]
        opening = asyncio.ensure_future(
            asyncio.to_thread(transport.open, self._grant(way, granted, need_nbytes))
        )
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            await asyncio.wait((opening,))
            if opening.exception() is None:
                opening.result().close()
                await asyncio.to_thread(opening.result().join, self._options.stall_timeout_s)
            raise

    def _grant(self, way: Way, granted: Granted, need_nbytes: int) -> Grant:
        peer = way.source.endpoint
        ticket = granted.tickets.get(way.transport)
        if ticket is None:
            raise PeerProtocolError(f"{peer} gave no ticket for {way.transport}", peer=peer)
        if not granted.region_nbytes or granted.region_nbytes[0] < need_nbytes:
            raise PeerProtocolError(
                f"{peer} offers regions of {list(granted.region_nbytes)} bytes for a model that "
                f"takes {need_nbytes}",
                peer=peer,
            )
        return Grant(
            grant_id=granted.grant_id,
            ticket=ticket,
            generation=granted.generation,
            region_nbytes=granted.region_nbytes,
            peer=peer,
            tls=self._options.data_tls,
            stall_timeout_s=self._options.stall_timeout_s,
            streams=self._options.streams,
        )

    async def close(self) -> None:
        """End every lease. Sessions are their users' to close, before."""
        leases, self._leases = self._leases, []
        channels, self._channels = self._channels, []
        for lease in leases:
            await lease.close()
        for channel in channels:
            await channel.close(None)
