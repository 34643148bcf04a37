"""The grants of one process. A grant is what one reader has of one source: tickets, a lease,
counts, a share of the rate, and events that it has yet to read. All of it begins and ends together.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from mx import counters
from mx.core.grants import Principal
from mx.core.leases import LeaseBook
from mx.log import event
from mx.source.doubts import Doubts
from mx.source.limits import SourceLimits
from mx.source.requests import answer
from mx.source.served import ExposedModel
from mx.tasks import end_tasks
from mx.transport import Authenticating, Exposure, Sending
from mx.wire.v1 import peer_pb2

log = logging.getLogger(__name__)

#: The most events that one reader may leave unread before its renewals have to wait.
_MAX_EVENTS = 16
#: The most chunks of which a renewal may complain.
_MOST_WRONG = 16
#: How often leases are checked for those that have ended or are idle.
_EXPIRE_S = 0.5


class ReaderGrant:
    """What one reader has of one source. On the loop."""

    def __init__(
        self, grants: Grants, served: ExposedModel, principal: Principal, reader: str
    ) -> None:
        """
        Args:
            grants: The grants of the process, of which this one becomes one with `begin`.
            served: The source.
            principal: The reader.
            reader: The reader's host, for logs.
        """
        self.id = secrets.token_hex(16)
        self.served = served
        self.source_id = served.held.source_id
        self.principal = principal
        self.reader = reader
        self.events: asyncio.Queue[peer_pb2.OpenEvent] = asyncio.Queue(_MAX_EVENTS)
        self.free = False  # its reader reads without requesting each chunk
        #: Of each of its exposures that send, what returns the bytes that its reader has got, see
        #: `Compressing`; none if the reader fetches for itself.
        self.sending: list[Callable[[str], int]] = []
        self._grants = grants
        self._exposures: list[Exposure] = []  # those that were asked for a ticket
        self._transports: list[str] = []  # theirs
        self._writing: asyncio.Task[None] | None = None
        self._context: Any = None  # of the stream that keeps it
        self._began_s = 0.0

    def sent(self) -> int:
        """Return the bytes of weights that were sent on it so far, in whatever form."""
        return sum(count(self.id) for count in self.sending)

    @property
    def transport(self) -> str:
        """The transport by which it is read; "several" if the reader has a choice."""
        return self._transports[0] if len(self._transports) == 1 else "several"

    async def begin(self, transports: Iterable[str], context: Any) -> None:
        """Hand out the tickets, and send events from then on. Whatever this raises, call `end`.

        Args:
            transports: The transports that the reader wants tickets of; none: all that there are.
            context: The call's servicer context.

        Raises:
            ClosedError: An exposure is closed.
            PeerProtocolError: The reader does not take the answer.
        """
        self._context = context
        granted = self._hand_out(set(transports))
        await answer(context, peer_pb2.OpenEvent(granted=granted))
        self._began_s = self._grants.clock()
        readers = len(self._grants.leases)
        event(log, "reader.granted", **self._who(), peer=context.peer(), readers=readers)
        self._writing = asyncio.create_task(self._write(context), name="mx-lease-events")

    async def go_on(self, context: Any) -> None:
        """Go on with it on this stream, in place of the one that has kept it: that ends nothing any
        more. Whatever this raises, call `end`.

        Args:
            context: The call's servicer context.

        Raises:
            PeerProtocolError: The reader does not take the answer.
        """
        self._context = context
        await end_tasks(self._writing)
        await answer(context, self._renewal(ends_soon=False))
        self._writing = asyncio.create_task(self._write(context), name="mx-lease-events")
        event(log, "reader.moved", level=logging.DEBUG, **self._who(), peer=context.peer())

    def _renewal(self, *, ends_soon: bool) -> peer_pb2.OpenEvent:
        renewed = peer_pb2.Renewed(
            lease_s=self._grants.leases.lease_s,
            generation=self.served.held.generation,
            max_bytes_per_s=self._grants.limits.share(self.id),
            ends_soon=ends_soon,
        )
        return peer_pb2.OpenEvent(renewed=renewed)

    def tell(self, event: peer_pb2.OpenEvent) -> None:
        """Send the reader an event, unless it does not read them."""
        with contextlib.suppress(asyncio.QueueFull):
            self.events.put_nowait(event)

    async def keep(
        self,
        context: Any,
        renewals: AsyncIterator[peer_pb2.OpenRequest],
        doubts: Doubts,
        ends_soon: Callable[[], bool],
    ) -> None:
        """Renew the lease until the reader returns it, or it has ended, or goes on elsewhere.

        Args:
            context: The call's servicer context.
            renewals: What the reader sends.
            doubts: Hashes again what the reader found wrong.
            ends_soon: Returns whether the stream is about to end.

        Raises:
            TimeoutError: The reader does not renew it, or does not take the answers.
        """
        leases, limits = self._grants.leases, self._grants.limits
        while True:
            async with asyncio.timeout(leases.lease_s * 2):
                renewal = await anext(renewals, None)
                if context is not self._context:
                    return
                if renewal is None:
                    leases.close(self.id)  # the reader has returned it
                    return
                limits.reported(self.id, renewal.read_bytes)
                for chunk in renewal.wrong_chunks[:_MOST_WRONG]:
                    checked = peer_pb2.OpenEvent(checked=peer_pb2.Checked(chunk=chunk))
                    right = functools.partial(self.tell, checked)
                    doubts.add(self.principal.payer, self.served, chunk, right)
                if self.served.cut:
                    continue
                if not leases.renew(self.id, self._grants.clock()):
                    return
                await self.events.put(self._renewal(ends_soon=ends_soon()))

    def revoke(self) -> None:
        """Take back all that was handed out. Idempotent."""
        if self._grants.remove(self) and self.principal.reader_id:
            self.served.participant.closed(self.principal.reader_id)
        for exposure in self._exposures:
            exposure.revoke(self.id)

    async def end(self, context: Any) -> None:
        """Revoke it, and send no more events, unless another stream than this one keeps it."""
        if context is not self._context:
            return
        self.revoke()
        if self._writing is not None:
            seconds = round(self._grants.clock() - self._began_s, 3)
            event(log, "reader.ended", **self._who(), seconds=seconds)
            await end_tasks(self._writing)

    def _hand_out(self, wanted: set[str]) -> peer_pb2.Granted:
        tickets = []
        for name, exposure in self.served.exposures.items():
            if not wanted or name in wanted:
                self._exposures.append(exposure)
                self._transports.append(name)
                ticket = exposure.grant(self.id)
                if self.principal.name and isinstance(exposure, Authenticating):
                    exposure.bind(self.id, self.principal.name)
                tickets.append(peer_pb2.Ticket(transport=name, ticket=ticket))
        sending = [each for each in self._exposures if isinstance(each, Sending)]
        self.sending = [getattr(each, "delivered_to", each.sent_to) for each in sending]
        self._grants.add(self)
        held, reader_id = self.served.held, self.principal.reader_id
        coordinated = bool(reader_id) and self.served.participant.opened(reader_id)
        self.free = bool(reader_id) and not coordinated
        if coordinated:
            self._grants.coordinate(self.source_id)
        return peer_pb2.Granted(
            grant_id=self.id,
            lease_s=self._grants.leases.lease_s,
            generation=held.generation,
            tickets=tickets,
            region_nbytes=[region.view.nbytes for region in held.regions()],
            coordinated=coordinated,
            max_bytes_per_s=self._grants.limits.share(self.id),
        )

    def _who(self) -> dict[str, Any]:
        who = {"grant": self.id, "model": str(self.served.held.key), "reader": self.reader}
        return who | ({"principal": self.principal.name} if self.principal.name else {})

    async def _write(self, context: Any) -> None:
        while True:
            await context.write(await self.events.get())


class Grants:
    """All grants of one process, and the books that count them. On the loop."""

    def __init__(
        self, lease_s: float, limits: SourceLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            lease_s: How long a reader's lease lasts after each renewal.
            limits: The bounds of the process.
            clock: A monotonic clock, in seconds.
        """
        self.leases = LeaseBook(lease_s)
        self.limits = limits
        self.counts = ReadCounts()
        self.clock = clock
        self._open: dict[str, ReaderGrant] = {}

    def admit(self, served: ExposedModel, principal: Principal, reader: str) -> ReaderGrant | None:
        """Return a grant to `begin`, after idle ones whose place it takes have ended; None if the
        reader is refused: tell it `busy`.

        Args:
            served: The source.
            principal: The reader.
            reader: The reader's host, for logs.
        """
        ending = self.limits.admit(principal)
        if ending is None:
            return None
        self._end_idle(ending)
        return ReaderGrant(self, served, principal, reader)

    def movable(self, request: peer_pb2.OpenRequest, name: str) -> ReaderGrant | None:
        """Return the grant that a first message goes on with; None if it is to be a new one.

        Args:
            request: The message.
            name: The principal that the certificate names; "" without one.
        """
        grant = self._open.get(request.grant_id)
        if grant is None or not name or grant.principal.name != name:
            return None
        return grant if grant.source_id == request.source_id else None

    def busy(self) -> peer_pb2.OpenEvent:
        """Return what to tell a reader that is refused."""
        return peer_pb2.OpenEvent(busy=peer_pb2.Busy(retry_after_s=self.limits.retry_after_s()))

    def add(self, grant: ReaderGrant) -> None:
        """Begin to count a grant."""
        self._open[grant.id] = grant
        self.counts.opened(grant)
        self.limits.opened(grant.id, grant.source_id, grant.principal, sent=bool(grant.sending))
        self.leases.open(grant.id, grant.source_id, self.clock())

    def remove(self, grant: ReaderGrant) -> bool:
        """Stop counting a grant, before its tickets are revoked. Return False if it was not."""
        if self._open.pop(grant.id, None) is None:
            return False
        self.leases.lose(grant.id)
        counters.add(counters.GIVEN_BYTES, grant.transport, self._given_nbytes(grant))
        self.limits.closed(grant.id)
        self.counts.closed(grant)
        return True

    def given_nbytes(self) -> Counter[str]:
        """Return the bytes that readers have had so far on open grants, by transport; those of
        ended ones are in `mx.counters`."""
        found: Counter[str] = Counter()
        for grant in self._open.values():
            found[grant.transport] += self._given_nbytes(grant)
        return found

    def _given_nbytes(self, grant: ReaderGrant) -> int:
        return grant.sent() if grant.sending else self.limits.reported_nbytes(grant.id)

    def has_unexpired(self, source_id: str) -> bool:
        """Return True if a reader may still trust what it reads from this source."""
        return self.leases.has_unexpired(source_id, self.clock())

    def tell(self, event: peer_pb2.OpenEvent, source_id: str = "") -> None:
        """Send an event to every reader of a source; "": of all sources."""
        for grant in self._of(source_id):
            grant.tell(event)

    def coordinate(self, source_id: str) -> None:
        """Tell the pulls that read freely that reading is coordinated now.

        A pull without an open stream has no other way to learn this, and chunks that it reads
        uncoordinated are often ones that others have read too.
        """
        for grant in self._of(source_id):
            if grant.free:
                grant.free = False
                grant.tell(peer_pb2.OpenEvent(coordinated=peer_pb2.Coordinated()))

    async def expire(self) -> None:
        """Run forever: revoke the grants whose leases have ended, and idle ones."""
        while True:
            await asyncio.sleep(_EXPIRE_S)
            for lease in self.leases.expire(self.clock()):
                self._open[lease.grant_id].revoke()
            self._look_for_progress()
            self._end_idle(self.limits.idle())

    def _of(self, source_id: str) -> list[ReaderGrant]:
        return [each for each in self._open.values() if source_id in ("", each.source_id)]

    def _look_for_progress(self) -> None:
        for source_id, served in {g.source_id: g.served for g in self._open.values()}.items():
            used, witnessed = served.used(), served.witnessed()
            for grant in self._of(source_id):
                sent_nbytes, fetches = used.get(grant.id, (0, not witnessed))
                self.limits.seen(grant.id, sent_nbytes, fetches=fetches)

    def _end_idle(self, grant_ids: Iterable[str]) -> None:
        """End grants that move nothing. Their readers get the time after which they may retry."""
        for grant in [self._open[grant_id] for grant_id in grant_ids]:
            log.info("withdrew an idle grant of %s", grant.reader)
            grant.tell(self.busy())
            grant.revoke()


