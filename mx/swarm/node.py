"""One pull's part in a swarm: it exchanges messages with neighbours and origins, has the pull's
transfer read what they allow, and allows them to read here. `mx.core.swarm` makes the decisions."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from mx import codec
from mx.core.grid import ChunkGrid
from mx.core.holdings import Holdings, HoldingsListener
from mx.core.swarm.commands import (
    Cancel,
    Command,
    Decline,
    Interested,
    NotInterested,
    ReadFreely,
    Request,
)
from mx.core.swarm.free import free_after_s
from mx.core.swarm.patience import Patience
from mx.core.swarm.receiver import Receiver
from mx.core.swarm.slots import WIDTH
from mx.core.swarm.standing import Reader
from mx.core.types import SourceRecord
from mx.errors import PeerProtocolError
from mx.swarm.peers import Peers
from mx.swarm.stream import PeerStream, from_bytes, to_bytes
from mx.swarm.uploads import Sent, Uploads
from mx.tasks import end_tasks
from mx.wire.v1.peer_pb2 import SwarmMessage

log = logging.getLogger(__name__)

TICK_S = 0.2


class Reads(Protocol):
    """The transfer of a node's pull: `mx.fetching.transfer.Transfer`."""

    @property
    def holdings(self) -> Holdings:
        """The chunks that are verified."""

    def subscribe(self, listener: HoldingsListener) -> int:
        """Report every later change of `holdings`. Returns the chunks that are verified now."""

    def coordinate(self) -> None:
        """Read only what is allowed, from now on."""

    def read_freely(self) -> None:
        """Read from any source from now on."""

    def allow(self, source: str, chunk: int) -> bool:
        """Let the chunk be read from this source. Returns False if it is verified already."""

    def withdraw(self, source: str, chunk: int) -> None:
        """Stop reading the chunk from this source: another one serves it."""


@dataclass
class _ConnectedPeer:
    record: SourceRecord
    stream: PeerStream
    seeds: bool
    readable: bool  # else it may read here, but gets no requests
    connected: bool = False


def _unreached(source: SourceRecord) -> bool:
    return False


