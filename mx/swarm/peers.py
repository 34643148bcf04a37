"""The peers of a pull: which ones it knows of, and its streams to those that are its neighbours,
and to origins."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol

from mx import codec
from mx.core.swarm.known import KnownPeers
from mx.core.swarm.neighbours import Neighbours
from mx.core.types import SourceRecord, SourceRole
from mx.errors import MxError, PeerProtocolError
from mx.swarm.stream import PeerStream, to_bytes
from mx.tasks import end_tasks
from mx.wire.v1 import peer_pb2
from mx.wire.v1.peer_pb2 import SwarmMessage

log = logging.getLogger(__name__)

#: The most peers that one message may name; an origin names 64.
MOST_EXCHANGED = 256
#: A hello that is not answered within this time is given up.
WELCOME_TIMEOUT_S = 3.0


class PullNode(Protocol):
    """What serves the streams of a pull: `mx.swarm.node.Node`."""

    @property
    def held(self) -> int:
        """The chunks that others may have from here, as a bit set."""

    @property
    def crowded(self) -> bool:
        """True if readers have to request chunks here before they read."""

    def reaches(self, record: SourceRecord) -> bool:
        """Return True if chunks can be read from the source."""

    def coordinate(self) -> None:
        """Request chunks before reading them, from now on."""

    def joined(self, record: SourceRecord, stream: PeerStream, have: bytes, *, seeds: bool) -> int:
        """Add the peer at the other end of a stream, which holds `have`. Returns its number."""

    def heard(self, number: int, message: SwarmMessage) -> None:
        """Act on a message of the peer. Raises PeerProtocolError."""

    def parted(self, number: int) -> None:
        """Remove the peer: its stream has ended."""


class Peers:
    """One pull's; on the loop."""

    def __init__(
        self,
        own_id: str,
        node: PullNode,
        own: Callable[[], SourceRecord | None],
        dial: Callable[[SourceRecord], Awaitable[PeerStream]],
    ) -> None:
        """
        Args:
            own_id: The source id by which others know this pull.
            node: The pull's node.
            own: Returns the record by which others find this pull; None before they can.
            dial: Opens a stream to a source.
        """
        self.known = KnownPeers()
        #: Called with the id of a neighbour that was dialled, and +1 when its stream begins, -1
        #: when it ends.
        self.trades: Callable[[str, int], None] = lambda source_id, change: None
        self._own_id = own_id
        self._node = node
        self._own = own
        self._dial = dial
        self._neighbours = Neighbours(own_id)
        self._streams: dict[str, PeerStream] = {}  # to neighbours and origins, by id
        self._greeting: dict[str, PeerStream | None] = {}  # hellos that are not answered yet
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def any(self) -> bool:
        """Return True if there is a stream to a peer, or a hello under way."""
        return bool(self._streams or self._greeting)

    def told_of(self, sources: Sequence[SourceRecord]) -> None:
        """Meet the sources that a peer names. Raises PeerProtocolError if they are too many."""
        if len(sources) > MOST_EXCHANGED:
            raise PeerProtocolError(
                f"a message names {len(sources)} peers: at most {MOST_EXCHANGED} are allowed"
            )
        self.met(sources, listed=False)

    def met(self, sources: Iterable[SourceRecord], *, listed: bool = True) -> None:
        """Add sources that pull, or hold, the same model, and send hellos to some of them.

        Args:
            sources: Their records.
            listed: True if the coordinator, or the source that the user named, lists them; False if
                another peer named them.
        """
        now_s, keep = time.monotonic(), {**self._streams, **self._greeting}
        self.known.prune(now_s, keep)
        for record in sources:
            if record.source_id == self._own_id:
                continue
            if not self.known.name(record, now_s, listed=listed, keep=keep):
                continue
            # Peers may name pulls only: no bound holds for how many origins are dialled.
            origin = record.role is SourceRole.ORIGIN and listed
            if not origin or self._busy_with(record.key):
                continue
            if self._node.reaches(record):  # else it would suggest chunks that can't be read
                self._start(self._greet(record, None))
        relays = [each.key for each in self.known if each.role is SourceRole.RELAY]
        self._greet_all(self._neighbours.listed(relays))

    def leave(self, key: str) -> None:
        """Close the stream to this source, if there is one."""
        if key in self._streams:
            self._streams[key].close()

    def ban(self, key: str) -> None:
        """Leave this source, and never connect to it again: it sent wrong bytes, or holds something
        else by now."""
        self.known.ban(key)
        self.leave(key)

    def _busy_with(self, key: str) -> bool:
        return key in self._streams or key in self._greeting

    def _greet_all(self, names: Iterable[str]) -> None:
        for name in () if self._closed else names:  # ending streams make place for neighbours
            if name in self.known and not self._busy_with(name):
                self._start(self._greet(self.known.record(name), self._neighbours))

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work, name="mx-greet")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _greet(self, record: SourceRecord, neighbours: Neighbours | None) -> None:
        """Dial a peer and send a hello; if it accepts, serve the stream until it ends. For an
        origin `neighbours` is None: it is not a neighbour, since it does not read here."""
        key, own = record.key, self._own()
        if own is None:
            return
        self._greeting[key] = None
        try:
            stream = await self._dial(record)
        except MxError as error:
            log.info("could not dial %s: %s", record.endpoint, str(error))
            self._forget(key, neighbours)
            return
        self._greeting[key] = stream
        hello = peer_pb2.Hello(source_id=record.source_id, own=codec.source_to_wire(own))
        hello.have = to_bytes(self._node.held)
        stream.send(SwarmMessage(hello=hello))
        timeout = asyncio.get_running_loop().call_later(WELCOME_TIMEOUT_S, stream.close)
        number = -1

        def heard(message: SwarmMessage) -> None:
            nonlocal number
            if number >= 0:
                self._node.heard(number, message)
                return
            if message.WhichOneof("message") != "welcome":
                raise PeerProtocolError(f"{stream.peer} did not answer the hello with a welcome")
            timeout.cancel()
            welcome = message.welcome
            if not welcome.accepted or self._greeting.get(key) is not stream:
                stream.close()
                return
            del self._greeting[key]
            if neighbours is not None:
                self._greet_all(neighbours.answered(key, True))
            number = self._begin(
                record, stream, welcome.have, seeds=welcome.seeds, neighbours=neighbours
            )
            if neighbours is not None:
                self.trades(record.source_id, +1)
            if welcome.coordinated:
                self._node.coordinate()

        try:
            wrong = await stream.listen(heard)
            if wrong is not None:
                log.warning("dropped %s: %s", stream.peer, str(wrong))
        finally:
            timeout.cancel()
            if number >= 0:
                if neighbours is not None:
                    self.trades(record.source_id, -1)
                self._end(key, number, neighbours)
            elif self._greeting.get(key) is stream:
                self._forget(key, neighbours)

    def _forget(self, key: str, neighbours: Neighbours | None) -> None:
        """Forget a peer that did not answer the hello, or refused."""
        del self._greeting[key]
        self.known.forget(key)
        if neighbours is not None:
            self._greet_all(neighbours.answered(key, False))

    async def trade(self, record: SourceRecord, have: bytes, stream: PeerStream) -> None:
        """Answer the hello of a peer; if it becomes a neighbour, serve the stream until it ends.

        Raises:
            PeerProtocolError: The peer has sent what it must not.
        """
        key = record.key
        # When two peers dial at the same time, the stream from the lesser id is kept.
        crossed = key in self._greeting and self._own_id < record.source_id
        answer = None
        if key not in self._streams and not crossed and not self.known.banned(key):
            answer = self._neighbours.greeting(key)
        if answer is None or not answer.welcome:
            await stream.refuse()
            return
        if answer.drop is not None:
            self.leave(answer.drop)
        superseded = self._greeting.pop(key, None)
        if superseded is not None:
            superseded.close()
        self.known.name(record, time.monotonic(), listed=True, keep=self._streams)
        welcome = peer_pb2.Welcome(accepted=True, coordinated=self._node.crowded)
        welcome.have = to_bytes(self._node.held)
        stream.send(SwarmMessage(welcome=welcome))
        number = self._begin(record, stream, have, seeds=False, neighbours=self._neighbours)
        try:
            error = await stream.listen(lambda message: self._node.heard(number, message))
            if error is not None:
                raise error
        finally:
            self._end(key, number, self._neighbours)

    def _begin(
        self,
        record: SourceRecord,
        stream: PeerStream,
        have: bytes,
        *,
        seeds: bool,
        neighbours: Neighbours | None,
    ) -> int:
        try:
            number = self._node.joined(record, stream, have, seeds=seeds)
        except MxError:  # its hello or welcome is malformed: another peer may take its place
            if neighbours is not None:
                self._greet_all(neighbours.gone(record.key))
            raise
        self._streams[record.key] = stream
        return number

    def _end(self, key: str, number: int, neighbours: Neighbours | None) -> None:
        del self._streams[key]
        self._node.parted(number)
        if neighbours is not None:
            self._greet_all(neighbours.gone(key))

    def end(self) -> None:
        """Close every stream."""
        for stream in self._streams.values():
            stream.close()

    async def close(self) -> None:
        """Close every stream, and wait until all have ended."""
        self._closed = True
        self.end()
        await end_tasks(*self._tasks)
