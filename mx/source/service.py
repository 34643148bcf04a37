"""The Peer service: describes the held models and keeps the leases of their readers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from mx import codec
from mx.core.leases import LeaseBook, ReaderLease
from mx.core.types import SourceRecord, SourceState
from mx.errors import PeerProtocolError, PeerRefusedError
from mx.log import event
from mx.runtime import in_thread
from mx.source.counts import ReadCounts
from mx.source.doubts import Doubts
from mx.source.limits import SourceLimits
from mx.source.requests import answer, check_open, first_message, principal_of
from mx.source.served import Served
from mx.swarm.stream import PeerStream
from mx.transport import Sending
from mx.wire.address import address_of_peer
from mx.wire.pages import PIECE_BYTES
from mx.wire.rows import rows_to_wire
from mx.wire.v1 import common_pb2, peer_pb2, peer_pb2_grpc

log = logging.getLogger(__name__)

#: The most chunks of which a renewal may complain.
_MOST_WRONG = 16
#: The most events that one reader may leave unread before its renewals have to wait.
_MAX_EVENTS = 16
#: How often leases are checked for those that have ended or are idle.
_EXPIRE_S = 0.5
#: The most replaced sources that are remembered.
_MAX_GONE = 64


class PeerServicer(peer_pb2_grpc.PeerServicer):
    """The Peer service of one process, on the loop. `models` maps source ids to served models."""

    def __init__(
        self,
        record_of: Callable[[Served], SourceRecord],
        doubts: Doubts,
        *,
        lease_s: float,
        limits: SourceLimits | None = None,
    ) -> None:
        """
        Args:
            record_of: Returns the record of a served model.
            doubts: Hashes again what readers found wrong.
            lease_s: How long a reader's lease lasts after each renewal.
            limits: The bounds of the process.
        """
        self.models: dict[str, Served] = {}
        self.leases = LeaseBook(lease_s)
        self.limits = limits or SourceLimits(report_s=lease_s / 4)
        self.counts = ReadCounts()
        self.streams = 0  # the number of open swarm streams
        self.state = SourceState.SERVING
        self._record_of = record_of
        self._doubts = doubts
        self._clock = time.monotonic
        self._queues: dict[str, asyncio.Queue[peer_pb2.OpenEvent]] = {}
        self._alone: dict[str, str] = {}  # grants of pulls that read freely -> source ids
        #: The source ids of some sources that are gone -> what their readers are told.
        self._gone: dict[str, peer_pb2.Stale] = {}

    # -- rpcs ---------------------------------------------------------------------------------

    async def Describe(
        self, request: peer_pb2.DescribeRequest, context: Any
    ) -> peer_pb2.DescribeResponse:
        return peer_pb2.DescribeResponse(
            sources=[
                codec.source_to_wire(self._record_of(served))
                for served in self.models.values()
                if request.name in ("", served.held.key.name) and served.listed
            ]
        )

    async def Pages(
        self, request: peer_pb2.PagesRequest, context: Any
    ) -> AsyncIterator[peer_pb2.LayerPage]:
        held = next(
            (
                served.held
                for served in self.models.values()
                if (served.held.manifest.ref.identity, served.held.manifest.ref.layout)
                == (request.identity, request.layout)
            ),
            None,
        )
        if held is None:
            raise PeerRefusedError("this process serves no such model")
        count = len(held.manifest.layout.layers)
        for begin, end in codec.ranges_from_wire(request.layers):
            for layer in range(begin, min(end, count)):
                page = held.pages.get(layer) or b""  # a pull may not know it yet
                for offset in range(0, len(page), PIECE_BYTES):
                    data = page[offset : offset + PIECE_BYTES]
                    yield peer_pb2.LayerPage(layer=layer, offset=offset, data=data)

    async def Table(
        self, request: peer_pb2.TableRequest, context: Any
    ) -> AsyncIterator[common_pb2.TableRows]:
        if request.source_id not in self.models:
            raise PeerRefusedError("this process serves no such source")
        for page in await self._pages_of(self.models[request.source_id]):
            yield page

    async def Open(
        self,
        request_iterator: AsyncIterator[peer_pb2.OpenRequest],
        context: Any,
    ) -> None:
        """Give a grant, and keep its lease until the reader ends the stream."""
        request = await first_message(request_iterator)
        if request is None:
            return
        reader = check_open(request)
        stale = await self._looked_after(request) or self._stale(request)
        if stale is not None:
            await answer(context, peer_pb2.OpenEvent(stale=stale))
            return
        served = self._find(request)
        held = served.held
        principal = principal_of(context, request.reader_id)
        ending = self.limits.admit(principal)
        if ending is None:
            # At debug level: a refused reader retries several times a second.
            event(log, "reader.busy", level=logging.DEBUG, reader=reader.hostname)
            await answer(context, self._busy())
            return
        for idle_id in ending:
            self._end_idle(idle_id)
        grant_id = secrets.token_hex(16)
        queue: asyncio.Queue[peer_pb2.OpenEvent] = asyncio.Queue(_MAX_EVENTS)
        self._queues[grant_id] = queue
        pump: asyncio.Task[None] | None = None
        reader_id = request.reader_id
        counted = False
        try:
            wanted = set(request.transports)
            tickets = [
                peer_pb2.Ticket(transport=name, ticket=exposure.grant(grant_id))
                for name, exposure in served.exposures.items()
                if not wanted or name in wanted
            ]
            sending = [served.exposures[ticket.transport] for ticket in tickets]
            if reader_id:
                self.counts.opened(
                    grant_id,
                    held.source_id,
                    address_of_peer(context.peer()),
                    reader_id,
                    [exposure for exposure in sending if isinstance(exposure, Sending)],
                )
            coordinated = bool(reader_id) and served.participant.opened(reader_id)
            counted = bool(reader_id)
            if coordinated:
                self._begin_coordination(held.source_id)
            elif counted:
                self._alone[grant_id] = held.source_id
            self.limits.opened(
                grant_id,
                held.source_id,
                principal,
                sent=any(isinstance(exposure, Sending) for exposure in sending),
            )
            self.leases.open(
                grant_id, held.source_id, held.generation, reader.hostname, self._clock()
            )
            granted = peer_pb2.Granted(
                grant_id=grant_id,
                lease_s=self.leases.lease_s,
                generation=held.generation,
                tickets=tickets,
                region_nbytes=[region.view.nbytes for region in held.regions()],
                coordinated=coordinated,
                max_bytes_per_s=self.limits.share(grant_id),
            )
            await answer(context, peer_pb2.OpenEvent(granted=granted))
            granted_s = self._clock()
            who: dict[str, Any] = {
                "grant": grant_id,
                "model": str(held.key),
                "reader": reader.hostname,
            }
            event(log, "reader.granted", **who, peer=context.peer(), readers=len(self.leases))
            pump = asyncio.create_task(self._pump(queue, context), name="mx-lease-events")
            while True:
                async with asyncio.timeout(self.leases.lease_s * 2):
                    renewal = await anext(request_iterator, None)
                    if renewal is None:
                        self.leases.close(grant_id)  # the reader has returned it
                        return
                    self.limits.reported(grant_id, renewal.read_bytes)
                    for chunk in renewal.wrong_chunks[:_MOST_WRONG]:
                        right = functools.partial(self._checked, grant_id, chunk)
                        self._doubts.add(principal.address, served, chunk, right)
                    if served.cut:
                        continue
                    if not self.leases.renew(grant_id, self._clock()):
                        return
                    renewed = peer_pb2.Renewed(
                        lease_s=self.leases.lease_s,
                        generation=held.generation,
                        max_bytes_per_s=self.limits.share(grant_id),
                    )
                    await queue.put(peer_pb2.OpenEvent(renewed=renewed))
        except TimeoutError:
            event(log, "reader.expired", grant=grant_id, reader=reader.hostname)
        finally:
            self._queues.pop(grant_id, None)
            self._alone.pop(grant_id, None)
            self.leases.lose(grant_id)
            self.limits.closed(grant_id)
            self.counts.closed(grant_id)
            if counted:
                served.participant.closed(reader_id)
            for exposure in served.all_exposures():
                exposure.revoke(grant_id)
            if pump is not None:
                event(log, "reader.ended", **who, seconds=round(self._clock() - granted_s, 3))
                pump.cancel()
                await asyncio.gather(pump, return_exceptions=True)

    async def Trade(
        self, request_iterator: AsyncIterator[peer_pb2.SwarmMessage], context: Any
    ) -> None:
        """Trade chunks with a peer until the stream ends."""
        first = await first_message(request_iterator)
        if first is None or first.WhichOneof("message") != "hello":
            raise PeerProtocolError("the first message of a swarm stream must be a hello")
        served = self.models.get(first.hello.source_id)
        if served is None or served.newer or self.state is not SourceState.SERVING:
            raise PeerRefusedError("this process serves no such source")
        record = codec.source_from_wire(first.hello.own)
        if not record.ref.same_weights(served.held.manifest.ref):
            raise PeerRefusedError(
                f"{served.held.key} here is another model, or has another layout"
            )

        async def hear() -> peer_pb2.SwarmMessage | None:
            return await anext(request_iterator, None)

        address = address_of_peer(context.peer())
        stream = PeerStream(record.endpoint, hear, context.write, address=address)
        principal = principal_of(context, record.source_id)
        self.streams += 1
        self.limits.trades(principal, +1)
        try:
            if self.limits.full_for(principal):  # it could not read the chunks it requests
                await stream.refuse()
                return
            await served.participant.trade(record, first.hello.have, stream)
        finally:
            self.streams -= 1
            self.limits.trades(principal, -1)

    @staticmethod
    async def _pages_of(served: Served) -> list[common_pb2.TableRows]:
        if served.row_pages is None:  # made once, off the loop: 50,000 rows take a while
            held = served.held
            served.row_pages = await in_thread(lambda: list(rows_to_wire(held.rows())))
        return served.row_pages

    # -- the source's side ----------------------------------------------------------------------

    def drain(self, grace_s: float) -> None:
        """Refuse new grants, and send every reader the time that it has left."""
        self.state = SourceState.DRAINING
        event = peer_pb2.OpenEvent(draining=peer_pb2.Draining(grace_s=grace_s))
        self._tell(self._queues, event)

    def supersede(self, source_id: str, generation: int, grace_s: float) -> None:
        """Record that another source of this process replaces this one.

        Args:
            source_id: The source that is replaced. It gives no new grants.
            generation: The generation of the one that replaces it.
            grace_s: How long its readers have to finish; each gets an event.
        """
        self.models[source_id].newer = generation
        event = peer_pb2.OpenEvent(draining=peer_pb2.Draining(grace_s=grace_s))
        self._tell([lease.grant_id for lease in self.leases.of_source(source_id)], event)

    def cut(self, source_id: str) -> None:
        """Cut off the readers of a superseded source: what they read from now on is not valid."""
        served = self.models.get(source_id)
        if served is None:  # removed meanwhile
            return
        served.cut = True
        event = peer_pb2.OpenEvent(stale=_stale_of(served))
        self._tell([lease.grant_id for lease in self.leases.of_source(source_id)], event)
        for exposure in served.all_exposures():
            exposure.set_generation(served.newer)
        served.participant.withdrawn()

    def has_unexpired(self, source_id: str) -> bool:
        """Return True if a reader may still trust what it reads from this source."""
        return self.leases.has_unexpired(source_id, self._clock())

    def remove(self, source_id: str) -> Served | None:
        """Remove a source, and return it. Later requests for it get the generation that has
        replaced it, if there is one."""
        served = self.models.pop(source_id, None)
        self.limits.forget(source_id)
        if served is not None and served.newer:
            self._gone[source_id] = _stale_of(served)
            while len(self._gone) > _MAX_GONE:
                del self._gone[next(iter(self._gone))]
        return served

    def _begin_coordination(self, source_id: str) -> None:
        """Tell the pulls that read freely that reading is coordinated now.

        A pull without an open stream has no other way to learn this, and chunks that it reads
        uncoordinated are often ones that others have read too.
        """
        grants = [grant for grant, read in self._alone.items() if read == source_id]
        for grant_id in grants:
            del self._alone[grant_id]
        self._tell(grants, peer_pb2.OpenEvent(coordinated=peer_pb2.Coordinated()))

    def _tell(self, grant_ids: Iterable[str], event: peer_pb2.OpenEvent) -> None:
        for grant_id in grant_ids:
            queue = self._queues.get(grant_id)
            if queue is not None:
                with contextlib.suppress(asyncio.QueueFull):  # its reader does not read events
                    queue.put_nowait(event)

    async def expire_leases(self) -> None:
        """Run forever: revoke the tickets of leases that have ended, and of idle grants."""
        while True:
            await asyncio.sleep(_EXPIRE_S)
            for lease in self.leases.expire(self._clock()):
                self._revoke(lease)
            self._look_for_progress()
            for grant_id in self.limits.idle():
                self._end_idle(grant_id)

    def _look_for_progress(self) -> None:
        for served in self.models.values():
            used, witnessed = served.used(), served.witnessed()
            for lease in self.leases.of_source(served.held.source_id):
                sent_nbytes, fetches = used.get(lease.grant_id, (0, not witnessed))
                self.limits.seen(lease.grant_id, sent_nbytes, fetches=fetches)

    def _busy(self) -> peer_pb2.OpenEvent:
        return peer_pb2.OpenEvent(busy=peer_pb2.Busy(retry_after_s=self.limits.retry_after_s()))

    def _end_idle(self, grant_id: str) -> None:
        """End a grant that moves nothing. Its reader gets the time after which it may retry."""
        self._tell([grant_id], self._busy())
        lease = self.leases.find(grant_id)
        if lease is not None:
            log.info("withdrew an idle grant of %s", lease.reader)
            self.leases.lose(grant_id)
            self._revoke(lease)

    def _revoke(self, lease: ReaderLease) -> None:
        self.limits.closed(lease.grant_id)
        self.counts.closed(lease.grant_id)
        served = self.models.get(lease.source_id)
        if served is not None:
            for exposure in served.all_exposures():
                exposure.revoke(lease.grant_id)

    def document(self, digest: bytes) -> bytes | None:
        """Return a document of any served model, or None."""
        for served in self.models.values():
            data = served.held.manifest.documents.get(digest)
            if data is not None:
                return data
        return None

    @staticmethod
    async def _pump(queue: asyncio.Queue[peer_pb2.OpenEvent], context: Any) -> None:
        while True:
            await context.write(await queue.get())

    def _checked(self, grant_id: str, chunk: int) -> None:
        checked = peer_pb2.Checked(chunk=chunk)
        self._tell([grant_id], peer_pb2.OpenEvent(checked=checked))

    async def _looked_after(self, request: peer_pb2.OpenRequest) -> peer_pb2.Stale | None:
        """Return what to tell a reader of lent memory that is about to be superseded, since its
        owner wants to write, or does not use it any more; None: it is not."""
        served = self.models.get(request.source_id)
        if served is None or served.watchman is None or await served.watchman.check():
            return None
        if self.state is SourceState.DRAINING:  # nothing supersedes it
            return None
        return self._stale(request) or peer_pb2.Stale(generation=served.held.generation + 1)

    def _stale(self, request: peer_pb2.OpenRequest) -> peer_pb2.Stale | None:
        """Return what to tell a reader whose generation is not given any more; None: it is."""
        served = self.models.get(request.source_id)
        if served is None:
            return self._gone.get(request.source_id)
        if request.generation != served.held.generation and not served.newer:
            return peer_pb2.Stale(generation=served.held.generation)
        return _stale_of(served) if served.newer else None

    def _find(self, request: peer_pb2.OpenRequest) -> Served:
        served = self.models.get(request.source_id)
        if served is None or served.held.manifest.ref.identity != request.identity:
            raise PeerRefusedError("this process does not hold that model")
        if self.state is SourceState.DRAINING:
            raise PeerRefusedError("draining: no new grants are given")
        return served


def _stale_of(served: Served) -> peer_pb2.Stale:
    return peer_pb2.Stale(generation=served.newer, changed=served.changed)
