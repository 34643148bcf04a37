"""An origin's part in a swarm: it sends each chunk once before it sends any chunk twice, and names
the other pulls that read from it to each new one."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mx import codec
from mx.core.swarm.origin import Seeder, Suggest
from mx.core.swarm.standing import Reader
from mx.core.types import SourceRecord
from mx.errors import PeerProtocolError
from mx.swarm.stream import PeerStream, from_bytes, to_bytes
from mx.swarm.uploads import Sent, Uploads
from mx.wire.v1 import peer_pb2
from mx.wire.v1.peer_pb2 import SwarmMessage

TICK_S = 0.2
#: How many other pulls an origin names to a new one.
MOST_INTRODUCED = 64
#: Swarm streams that a source keeps open at a time.
MOST_STREAMS = 1024
#: ... from one address ...
MOST_OF_ADDRESS = 256
#: ... and from one reader: it may reconnect before its lost stream is noticed.
MOST_OF_READER = 2


@dataclass
class _SeededPeer:
    record: SourceRecord
    stream: PeerStream
    have: int
    reader: Reader


class Origin:
    """One origin's; on the loop. A pull that reads alone reads without requests; as soon as a
    second one reads, all send requests."""

    def __init__(self, chunk_count: int, chunk_nbytes: int) -> None:
        self._chunk_count = chunk_count
        self._uploads = Uploads(chunk_nbytes, by_address=True)
        self._standing = self._uploads.standing
        self._all = (1 << chunk_count) - 1
        self._peers: dict[int, _SeededPeer] = {}
        self._numbers = 0
        self._coordinated = False
        self._opened = False  # every chunk was announced: readers may request any
        self._seeder = Seeder(chunk_count, standing=self._standing)
        self._ticking: asyncio.Task[None] | None = None

    def watch(self, sent: Sent, trades: Callable[[str, int], None]) -> None:
        """Set `sent`, which returns the bytes sent to a reader. An origin dials no reader, so it
        has no use for `trades`."""
        del trades
        self._uploads.sent = sent

    @property
    def slots(self) -> int:
        """How many slots are in use."""
        return self._uploads.slots

    # -- readers' leases ------------------------------------------------------------------------

    def opened(self, reader_id: str) -> bool:
        """Count a lease of a pull that can be part of a swarm. Returns True if the pull has to
        request chunks before it reads."""
        self._uploads.opened(reader_id)
        if self._uploads.reader_count > 1:
            self._start()
        return self._coordinated

    def closed(self, reader_id: str) -> None:
        """End the count of one lease of the pull."""
        self._uploads.closed(reader_id)
        self._return_to_free_reading()

    # -- peers ----------------------------------------------------------------------------------

    async def trade(self, record: SourceRecord, have: bytes, stream: PeerStream) -> None:
        """Serve the stream of a peer that has sent a hello; returns when the stream has ended.

        Raises:
            PeerProtocolError: `have` names chunks that do not exist, or the peer has sent what it
                must not.
        """
        held = from_bytes(have, self._chunk_count)
        reader = Reader(stream.address, record.source_id)
        if not self._admits(reader):
            await stream.refuse()
            return
        self._numbers += 1
        number = self._numbers
        peer = self._peers[number] = _SeededPeer(record, stream, held, reader)
        self._uploads.joined(number, stream, reader)
        welcome = peer_pb2.Welcome(accepted=True, seeds=True, coordinated=self._coordinated)
        if self._opened:
            welcome.have = to_bytes(self._all)
        stream.send(SwarmMessage(welcome=welcome))
        self._introduce(number)
        if self._coordinated:
            self._suggest(self._seeder.joined(number, held, time.monotonic()))
        try:
            error = await stream.listen(lambda message: self._heard(number, peer, message))
            if error is not None:
                raise error
        finally:
            del self._peers[number]
            self._uploads.gone(number)
            self._suggest(self._seeder.gone(number, time.monotonic()))
            self._return_to_free_reading()

    def _admits(self, reader: Reader) -> bool:
        """Return True if another stream of this reader is within the bounds."""
        there = [peer.reader for peer in self._peers.values()]
        return (
            len(there) < MOST_STREAMS
            and sum(each.address == reader.address for each in there) < MOST_OF_ADDRESS
            and there.count(reader) < MOST_OF_READER
            and not self._standing.banned(reader)
        )

    def _introduce(self, newcomer: int) -> None:
        others = [
            peer.record
            for number, peer in self._peers.items()
            if number != newcomer and not self._standing.last(number)
        ]
        if others:
            known = random.sample(others, min(len(others), MOST_INTRODUCED))
            meet = peer_pb2.Peers(sources=[codec.source_to_wire(record) for record in known])
            self._peers[newcomer].stream.send(SwarmMessage(peers=meet))

    def _heard(self, number: int, peer: _SeededPeer, message: SwarmMessage) -> None:
        kind = message.WhichOneof("message")
        if kind is None:  # what a later release says besides
            return
        now_s = time.monotonic()
        if kind == "have":
            chunks = from_bytes(message.have, self._chunk_count)
            peer.have |= chunks
            self._seeder.announced(number, chunks)
            self._announce_once_all_are_out()
            return
        if kind in ("unchoke", "not_interested"):
            self._uploads.not_interested(number)
            return
        if kind == "interested":
            self._uploads.interested(number, later=not self._seeder.all_out)
            return
        if kind == "coordinated":  # the peer sends requests: it needs suggestions
            self._start()
            return
        if kind not in ("request", "finished", "cancel", "decline"):
            raise PeerProtocolError(f"{peer.stream.peer} sent {kind} to an origin")
        chunk = getattr(message, kind)
        if chunk >= self._chunk_count:
            raise PeerProtocolError(f"{peer.stream.peer} named chunk {chunk}, which does not exist")
        if kind == "request":
            self._uploads.request(
                number,
                chunk,
                available=self._seeder.may_request(number, chunk),
                suggested=self._seeder.suggested(number, chunk),
            )
        elif kind == "decline":
            self._suggest(self._seeder.declined(number, chunk, now_s))
        else:
            ended = self._seeder.done if kind == "finished" else self._seeder.failed
            self._suggest(ended(number, chunk, now_s))
            self._uploads.done(number, chunk, read=kind == "finished")

    # -- messages to peers ----------------------------------------------------------------------

    def _start(self) -> None:
        """From now on readers send requests: several pulls read, or one says that it does."""
        if self._coordinated:
            return
        self._coordinated = True
        self._ticking = asyncio.create_task(self._tick(), name="mx-seeding")
        now_s = time.monotonic()
        for number, peer in self._peers.items():
            peer.stream.send(SwarmMessage(coordinated=True))
            self._suggest(self._seeder.joined(number, peer.have, now_s))

    def _return_to_free_reading(self) -> None:
        """Once no pull is left, let the next one read freely as long as it is alone."""
        if self._peers or self._uploads.reader_count or not self._coordinated:
            return
        self._coordinated = self._opened = False
        self._seeder = Seeder(self._chunk_count, standing=self._standing)
        self._uploads.restart()
        self.end()

    def _suggest(self, suggestions: Iterable[Suggest]) -> None:
        for each in suggestions:
            self._peers[each.reader].stream.send(SwarmMessage(suggest=each.chunk))
        self._announce_once_all_are_out()

    def _announce_once_all_are_out(self) -> None:
        """Once each chunk is with some reader, announce all of them: readers may request any."""
        if self._coordinated and self._seeder.all_out and not self._opened:
            self._opened = True
            for peer in self._peers.values():
                peer.stream.send(SwarmMessage(have=to_bytes(self._all)))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            self._uploads.tick(now_s)
            self._suggest(self._seeder.tick(now_s))

    def gives(self, chunk: int) -> bool:
        """Return True: an origin holds everything."""
        return True

    def withdrawn(self) -> None:
        """Close every stream."""
        self.end()

    def end(self) -> None:
        """Close every stream."""
        for peer in self._peers.values():
            peer.stream.close()
        if self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None