# -- the bytes that a source has sent to each of its readers, by which swarms measure progress -----

#: The most readers without grants whose totals are kept.
_MOST_ENDED = 4096

#: A source id, and the id that a reader of it gives itself.
_Key = tuple[str, str]


class ReadCounts:
    """The counts of one process, used on the event loop alone.

    A reader is known by its id and by the address that its lease comes from.
    """

    def __init__(self) -> None:
        self._of: dict[_Key, set[ReaderGrant]] = {}  # a reader's grants
        self._ended: dict[_Key, Counter[str]] = {}  # bytes sent on ended grants, by address

    def opened(self, grant: ReaderGrant) -> None:
        """Begin to count a grant, unless its reader has no id."""
        if grant.principal.reader_id:
            self._of.setdefault(_key(grant), set()).add(grant)

    def closed(self, grant: ReaderGrant) -> None:
        """End a grant. Call this once, before its tickets are revoked."""
        if not grant.principal.reader_id:
            return
        key, address = _key(grant), grant.principal.address
        self._of[key].remove(grant)
        if not self._of[key]:
            del self._of[key]
        if sent := grant.sent():
            ended = self._ended.pop(key, Counter())  # moves the entry to the end
            ended[address] += sent
            self._ended[key] = ended
            while len(self._ended) > _MOST_ENDED:
                del self._ended[next(iter(self._ended))]

    def nbytes(self, source_id: str, name: str, address: str = "") -> int | None:
        """Return the bytes sent to a reader so far.

        Args:
            source_id: The source that it reads.
            name: The reader's id.
            address: Count only grants from this address; "" for all.

        Returns:
            The bytes, or None if the reader has a grant by which it fetches for itself, unseen.
        """
        ended = self._ended.get((source_id, name), Counter())
        total = ended[address] if address else ended.total()
        for grant in self._of.get((source_id, name), ()):
            if address in ("", grant.principal.address):
                if not grant.sending:
                    return None
                total += grant.sent()
        return total


def _key(grant: ReaderGrant) -> _Key:
    return grant.source_id, grant.principal.reader_id
