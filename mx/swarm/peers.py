"""Whom a pull knows of those that pull, or hold, the same model, and whom it talks to."""

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
from mx.wire.v1 import peer_pb2
from mx.wire.v1.peer_pb2 import SwarmMessage

log = logging.getLogger(__name__)

#: Others that a peer tells of in one message; a source tells of 64.
MOST_EXCHANGED = 256
#: A greeting that is not answered by then is given up.
WELCOME_TIMEOUT_S = 3.0


class Host(Protocol):
    """Whose acquaintances they are."""

    @property
    def held(self) -> int:
        """The chunks that are here, as a bit set."""

    @property
    def crowded(self) -> bool:
        """Must readers ask before they read?"""

    def reaches(self, record: SourceRecord) -> bool:
        """Could it be read from?"""

    def joined(self, record: SourceRecord, stream: PeerStream, have: bytes, *, seeds: bool) -> int:
        """A talk has begun. Returns its number. Raises PeerProtocolError."""

    def heard(self, number: int, message: SwarmMessage) -> None:
        """Raises PeerProtocolError."""

    def parted(self, number: int) -> None:
        """The talk has ended."""

    def coordinate(self) -> None:
        """A source says that others read there too."""


class Peers:
    """One pull's, on the loop. `own` is how others find this pull (None before it can be found);
    `dial` opens a talk."""

    def __init__(
        self,
        own_id: str,
        host: Host,
        own: Callable[[], SourceRecord | None],
        dial: Callable[[SourceRecord], Awaitable[PeerStream]],
    ) -> None:
        self.known = KnownPeers()
        #: Hears of neighbours that were dialled, by id: +1 when a talk has begun, -1 at its end.
        self.trades: Callable[[str, int], None] = lambda source_id, change: None
        self._own_id = own_id
        self._host = host
        self._own = own
        self._dial = dial
        self._neighbours = Neighbours(own_id)
        self._streams: dict[str, PeerStream] = {}  # with those that are talked to
        self._greeting: dict[str, PeerStream | None] = {}  # those that have not answered yet
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def any(self) -> bool:
        """Is anybody talked to, or greeted?"""
        return bool(self._streams or self._greeting)

    def told_of(self, sources: Sequence[SourceRecord]) -> None:
        """A peer says that these pull, or hold, the same model. Raises PeerProtocolError."""
        if len(sources) > MOST_EXCHANGED:
            raise PeerProtocolError(f"{len(sources)} peers were told of at once")
        self.met(sources, listed=False)

    def met(self, sources: Iterable[SourceRecord], *, listed: bool = True) -> None:
        """These pull, or hold, the same model. `listed`: so a coordinator, or the source that the
        pull was told of, says; else another peer."""
        now_s, keep = time.monotonic(), {**self._streams, **self._greeting}
        self.known.prune(now_s, keep)
        for record in sources:
            source_id = record.source_id
            if source_id == self._own_id:
                continue
            if not self.known.name(record, now_s, listed=listed, keep=keep):
                continue
            # A peer tells of pulls alone; whoever else it named would be dialled in any number.
            origin = record.role is SourceRole.ORIGIN and listed
            if not origin or self._busy_with(source_id):
                continue
            if self._host.reaches(record):  # else it would offer what can't be taken
                self._start(self._greet(record, None))
        relays = [each.source_id for each in self.known if each.role is SourceRole.RELAY]
        self._greet_all(self._neighbours.listed(relays))

    def leave(self, source_id: str) -> None:
        """Talk to it no more."""
        if source_id in self._streams:
            self._streams[source_id].close()

    def ban(self, source_id: str) -> None:
        """Never talk to it again: it lied, or holds something else by now."""
        self.known.ban(source_id)
        self.leave(source_id)

    def _busy_with(self, source_id: str) -> bool:
        return source_id in self._streams or source_id in self._greeting

    def _greet_all(self, names: Iterable[str]) -> None:
        for name in () if self._closed else names:  # the end of a talk makes place for others
            if name in self.known and not self._busy_with(name):
                self._start(self._greet(self.known.record(name), self._neighbours))

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work, name="mx-greet")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _greet(self, record: SourceRecord, neighbours: Neighbours | None) -> None:
        """Talk to another, if it welcomes that, until the talk ends. Origins are no neighbours:
        they don't read here."""
        source_id, own = record.source_id, self._own()
        if own is None:
            return
        self._greeting[source_id] = None
        try:
            stream = await self._dial(record)
        except MxError as error:
            log.info("%s could not be greeted: %s", record.endpoint, str(error))
            self._forget(source_id, neighbours)
            return
        self._greeting[source_id] = stream
        hello = peer_pb2.Hello(source_id=source_id, own=codec.source_to_wire(own))
        hello.have = to_bytes(self._host.held)
        stream.send(SwarmMessage(hello=hello))
        timeout = asyncio.get_running_loop().call_later(WELCOME_TIMEOUT_S, stream.close)
        number = -1

        def heard(message: SwarmMessage) -> None:
            nonlocal number
            if number >= 0:
                self._host.heard(number, message)
                return
            if message.WhichOneof("message") != "welcome":
                raise PeerProtocolError(f"{stream.peer} did not answer the greeting")
            timeout.cancel()
            welcome = message.welcome
            if not welcome.accepted or self._greeting.get(source_id) is not stream:
                stream.close()
                return
            del self._greeting[source_id]
            if neighbours is not None:
                self._greet_all(neighbours.answered(source_id, True))
            number = self._begin(
                record, stream, welcome.have, seeds=welcome.seeds, neighbours=neighbours
            )
            if neighbours is not None:
                self.trades(source_id, +1)
            if welcome.coordinated:
                self._host.coordinate()

        try:
            complain(stream, await stream.listen(heard))
        finally:
            timeout.cancel()
            if number >= 0:
                if neighbours is not None:
                    self.trades(source_id, -1)
                self._end(source_id, number, neighbours)
            elif self._greeting.get(source_id) is stream:
                self._forget(source_id, neighbours)

    def _forget(self, source_id: str, neighbours: Neighbours | None) -> None:
        """It did not answer, or not want."""
        del self._greeting[source_id]
        self.known.forget(source_id)
        if neighbours is not None:
            self._greet_all(neighbours.answered(source_id, False))

    async def trade(self, record: SourceRecord, have: bytes, stream: PeerStream) -> None:
        """Another has greeted us: talk until the end."""
        source_id = record.source_id
        # Two that greet each other at a time keep the stream of the one with the lesser id.
        crossed = source_id in self._greeting and self._own_id < source_id
        answer = None
        if source_id not in self._streams and not crossed and not self.known.banned(source_id):
            answer = self._neighbours.greeting(source_id)
        if answer is None or not answer.welcome:
            await stream.refuse()
            return
        if answer.drop is not None:
            self.leave(answer.drop)
        superseded = self._greeting.pop(source_id, None)
        if superseded is not None:
            superseded.close()
        self.known.name(record, time.monotonic(), listed=True, keep=self._streams)
        welcome = peer_pb2.Welcome(accepted=True, coordinated=self._host.crowded)
        welcome.have = to_bytes(self._host.held)
        stream.send(SwarmMessage(welcome=welcome))
        number = self._begin(record, stream, have, seeds=False, neighbours=self._neighbours)
        try:
            complain(stream, await stream.listen(lambda message: self._host.heard(number, message)))
        finally:
            self._end(source_id, number, self._neighbours)

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
            number = self._host.joined(record, stream, have, seeds=seeds)
        except MxError:  # it talks nonsense: its place is another's
            if neighbours is not None:
                self._greet_all(neighbours.gone(record.source_id))
            raise
        self._streams[record.source_id] = stream
        return number

    def _end(self, source_id: str, number: int, neighbours: Neighbours | None) -> None:
        del self._streams[source_id]
        self._host.parted(number)
        if neighbours is not None:
            self._greet_all(neighbours.gone(source_id))

    def end(self) -> None:
        """End every talk."""
        for stream in self._streams.values():
            stream.close()

    async def close(self) -> None:
        """End every talk, and wait for that."""
        self._closed = True
        self.end()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def complain(stream: PeerStream, error: MxError | None) -> None:
    """Say what a neighbour did wrong."""
    if error is not None:
        log.warning("%s was left: %s", stream.peer, str(error))
