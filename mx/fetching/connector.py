"""Opens connections: a lease for each source and transport, a session for each path."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc.aio

from mx import trace
from mx.core.grid import chunk_nbytes_of
from mx.core.paths import FIRST_STREAMS
from mx.core.planner import SourcePath
from mx.core.topology import Place
from mx.core.types import Layout
from mx.errors import ClosedError, MxError, PeerProtocolError, SourceError, release_frames
from mx.fetching.options import PullOptions
from mx.fetching.reads import Connection, ReadLease
from mx.runtime import in_thread, uncut
from mx.tasks import end_tasks
from mx.transport import Grant, Growing, Session, Transport, View, Vouching
from mx.views import located_spans
from mx.wire.address import resolve
from mx.wire.channel import dial
from mx.wire.lease import LAST_WORDS, GrantAnswer, Lease
from mx.wire.pacing import PacedSession, Pacer

if TYPE_CHECKING:
    from mx.cuda.device import Device

log = logging.getLogger(__name__)

#: Turns of the loop until a lease's call has begun: of the path's task, the grant's, and gRPC's.
_STEPS_TO_ASK = 3
#: Openings that are cancelled end at once, but for one that looks a name up: this is enough.
_ABANDONED_S = 0.2


class Connector:
    """Opens connections, and closes all that it opened; on the loop. Paths to one source by one
    transport share a lease."""

    def __init__(
        self,
        options: PullOptions,
        place: Callable[[], Place],
        transports: Mapping[str, Transport],
        on_change: Callable[[], None],
        reader_id: str = "",
    ) -> None:
        """
        Args:
            options: The pull's options.
            place: Returns the place of its arena; called once sources are known.
            transports: The transports by name.
            on_change: Called on the loop when a lease is lost, reading becomes coordinated, or a
                source is asked about a chunk.
            reader_id: Names the pull; "" if it can't be part of a swarm.
        """
        self._reader_id = reader_id
        self._options = options
        self._place = place
        self._transports = transports
        self._on_change = on_change
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._leases: dict[Lease, list[Connection]] = {}  # and the connections on each
        self._granted: dict[tuple[str, str], asyncio.Task[tuple[Lease, GrantAnswer]]] = {}
        self._sessions: list[Session] = []
        self._abandoned: list[asyncio.Task[Session]] = []  # openings that nothing waits for
        self._lock = threading.Lock()
        self._device: Device | None = None
        self._users: Counter[ReadLease] = Counter()  # sessions, open or being opened
        self._begun: dict[SourcePath, asyncio.Task[tuple[Connection, tuple[int, ...]]]] = {}

    async def begin(self, paths: Sequence[SourcePath]) -> None:
        """Start to connect ahead of `open`, while the manifest is fetched. Leases are asked for
        when this returns: what follows may hold the interpreter."""
        for path in paths:
            if path in self._begun:
                continue
            self._begun[path] = asyncio.create_task(self._connect(path), name="mx-connect")
        for _ in range(_STEPS_TO_ASK):
            await asyncio.sleep(0)

    async def open(self, path: SourcePath, layout: Layout) -> Connection:
        """Get a grant from the path's source, and open a session on it.

        Args:
            path: The path.
            layout: The model's layout, which says how much memory the source must have.

        Raises:
            SourceError: The source refuses, or does not answer.
            LocalError: This machine can't open it.
        """
        begun = self._begun.pop(path, None)
        connection, regions = await (begun if begun is not None else self._connect(path))
        if begun is not None and connection.lease.check() is not None:
            # It was begun long ago, and the source has ended a lease that was not used.
            await self.give_back(connection)
            connection, regions = await self._connect(path)
        try:
            if (offered_nbytes := sum(regions[:1])) < layout.arena_nbytes:
                raise PeerProtocolError(
                    f"{connection.peer} serves {offered_nbytes} bytes for a model that takes "
                    f"{layout.arena_nbytes}",
                    peer=connection.peer,
                )
        except BaseException:
            await self.give_back(connection)
            raise
        return connection

    async def _connect(self, path: SourcePath) -> tuple[Connection, tuple[int, ...]]:
        """Return the connection, and how many bytes each of the source's regions holds."""
        with trace.span("pull.connect", source=path.source.endpoint, transport=path.label):
            lease, granted = await self._grant_for(path)
            self._users[lease] += 1
            try:
                grant = self._grant(path, granted)
                session = await self._session(path, grant, granted.pacer)
                vouched = session.vouched_digests() if isinstance(session, Vouching) else None
                sockets = grant.cancelled.sockets
                connection = Connection(path, lease, session, sockets, vouched=vouched)
                self._leases[lease].append(connection)
            except BaseException:
                await self._leave(lease)
                raise
            return connection, granted.region_nbytes

    async def _grant_for(self, path: SourcePath) -> tuple[Lease, GrantAnswer]:
        key = (path.source.key, path.transport)
        task = self._granted.get(key)
        if task is None or (task.done() and (task.exception() or task.result()[0].check())):
            task = asyncio.create_task(self._lease(path), name="mx-grant")
            self._granted[key] = task
        return await asyncio.shield(task)

    async def _lease(self, path: SourcePath) -> tuple[Lease, GrantAnswer]:
        connections: list[Connection] = []
        lease = Lease(
            self.channel(path.source.endpoint),
            path.source,
            self._on_change,
            lambda: sum(each.verified_nbytes for each in connections),
            self._reader_id,
            self._options.tls,
        )
        self._leases[lease] = connections
        granted = await lease.open(self._place(), [path.transport], self._options.connect_timeout_s)
        return lease, granted

    def channel(self, endpoint: str) -> grpc.aio.Channel:
        """Return the channel to a source, which the connector closes."""
        if endpoint not in self._channels:
            self._channels[endpoint] = dial(
                endpoint, tls=self._options.tls, insecure=self._options.insecure
            )
        return self._channels[endpoint]

    async def _session(self, path: SourcePath, grant: Grant, pacer: Pacer | None) -> Session:
        transport = self._transports[path.transport]

        def connect() -> Session:
            addresses = resolve(path.source.endpoint)
            session = transport.open(replace(grant, peer_addresses=addresses))
            staged = path.staged and not getattr(session, "fills_device", False)
            if pacer is not None:
                session = PacedSession(session, pacer, path.source.endpoint)
            if staged:
                session = self._stage(session, sum(grant.region_nbytes))
            with self._lock:
                if not grant.cancelled.is_set:
                    self._sessions.append(session)
                    return session
            session.close()
            session.join(2 * self._options.stall_timeout_s)
            raise ClosedError(f"the connection to {grant.peer} came too late")

        # Opening blocks, so it has a thread, which closes what comes when nothing waits for it.
        opening = asyncio.create_task(in_thread(connect), name="mx-open-session")
        try:
            await asyncio.wait((opening,))
        except asyncio.CancelledError:
            self._abandoned.append(opening)
            with self._lock:
                grant.cancelled.set()
            raise
        return opening.result()

    def _stage(self, inner: Session, model_nbytes: int) -> Session:
        """Return a session that fills the target's GPU through `inner`, which it owns. Blocks."""
        from mx.cuda.staged import GrowingStagedSession, StagedSession, slots_for

        slots, slot_nbytes = slots_for(chunk_nbytes_of(model_nbytes))
        try:
            device = self._open_device()
            staged = GrowingStagedSession if isinstance(inner, Growing) else StagedSession
            return staged(inner, device, slot_nbytes=slot_nbytes, slots=slots)
        except BaseException:
            inner.close()
            inner.join(2 * self._options.stall_timeout_s)
            raise

    def _open_device(self) -> Device:
        """Return the target's GPU, which `close` closes after all sessions."""
        from mx.cuda.device import Device
        from mx.cuda.driver import load

        with self._lock:
            if self._device is None:
                self._device = Device.open(load(), self._options.device)
            return self._device

    def _grant(self, path: SourcePath, granted: GrantAnswer) -> Grant:
        peer = path.source.endpoint
        ticket = granted.tickets.get(path.transport)
        if ticket is None:
            raise PeerProtocolError(f"{peer} sent no ticket for {path.transport}", peer=peer)
        if granted.generation != path.source.generation:
            raise PeerProtocolError(f"{peer} granted another generation than requested", peer=peer)
        streams = self._options.streams
        return Grant(
            grant_id=granted.grant_id,
            ticket=ticket,
            generation=granted.generation,
            region_nbytes=granted.region_nbytes,
            peer=peer,
            tls=self._options.data_tls,
            stall_timeout_s=self._options.stall_timeout_s,
            streams=streams if isinstance(streams, int) else FIRST_STREAMS,
            rail=path.rail,
            # A staged session's own destinations are in host memory.
            place=replace(self._place(), device="cpu") if path.staged else self._place(),
            device=self._place().device if path.staged else "cpu",
            trusted_fabric=self._options.trusted_fabric,
            content=path.source.content,
            setting=self._options.transport_context.setting,
        )

    async def give_back(self, connection: Connection, *, lost: bool = False) -> None:
        """Close the session, and the lease if no other session uses it. Once per connection.
        `lost`: the connection has failed."""
        connection.session.close()
        await self._leave(connection.lease, lost=lost)

    async def _leave(self, lease: ReadLease, *, lost: bool = False) -> None:
        self._users[lease] -= 1
        if self._users[lease] <= 0:
            lease.end(lost=lost)  # at once: a draining source would wait for it

    async def last_words(self) -> list[tuple[str, MxError]]:
        """Return why sources have ended leases, as they say, with the sources' keys; each once.
        That connections are lost may have been noticed before. A source has as long to say so as
        giving a lease back takes."""
        left = [each for each in self._leases if each in self._users and not self._users[each]]
        await asyncio.gather(*(lease.close() for lease in left))
        for lease in left:
            del self._leases[lease], self._users[lease]
        said = [(lease.key, lease.check()) for lease in left]
        return [(key, error) for key, error in said if isinstance(error, LAST_WORDS)]

    async def attach(self, connection: Connection, nbytes: int, first_nbytes: int = 0) -> View:
        """Map the source's memory, and return the first `nbytes` of it, which the model takes.
        Those of the first layer are there; what follows may be mapped as it is looked at.

        Raises:
            NotAllowedError: The memory can only be copied; the connection still works.
            SourceError: The source failed; the connection was given back.
            LocalError: This machine can't map it.
        """

        def mapped() -> View:
            view = connection.session.attach(0)
            located_spans(view[:first_nbytes])
            return view

        try:
            view = await uncut(in_thread(mapped))
            if len(view) < nbytes:
                raise PeerProtocolError(
                    f"{connection.peer} holds {len(view)} bytes of a model that takes {nbytes}",
                    peer=connection.peer,
                )
        except SourceError as error:
            release_frames(error)  # which refer to the view
            await self.give_back(connection)
            raise
        return view[:nbytes]

    async def close(self) -> None:
        """Close every session and wait for its end, then end their leases."""
        begun = [*self._begun.values(), *self._granted.values()]
        self._begun.clear()
        self._granted.clear()
        await end_tasks(*begun)
        if self._abandoned:
            # One that may use a GPU needs the device until its end.
            patience_s = _ABANDONED_S if self._options.device == "cpu" else None
            done, others = await asyncio.wait(self._abandoned, timeout=patience_s)
            await asyncio.gather(*done, return_exceptions=True)
            for opening in others:
                opening.cancel()
        sessions, self._sessions = self._sessions, []
        for session in sessions:
            session.close()
        for session in sessions:
            if not await in_thread(session.join, 2 * self._options.stall_timeout_s):
                log.warning("a session has not ended: %r", session)
        if self._device is not None:
            self._device.close()
        leases, self._leases = self._leases, {}
        channels, self._channels = self._channels, {}
        await asyncio.gather(*(lease.close() for lease in leases))
        for channel in channels.values():
            await channel.close(None)