class Node:
    """One pull's; on the loop. It announces what is held here and answers requests. While reading
    is coordinated it also decides which chunk is read from which peer.
    """

    def __init__(
        self,
        own_id: str,
        grid: ChunkGrid,
        reads: Reads,
        own: Callable[[], SourceRecord | None],
        dial: Callable[[SourceRecord], Awaitable[PeerStream]],
        reaches: Callable[[SourceRecord], bool],
        changed: Callable[[], None],
    ) -> None:
        """
        Args:
            own_id: The source id by which others know this pull.
            grid: How the model is cut into chunks.
            reads: The pull's transfer.
            own: Returns the record by which others find this pull; None before they can.
            dial: Opens a stream to a peer.
            reaches: Returns True if there is a path to a source.
            changed: Called when `coordinated` or `reading_from` change, or when `waits_until_s`
                comes nearer, or lies ahead again.
        """
        self.coordinated = False
        self.reading_from: dict[str, tuple[object, SourceRecord]] = {}
        self.peers = Peers(own_id, self, own, dial)
        self._chunk_count = len(grid)
        self._reads: Reads | None = reads
        self._reaches = reaches
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._gives = True
        self._width = WIDTH  # in coordinated reading
        self._silent: set[str] = set()  # sources that serve nothing any more
        self.holdings = reads.holdings
        reads.subscribe(self)  # before the receiver looks at what is held
        self._receiver = Receiver(
            len(grid), self.holdings, width=0, free_s=free_after_s(grid.chunk_nbytes)
        )
        self._uploads = Uploads(grid.chunk_nbytes, by_address=False)
        self._patience = Patience(time.monotonic())
        self._peers: dict[int, _ConnectedPeer] = {}
        self._numbers: dict[str, int] = {}
        self._count = 0
        self._reading: dict[int, int] = {}  # chunk -> the peer that it is read from
        self._announcing: asyncio.TimerHandle | None = None
        self.landed = asyncio.Event()  # set with each chunk that is held from now on
        self._woken = asyncio.Event()  # cleared while time alone changes nothing here
        self._ticking = asyncio.create_task(self._tick(), name="mx-swarm-tick")

    # -- coordinated and free reading -------------------------------------------------------------

    def coordinate(self) -> None:
        """Request chunks before reading them, from now on: others pull from the same source."""
        if self.coordinated or self._reads is None:
            return
        self._wake()
        self.coordinated = True
        self._patience.coordinate()
        self._reads.coordinate()
        self.reading_from.clear()
        self._receiver.width = self._width
        for peer in self._peers.values():
            peer.connected = False
            if peer.seeds and peer.readable:
                peer.stream.send(SwarmMessage(coordinated=True))
        self._changed()
        self._do(self._receiver.plan(time.monotonic()))

    def read_freely(self) -> None:
        """Read from any source from now on: there is no peer to request chunks from."""
        if self.coordinated and self._reads is not None:
            self.coordinated = False
            self._receiver.width = 0
            self._reads.read_freely()
            self._changed()

    def supply(self, supplied: bool) -> None:
        """Request no chunks while `supplied`: the pull has links that others don't share."""
        self._width = 0 if supplied else WIDTH
        if self.coordinated:
            self._receiver.width = self._width
            self._do(self._receiver.plan(time.monotonic()))

    def reading_ended(self) -> None:
        """Only serve others from now on: the pull's transfer is about to end."""
        self._reads = None

    @property
    def complete(self) -> bool:
        return self.holdings.whole

    @property
    def waits_until_s(self) -> float:
        """The time until which peers may serve what is missing, if nothing happens before."""
        if not self.coordinated:
            return -math.inf
        seeded = any(peer.seeds and peer.readable for peer in self._peers.values())
        return self._patience.until_s(given=seeded or self._receiver.can_be_given)

    def _news(self, record: Callable[[float], None]) -> None:
        """Record that there is hope, and wake the pull if it has given up waiting."""
        now_s = time.monotonic()
        in_vain = self.coordinated and self.waits_until_s <= now_s
        record(now_s)
        if in_vain:
            self._changed()

    @property
    def held(self) -> int:
        """The chunks that others may have from here, as a bit set."""
        return self.holdings.bits if self._gives else 0

    @property
    def slots(self) -> int:
        """How many slots are in use."""
        return self._uploads.slots

    @property
    def crowded(self) -> bool:
        """Return True if readers have to request chunks here before they read."""
        return self._uploads.reader_count > 1 or not self.complete

    # -- mx.core.holdings.HoldingsListener, called on any thread ----------------------------------

    def chunk_verified(self, chunk: int) -> None:
        self._loop.call_soon_threadsafe(self._landed, chunk)

    def chunk_corrupt(self, chunk: int, source: str) -> None:
        self._loop.call_soon_threadsafe(self._failed, chunk, source)

    # -- on the loop ------------------------------------------------------------------------------

    def _landed(self, chunk: int) -> None:
        self.landed.set()
        self._news(self._patience.landed)
        number = self._reading.pop(chunk, -1)
        if number in self._peers:
            self._peers[number].stream.send(SwarmMessage(finished=chunk))
        self._do(self._receiver.landed(number, chunk, time.monotonic()))
        self._plan_announcement()

    def _failed(self, chunk: int, source: str) -> None:
        number = self._numbers.get(source, -1)
        if self._reading.get(chunk) == number:
            del self._reading[chunk]
        if number in self._peers:
            self._peers[number].stream.send(SwarmMessage(cancel=chunk))
        self._do(self._receiver.failed(number, chunk, time.monotonic()))
        self._changed()

    def lost(self, key: str, *, for_good: bool) -> None:
        """End the stream to a source to which no path is left; `for_good`: and never meet it
        again."""
        self._patience.lost(key)
        if for_good:
            self.peers.ban(key)
        else:
            self.peers.leave(key)

    def gives_no_more(self, key: str) -> None:
        """Request nothing any more from a source that has withdrawn what it served. It may go on
        reading here."""
        self._silent.add(key)
        self._patience.lost(key)
        number = self._numbers.get(key, -1)
        if number not in self._peers:
            return
        peer = self._peers[number]
        peer.readable = peer.seeds = peer.connected = False
        self._reading = {chunk: n for chunk, n in self._reading.items() if n != number}
        self.reading_from.pop(key, None)
        commands = self._receiver.gone(number, time.monotonic())
        self._receiver.joined(number)
        self._do(commands)
        self._changed()

    def reaches(self, record: SourceRecord) -> bool:
        """Return True if chunks can be read from the source."""
        return record.key not in self._silent and self._reaches(record)

    # -- streams ----------------------------------------------------------------------------------

    def joined(self, record: SourceRecord, stream: PeerStream, have: bytes, *, seeds: bool) -> int:
        """Add the peer at the other end of a stream, which holds `have`.

        Returns:
            Its number.

        Raises:
            PeerProtocolError: `have` names chunks that do not exist.
        """
        held = from_bytes(have, self._chunk_count)
        readable = self.reaches(record)
        if readable:
            self._news(functools.partial(self._patience.joined, record.key))
        self._count += 1
        number = self._count
        self._peers[number] = _ConnectedPeer(record, stream, seeds, readable)
        self._numbers[record.key] = number
        self._receiver.joined(number, held if readable else 0, whole=seeds and readable)
        self._uploads.joined(number, stream, Reader(stream.address, record.source_id))
        if self.coordinated and seeds and readable and not self.complete:
            # The origin may not know it yet: so far perhaps one pull alone read from it.
            stream.send(SwarmMessage(coordinated=True))
        self._do(self._receiver.plan(time.monotonic()))
        return number

    def parted(self, number: int) -> None:
        """Remove the peer: its stream has ended."""
        key = self._peers.pop(number).record.key
        del self._numbers[key]
        for chunk in [c for c, n in self._reading.items() if n == number]:
            del self._reading[chunk]
        self._uploads.gone(number)
        self.reading_from.pop(key, None)
        self._do(self._receiver.gone(number, time.monotonic()))
        self._changed()

    async def trade(self, record: SourceRecord, have: bytes, stream: PeerStream) -> None:
        """Serve the stream of a peer that has sent a hello; returns when the stream has ended.

        Raises:
            PeerProtocolError: The peer has sent what it must not.
        """
        # While a reader comes after all others (it lost a slot here), it is refused as neighbour.
        if self._uploads.standing.comes_last(Reader(stream.address, record.source_id)):
            await stream.refuse()
            return
        await self.peers.trade(record, have, stream)

    # -- messages ---------------------------------------------------------------------------------

    def heard(self, number: int, message: SwarmMessage) -> None:
        """Act on a message of the peer. Raises PeerProtocolError."""
        self._wake()
        kind = message.WhichOneof("message")
        peer, now_s = self._peers[number], time.monotonic()
        match kind:
            case None:
                pass  # what a later release says besides
            case "have":
                chunks = from_bytes(message.have, self._chunk_count)
                if peer.readable:
                    self._news(self._patience.announced)
                    self._do(self._receiver.announced(number, chunks, now_s))
            case "unchoke":
                self._do(self._receiver.unchoked(number, now_s))
            case "not_interested":
                self._uploads.not_interested(number)
            case "interested":
                self._uploads.interested(number)
            case "coordinated":
                self.coordinate()
            case "peers":
                self.peers.told_of(
                    [codec.source_from_wire(source) for source in message.peers.sources]
                )
            case "request" | "allow" | "reject" | "finished" | "cancel" | "suggest" if (
                getattr(message, kind) < self._chunk_count
            ):
                self._heard_of(number, peer, kind, getattr(message, kind), now_s)
            case _:
                raise PeerProtocolError(
                    f"{peer.stream.peer} sent {kind} out of order, or for a chunk that does not"
                    " exist"
                )

    def _heard_of(
        self, number: int, peer: _ConnectedPeer, kind: str, chunk: int, now_s: float
    ) -> None:
        """Act on a message about one chunk."""
        match kind:
            case "request":
                self._uploads.request(number, chunk, available=self.gives(chunk))
            case "allow":
                requested = number in self._receiver.requested(chunk)
                if requested and self._allow(peer.record.key, chunk):
                    self._take_over(chunk, number)
                else:
                    peer.stream.send(SwarmMessage(cancel=chunk))
            case "reject":
                self._do(self._receiver.rejected(number, chunk, now_s))
            case "suggest" if not self._width:  # it will come another way
                peer.stream.send(SwarmMessage(decline=chunk))
            case "suggest":
                if peer.readable:
                    self._do(self._receiver.suggested(number, chunk, now_s))
            case _:
                self._uploads.done(number, chunk, read=kind == "finished")

    def _take_over(self, chunk: int, number: int) -> None:
        """Read the chunk from this peer. If another peer was late with it, and was hedged, that
        read ends first: two can't write to one place."""
        late = self._reading.get(chunk)
        self._reading[chunk] = number
        if late is not None and late != number:
            peer = self._peers[late]
            peer.stream.send(SwarmMessage(cancel=chunk))
            self._withdraw(peer.record.key, chunk)

    def _do(self, commands: Iterable[Command]) -> None:
        for each in commands:
            peer = self._peers[each.peer]
            match each:
                case Request(_, chunk):
                    peer.stream.send(SwarmMessage(request=chunk))
                    self._connect(peer)
                case Cancel(_, chunk):
                    if self._reading.get(chunk) == each.peer:
                        del self._reading[chunk]
                        self._withdraw(peer.record.key, chunk)
                    peer.stream.send(SwarmMessage(cancel=chunk))
                case ReadFreely(_, chunk):
                    self._connect(peer)
                    if self._allow(peer.record.key, chunk):
                        self._take_over(chunk, each.peer)
                case Decline(_, chunk):
                    peer.stream.send(SwarmMessage(decline=chunk))
                case NotInterested():
                    peer.stream.send(SwarmMessage(not_interested=True))
                case Interested():
                    peer.stream.send(SwarmMessage(interested=True))

    def _connect(self, peer: _ConnectedPeer) -> None:
        """Have the pull connect to the peer. Only the first request does so: connecting all peers
        to all others at once would take a second of a core."""
        if not peer.connected:
            peer.connected = True
            self.reading_from[peer.record.key] = (peer.stream, peer.record)
            self._changed()

    def _allow(self, source: str, chunk: int) -> bool:
        return self._reads is not None and self._reads.allow(source, chunk)

    def _withdraw(self, source: str, chunk: int) -> None:
        if self._reads is not None:
            self._reads.withdraw(source, chunk)

    # -- announcements ----------------------------------------------------------------------------

    def _plan_announcement(self) -> None:
        at_s = self._receiver.announce_at_s
        if at_s is not None and self._announcing is None:
            delay_s = max(0.0, at_s - time.monotonic())
            self._announcing = self._loop.call_later(delay_s, self._announce)

    def _announce(self) -> None:
        self._announcing = None
        for number, chunks in self._receiver.announcements() if self._gives else ():
            self._peers[number].stream.send(SwarmMessage(have=to_bytes(chunks)))

    # -- readers, for the server ------------------------------------------------------------------

    def watch(self, sent: Sent, trades: Callable[[str, int], None]) -> None:
        """Set what the server provides.

        Args:
            sent: Returns the bytes sent to a reader.
            trades: Called with (source id, +1 or -1) when a dialled stream begins or ends.
        """
        self._uploads.sent, self.peers.trades = sent, trades

    def opened(self, reader_id: str) -> bool:
        """Count a lease of a reader. Returns True if it has to request chunks before it reads."""
        self._uploads.opened(reader_id)
        if self._uploads.reader_count == 2 and self.complete:
            for peer in self._peers.values():
                peer.stream.send(SwarmMessage(coordinated=True))
        return self.crowded

    def closed(self, reader_id: str) -> None:
        """End the count of one lease of the reader."""
        self._uploads.closed(reader_id)

    def gives(self, chunk: int) -> bool:
        """Return True if readers may have the chunk from here."""
        return self._gives and self.holdings.has(chunk)

    def withdrawn(self) -> None:
        """Serve nothing any more, and go on receiving. Idempotent."""
        self._gives = False

    # -- time -------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Let time go on before an event from which something may follow."""
        if not self._woken.is_set():
            self._uploads.tick(time.monotonic())  # it changes nothing else while they are idle
            self._woken.set()

    async def _tick(self) -> None:
        while True:
            # Ticks also sample what readers take, which no event reports. Without a slot in use,
            # and without coordinated reading, there is nothing to sample, and no deadline.
            if (not self.coordinated or self.complete) and self._uploads.idle:
                self._woken.clear()
                await self._woken.wait()
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            self._uploads.tick(now_s)
            if not self.coordinated or self.complete:
                continue
            free = self._receiver.free
            self._do(self._receiver.tick(now_s))
            if self._receiver.free and not free:
                log.info("no source allows a slot: reading without requests")
            readable = any(peer.readable for peer in self._peers.values())
            if self._patience.alone(now_s, readable=readable):
                self.read_freely()

    def end(self) -> None:
        """Close every stream."""
        self.peers.end()

    async def close(self) -> None:
        """Close every stream, and wait until all have ended. Idempotent."""
        self.reading_ended()
        if self._announcing is not None:
            self._announcing.cancel()
        await self.peers.close()
        await end_tasks(self._ticking)
        self._reaches = _unreached  # let go of what the pull's function keeps
