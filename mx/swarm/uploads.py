"""What a source serves to its readers: the slots, which `mx.core.swarm.slots` assigns, and the
messages about them. Pulls and origins both have one."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable

from mx.core.swarm.slots import Allow, Answer, Reject, Slots, Unchoke
from mx.core.swarm.standing import Reader, Standing
from mx.swarm.stream import PeerStream
from mx.wire.v1.peer_pb2 import SwarmMessage

log = logging.getLogger(__name__)

#: Returns the bytes sent to a reader (id, address; "" for any address), or None if the source does
#: not see them.
Sent = Callable[[str, str], int | None]


class Uploads:
    """One source's; on the loop. Peers are numbers, as their owner counts them."""

    def __init__(self, chunk_nbytes: int, *, by_address: bool) -> None:
        """
        Args:
            chunk_nbytes: The size of a chunk.
            by_address: Count what was sent to a reader at the address of its stream only. A pull
                counts by the id alone: it does not know from where a peer that it dialled reads.
        """
        self.sent: Sent = lambda name, address: None
        self.standing = Standing(
            chunk_nbytes, lambda r: self.sent(r.name, r.address if by_address else "")
        )
        self._slots = Slots(standing=self.standing)
        self._peers: dict[int, tuple[PeerStream, Reader]] = {}
        self._leases: Counter[str] = Counter()  # by reader

    # -- readers ----------------------------------------------------------------------------------

    @property
    def reader_count(self) -> int:
        """How many readers have a lease."""
        return len(self._leases)

    @property
    def slots(self) -> int:
        """How many slots are in use."""
        return self._slots.reading

    @property
    def idle(self) -> bool:
        """True if time alone changes nothing here: `tick` is not to be called until an event."""
        return self._slots.idle

    def opened(self, reader_id: str) -> None:
        """Count a lease of the reader."""
        self._leases[reader_id] += 1

    def closed(self, reader_id: str) -> None:
        """End the count of one lease of the reader."""
        self._leases[reader_id] -= 1
        if not self._leases[reader_id]:
            del self._leases[reader_id]

    def joined(self, number: int, stream: PeerStream, reader: Reader) -> None:
        """Add a peer: it may send requests."""
        self._peers[number] = stream, reader
        self.standing.joined(number, reader)

    def gone(self, number: int) -> None:
        """Remove a peer: its stream has ended."""
        del self._peers[number]
        self._send(self._slots.gone(number))
        self.standing.gone(number)

    def restart(self) -> None:
        """Begin anew with all slots free: there is no reader."""
        self._slots = Slots(standing=self.standing)

    # -- messages of peers ------------------------------------------------------------------------

    def request(self, number: int, chunk: int, *, available: bool, suggested: bool = False) -> None:
        """Answer a peer's request for a chunk, which is refused unless it is `available`. If the
        chunk was `suggested` to the peer, the answer may come later."""
        answer = Answer.REJECT
        if available:
            answer = self._slots.request(number, chunk, suggested=suggested)
        stream, _ = self._peers[number]
        if answer is Answer.ALLOW:
            stream.send(SwarmMessage(allow=chunk))
        elif answer is Answer.REJECT:
            stream.send(SwarmMessage(reject=chunk))

    def done(self, number: int, chunk: int, *, read: bool) -> None:
        """End a peer's slot: it has `read` the chunk, or has cancelled its request."""
        self._send(self._slots.done(number, chunk, read=read))

    def interested(self, number: int, *, later: bool = False) -> None:
        """Tell the peer when a slot is free; with `later` only after the next read has ended."""
        self._send(self._slots.interested(number, later=later))

    def not_interested(self, number: int) -> None:
        """Let others have the free slot of which the peer was told."""
        self._send(self._slots.not_interested(number))

    def tick(self, now_s: float) -> None:
        """Take back the slots of readers that do not read, and end the streams of readers that
        are banned for it. To be called a few times a second, unless `idle`."""
        self._send(self._slots.tick(now_s))
        for stream, reader in self._peers.values():
            if self.standing.banned(reader):
                stream.close()

    def _send(self, answers: Iterable[Allow | Unchoke | Reject]) -> None:
        for each in answers:
            if each.reader not in self._peers:
                continue
            stream, _ = self._peers[each.reader]
            match each:
                case Allow(_, chunk):
                    stream.send(SwarmMessage(allow=chunk))
                case Reject(_, chunk):
                    log.info("%s does not read chunk %d: its slot is free", stream.peer, chunk)
                    stream.send(SwarmMessage(reject=chunk))
                case Unchoke():
                    stream.send(SwarmMessage(unchoke=True))
