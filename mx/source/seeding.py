"""An origin's part in a swarm: hands out each chunk once before any twice, and makes those that
pull from it known to each other."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mx import codec
from mx.core.swarm_slots import Answer, Busy, Gate, Go, Room
from mx.core.swarm_source import Offer, Seeder
from mx.core.swarm_standing import Reader, Standing
from mx.core.types import SourceRecord
from mx.errors import PeerProtocolError
from mx.wire.talk import Talk, from_bytes, to_bytes
from mx.wire.v1 import peer_pb2

log = logging.getLogger(__name__)

TICK_S = 0.2
#: How many of its neighbours-to-be a newcomer is told of.
MEET_MOST = 64
#: Swarm streams that a source keeps open at a time.
MOST_MEMBERS = 1024
#: ... from one address ...
MOST_OF_ADDRESS = 256
#: ... and from one reader: one that has lost its connection may be back before that is known.
MOST_OF_READER = 2


@dataclass
class _Member:
    record: SourceRecord
    talk: Talk
    have: int
    reader: Reader


class Seeding:
    """One origin's, on the loop. As long as one pull alone reads from it, that reads what it
    likes; from the second on, all ask."""

    def __init__(self, chunk_count: int, chunk_nbytes: int) -> None:
        self._chunk_count = chunk_count
        self._sent: Callable[[str, str], int | None] = lambda name, address: None
        self._standing = Standing(chunk_nbytes, lambda r: self._sent(r.name, r.address))
        self._all = (1 << chunk_count) - 1
        self._members: dict[int, _Member] = {}
        self._readers: dict[str, int] = {}  # reader id -> leases
        self._numbers = 0
        self._gated = False
        self._opened = False  # was it said that everything may be asked for?
        self._seeder = Seeder(chunk_count, standing=self._standing)
        self._gate = Gate(standing=self._standing)
        self._ticking: asyncio.Task[None] | None = None

    def watch(
        self, sent: Callable[[str, str], int | None], trades: Callable[[str, int], None]
    ) -> None:
        del trades  # an origin dials no reader
        self._sent = sent

    # -- readers' leases ------------------------------------------------------------------------

    def opened(self, reader_id: str) -> bool:
        """A pull that can be part of a swarm has been granted reads. Must it ask first?"""
        self._readers[reader_id] = self._readers.get(reader_id, 0) + 1
        if len(self._readers) > 1:
            self._start()
        return self._gated

    def closed(self, reader_id: str) -> None:
        """A lease of it has ended."""
        self._readers[reader_id] -= 1
        if not self._readers[reader_id]:
            del self._readers[reader_id]
            self._rest()

    # -- members --------------------------------------------------------------------------------

    async def mingle(self, record: SourceRecord, have: bytes, talk: Talk) -> None:
        """Until the talk ends."""
        held = from_bytes(have, self._chunk_count)
        reader = Reader(talk.address, record.source_id)
        if not self._admits(reader):
            await talk.refuse()
            return
        self._numbers += 1
        number = self._numbers
        member = self._members[number] = _Member(record, talk, held, reader)
        self._standing.joined(number, reader)
        welcome = peer_pb2.Welcome(accepted=True, seeds=True, gated=self._gated)
        if self._opened:
            welcome.have = to_bytes(self._all)
        talk.say(welcome=welcome)
        self._introduce(number)
        if self._gated:
            self._offer(self._seeder.joined(number, held, time.monotonic()))
        try:
            error = await talk.listen(lambda message: self._heard(number, member, message))
            if error is not None:
                log.warning("%s was left: %s", talk.peer, str(error))
        finally:
            del self._members[number]
            self._answers(self._gate.gone(number))
            self._offer(self._seeder.gone(number, time.monotonic()))
            self._standing.gone(number)
            self._rest()

    def _admits(self, reader: Reader) -> bool:
        """Is there a place for another stream of this reader?"""
        there = [member.reader for member in self._members.values()]
        return (
            len(there) < MOST_MEMBERS
            and sum(each.address == reader.address for each in there) < MOST_OF_ADDRESS
            and there.count(reader) < MOST_OF_READER
            and not self._standing.banned(reader)
        )

    def _introduce(self, newcomer: int) -> None:
        others = [
            member.record
            for number, member in self._members.items()
            if number != newcomer and not self._standing.last(number)
        ]
        if others:
            known = random.sample(others, min(len(others), MEET_MOST))
            meet = peer_pb2.Meet(sources=[codec.source_to_wire(record) for record in known])
            self._members[newcomer].talk.say(meet=meet)

    def _heard(self, number: int, member: _Member, message: peer_pb2.SwarmMessage) -> None:
        kind = message.WhichOneof("message")
        now_s = time.monotonic()
        if kind == "have":
            chunks = from_bytes(message.have, self._chunk_count)
            member.have |= chunks
            self._seeder.announced(number, chunks)
            self._offer(())
            return
        if kind in ("room", "pass"):
            self._answers(self._gate.passed(number))
            return
        if kind == "want":
            self._answers(self._gate.want(number, later=not self._seeder.all_out))
            return
        if kind == "gated":  # it asks before it reads, so it is to be offered something
            self._start()
            return
        if kind not in ("ask", "done", "drop", "decline"):
            raise PeerProtocolError(f"{member.talk.peer} said {kind} to an origin")
        chunk = getattr(message, kind)
        if chunk >= self._chunk_count:
            raise PeerProtocolError(f"{member.talk.peer} named chunk {chunk}, which does not exist")
        if kind == "ask":
            self._asked(number, member, chunk)
        elif kind == "decline":
            self._offer(self._seeder.declined(number, chunk, now_s))
        else:
            ended = self._seeder.done if kind == "done" else self._seeder.failed
            self._offer(ended(number, chunk, now_s))
            self._answers(self._gate.done(number, chunk, read=kind == "done"))

    def _asked(self, number: int, member: _Member, chunk: int) -> None:
        answer = Answer.BUSY
        if self._seeder.may_ask(number, chunk):
            promised = self._seeder.promised(number, chunk)
            answer = self._gate.ask(number, chunk, promised=promised)
        if answer is Answer.GO:
            member.talk.say(go=chunk)
        elif answer is Answer.BUSY:
            member.talk.say(busy=chunk)

    # -- what it says ---------------------------------------------------------------------------

    def _start(self) -> None:
        """Several pulls read: from now on all ask."""
        if self._gated:
            return
        self._gated = True
        self._ticking = asyncio.create_task(self._tick(), name="mx-seeding")
        now_s = time.monotonic()
        for number, member in self._members.items():
            member.talk.say(gated=True)
            self._offer(self._seeder.joined(number, member.have, now_s))

    def _rest(self) -> None:
        """Once nobody is left, the next one alone may read as it likes."""
        if self._members or self._readers or not self._gated:
            return
        self._gated = self._opened = False
        self._seeder = Seeder(self._chunk_count, standing=self._standing)
        self._gate = Gate(standing=self._standing)
        self.end()

    def _offer(self, offers: Iterable[Offer]) -> None:
        for each in offers:
            self._members[each.reader].talk.say(offer=each.chunk)
        if self._gated and self._seeder.all_out and not self._opened:
            self._opened = True
            for member in self._members.values():
                member.talk.say(have=to_bytes(self._all))

    def _answers(self, answers: Iterable[Go | Room | Busy]) -> None:
        for each in answers:
            member = self._members.get(each.reader)
            if member is None:
                continue
            if isinstance(each, Go):
                member.talk.say(go=each.chunk)
            elif isinstance(each, Busy):
                log.info("%s does not read chunk %d: its slot is free", member.reader, each.chunk)
                member.talk.say(busy=each.chunk)
            else:
                member.talk.say(room=True)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            self._answers(self._gate.tick(now_s))
            self._offer(self._seeder.tick(now_s))
            for member in self._members.values():
                if self._standing.banned(member.reader):
                    member.talk.close()

    def end(self) -> None:
        """End every talk."""
        for member in self._members.values():
            member.talk.close()
        if self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None
