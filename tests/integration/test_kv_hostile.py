"""Holders of the name's key that lie about KV blocks, and strangers: a reader takes no wrong block
and goes on, a pool keeps its slots, and neither hangs, ends, or takes more than its bounds."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import grpc.aio
import pytest

from mx import namekey, runtime
from mx.core.versions import headers
from mx.errors import MxError, NotAllowedError, PeerBusyError, PeerProtocolError, PeerRefusedError
from mx.kv import KvPool, proof
from mx.kv import peer as kv_peer
from mx.kv import pool as kv_pool
from mx.kv.layout import MOST_RUNS
from mx.source import requests
from mx.wire.channel import Remote, Role, cut, dial, translating
from mx.wire.rpc import Stub
from mx.wire.v1 import kv_pb2 as pb
from tests.support.kv_blocks import (
    FORM,
    LAYERS,
    NAME,
    SLOTS,
    Listing,
    Taking,
    key_file,
    settings,
    until,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

ALL = 20
HUGE = 2**64 - 1
Twist = Callable[[pb.KvEvent], Sequence[pb.KvEvent]]


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return key_file(tmp_path)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that was lost is asked again soon."""
    monkeypatch.setattr(kv_peer, "AGAIN_S", 0.2)
    monkeypatch.setattr(kv_peer, "MOST_AGAIN_S", 0.4)


class Twisted:
    """A call's context that sends other events, sealed as the pool's are."""

    def __init__(self, context: Any, twist: Twist, key: namekey.NameKey, nonce: bytes) -> None:
        self._context, self._twist, self._key, self._nonce = context, twist, key, nonce
        self._seals: tuple[proof.Seal, proof.Seal] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, event: pb.KvEvent) -> None:
        if self._seals is None:
            nonces = self._nonce, event.challenge.nonce
            opens, closes = (proof.Seal(self._key, NAME, nonces) for _ in range(2))
            self._seals = opens, closes
            for each in self._twist(event):
                await self._context.write(each)
            return
        opens, closes = self._seals
        for each in self._twist(pb.KvEvent.FromString(opens.open(event.sealed))):
            sealed = closes.close(each.SerializeToString())
            await self._context.write(pb.KvEvent(sealed=sealed))


class LyingPool(KvPool):
    """A pool that sends other events than it should."""

    twist: ClassVar[Twist] = staticmethod(lambda event: [event])

    async def answer(self, hello: Any, requests: Any, context: Any, principal: str) -> None:
        twisted = Twisted(context, type(self).twist, self._key, hello.nonce)
        await super().answer(hello, requests, twisted, principal)


def lying(key: Path, twist: Twist) -> Listing:
    kind = type("Lying", (LyingPool,), {"twist": staticmethod(twist)})
    return Listing(key, kind=kind)


def granted(change: Callable[[pb.KvGranted], object]) -> Twist:
    def twist(event: pb.KvEvent) -> list[pb.KvEvent]:
        if event.WhichOneof("event") == "granted":
            change(event.granted)
        return [event]

    return twist


def changes(change: Callable[[pb.KvChanges], object]) -> Twist:
    def twist(event: pb.KvEvent) -> list[pb.KvEvent]:
        if event.WhichOneof("event") == "changes":
            change(event.changes)
        return [event]

    return twist


def fields(message: Any, **values: Any) -> None:
    for name, value in values.items():
        field: Any = getattr(message, name, None)
        if isinstance(value, list):
            del field[:]
            field.extend(value)
        else:
            setattr(message, name, value)


def rows(**values: Any) -> Callable[[pb.KvGranted], None]:
    return lambda granted: fields(granted.layers[1], **values)


def more_layers(granted: pb.KvGranted) -> None:
    for _ in range(20_000):
        granted.layers.add().CopyFrom(granted.layers[0])


def place(granted: pb.KvGranted) -> None:
    granted.place.addresses.extend(["x" * 100] * 2000)


def tickets(ticket: bytes) -> Callable[[pb.KvGranted], None]:
    def change(granted: pb.KvGranted) -> None:
        for each in granted.tickets:
            each.ticket = ticket

    return change


GRANTS = {
    "another form": lambda g: fields(g, key=b"k" * 3_000_000),
    "a form that is no text": lambda g: fields(g, key=b"\xff\x00"),
    "no slots": lambda g: fields(g, slots=0),
    "more slots than there is memory": lambda g: fields(g, slots=HUGE),
    "no regions": lambda g: fields(g, region_nbytes=[]),
    "small regions": lambda g: fields(g, region_nbytes=[64] * LAYERS),
    "no layers": lambda g: fields(g, layers=[]),
    "a layer less": lambda g: g.layers.pop(),
    "many layers": more_layers,
    "another region": rows(region=2**32 - 1),
    "a huge begin": rows(begin=HUGE),
    "a huge stride": rows(stride=HUGE),
    "huge offsets": rows(offsets=[HUGE] * 4),
    "no offsets": rows(offsets=[]),
    "many offsets": rows(offsets=[0] * (MOST_RUNS + 1)),
    "very many offsets": rows(offsets=list(range(700_000))),
    "a huge run": rows(run_nbytes=HUGE),
    "an empty run": rows(run_nbytes=0),
    "another size": rows(run_nbytes=8),
    "no heads": lambda g: fields(g, heads=0),
    "many heads": lambda g: fields(g, heads=10**9),
    "heads of others": lambda g: fields(g, first_head=2**32 - 1),
    "no tickets": lambda g: fields(g, tickets=[]),
    "empty tickets": tickets(b""),
    "tickets that are garbage": tickets(b"\xff" * 500),
    "tickets that are large": tickets(b"t" * 1_000_000),
    "a place that is too large": place,
}


@pytest.mark.parametrize("lie", GRANTS)
def test_a_grant_that_is_wrong(key: Path, lie: str) -> None:
    """It is refused with a reason, which has a bound, and asked again."""
    with lying(key, granted(GRANTS[lie])) as own, Taking(key, own.endpoint) as took:
        until(lambda: took.why() not in ("", "it was not reached yet"))
        for _ in range(20):
            assert 0 < len(took.why()) < 4000
            assert took.why() not in ("tcp", "shm")
            assert took.reader.found(took.names) == 0
            time.sleep(0.05)
        assert took.fetch(1) == took.names[:1]
        until(lambda: own.pool.counts()["readers"] == 0)


@pytest.mark.parametrize("lease_s", [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e308, 1e-308])
def test_a_lease_of_no_time(key: Path, lease_s: float) -> None:
    with (
        lying(key, granted(lambda g: fields(g, lease_s=lease_s))) as own,
        Taking(key, own.endpoint) as took,
    ):
        assert took.finds(ALL)
        assert took.fetch(ALL) == []
        assert took.has(own.cache, own.slots)


def first_slot(slot: int) -> Callable[[pb.KvChanges], None]:
    def change(changes: pb.KvChanges) -> None:
        changes.slots[0] = slot

    return change


INDEXES = {
    "a slot beyond": changes(first_slot(SLOTS + 1)),
    "a slot far beyond": changes(first_slot(2**32 - 1)),
    "one withdrawn, and digests": changes(first_slot(0)),
    "digests of another size": changes(lambda c: fields(c, digests=c.digests[:-1])),
    "no digests": changes(lambda c: fields(c, digests=b"")),
    "names of another size": changes(lambda c: fields(c, blocks=c.blocks[:-1])),
    "no names": changes(lambda c: fields(c, blocks=b"")),
    "more slots": changes(lambda c: c.slots.extend([0] * 100_000)),
}


@pytest.mark.parametrize("lie", INDEXES)
def test_an_index_that_is_wrong(key: Path, lie: str) -> None:
    with lying(key, INDEXES[lie]) as own, Taking(key, own.endpoint) as took:
        until(lambda: "index" in took.why() or "no place for" in took.why())
        assert took.reader.found(took.names) == 0
        assert took.fetch(1) == took.names[:1]


def test_numbers_that_go_back(key: Path) -> None:
    numbers = iter([5, 4, 3, 2, 1, 0] * 1000)
    with (
        lying(key, changes(lambda c: fields(c, number=next(numbers)))) as own,
        Taking(key, own.endpoint) as took,
    ):
        assert took.finds(ALL)
        own.pool.withdraw(own.names[:3])
        until(lambda: "go back" in took.why() or took.why() in ("tcp", "shm"))
        assert not kv_task(took).done()


def kv_task(took: Taking) -> asyncio.Task[None]:
    peer: Any = next(iter(took.reader._peers.values()))
    found: asyncio.Task[None] = peer._task
    return found


def test_a_pool_that_floods_the_index(key: Path) -> None:
    """Of what it lists beyond its slots nothing is kept; another pool is read all the same."""
    digests, count = b"d" * 32 * LAYERS, 1000

    def flood(event: pb.KvEvent) -> list[pb.KvEvent]:
        if event.WhichOneof("event") != "changes":
            return [event]
        floods = []
        for at in range(50):
            names = b"".join((at * count + each).to_bytes(32, "big") for each in range(count))
            floods.append(pb.KvChanges(blocks=names, slots=[1] * count, digests=digests * count))
        return [event, *(pb.KvEvent(changes=each) for each in floods)]

    with lying(key, flood) as own, Taking(key, own.endpoint) as took:
        assert took.finds(ALL)
        peer: Any = next(iter(took.reader._peers.values()))
        until(lambda: peer._live is not None and peer._live.mirror.ignored == 50 * count - 12)
        assert peer._live is not None
        assert len(peer._live.mirror.entries) == SLOTS
        assert took.fetch(ALL) == []
        assert took.has(own.cache, own.slots)


SILENT = {
    "never": lambda event: [],
    "after its proof": lambda event: [event] if event.HasField("challenge") else [],
    "after its grant": lambda event: (
        [event] if event.WhichOneof("event") in ("challenge", "granted") else []
    ),
    "without its events": lambda event: [pb.KvEvent()],
}


@pytest.mark.parametrize("silent", SILENT)
def test_a_pool_that_does_not_answer(key: Path, silent: str) -> None:
    with (
        lying(key, SILENT[silent]) as own,
        Taking(key, own.endpoint, connect_timeout_s=1) as took,
    ):
        until(lambda: "does not answer" in took.why() or "did not send" in took.why())
        assert took.reader.found(took.names) == 0


def test_a_pool_that_says_too_much(key: Path) -> None:
    def twist(event: pb.KvEvent) -> list[pb.KvEvent]:
        return [event] * (500 if event.HasField("renewed") else 1)

    with lying(key, twist) as own, Taking(key, own.endpoint) as took:
        assert took.finds(ALL)
        for _ in range(3):
            assert took.fetch(ALL) == []
            time.sleep(0.5)
        assert took.has(own.cache, own.slots)


@pytest.mark.parametrize("form", ["one head", "all"])
def test_rows_of_others_elements(key: Path, form: str) -> None:
    """The bytes are not those that the digests are of, so that no block is right."""

    def shift(granted: pb.KvGranted) -> None:
        for each in granted.layers:
            if form == "all":
                each.stride = 0
            else:
                each.offsets[0], each.offsets[1] = each.offsets[1], each.offsets[0]

    with lying(key, granted(shift)) as own, Taking(key, own.endpoint) as took:
        assert took.finds(ALL)
        failed = took.fetch(ALL)
        assert len(failed) >= ALL - 1  # with stride 0 all are the first
        until(lambda: "wrong blocks" in took.why())


# -- between them ----------------------------------------------------------------------------------


class Relayed(KvPool):
    """A pool behind one who has no key, and relays the stream with changes."""

    relay: ClassVar[Twist] = staticmethod(lambda event: [event])
    seen: ClassVar[list[bytes]] = []

    async def answer(self, hello: Any, requests: Any, context: Any, principal: str) -> None:
        await super().answer(hello, requests, Between(context, type(self).relay), principal)


class Between:
    """A call's context whose events are relayed."""

    def __init__(self, context: Any, relay: Twist) -> None:
        self._context, self._relay = context, relay

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, event: pb.KvEvent) -> None:
        for each in self._relay(event):
            Relayed.seen.append(each.SerializeToString())
            await self._context.write(each)


def relayed(key: Path, relay: Callable[[bytes], Sequence[bytes]]) -> Listing:
    """List blocks through one who sends other bytes for what is sealed."""
    Relayed.seen.clear()

    def change(event: pb.KvEvent) -> list[pb.KvEvent]:
        if not event.HasField("sealed"):
            return [event]
        return [pb.KvEvent(sealed=each) for each in relay(event.sealed)]

    return Listing(key, kind=type("Between", (Relayed,), {"relay": staticmethod(change)}))


def test_who_relays_a_stream_learns_nothing(key: Path) -> None:
    with relayed(key, lambda sealed: [sealed]) as own, Taking(key, own.endpoint) as took:
        assert took.finds(ALL)
        assert took.fetch(ALL) == []
        assert took.has(own.cache, own.slots)
        said = b"".join(Relayed.seen)
        assert not any(name in said for name in own.names)
        assert FORM.encode() not in said


PLAIN = pb.KvEvent(granted=pb.KvGranted(key=FORM.encode(), slots=SLOTS)).SerializeToString()
RELAYS: dict[str, Callable[[bytes], Sequence[bytes]]] = {
    "a bit": lambda sealed: [sealed[:-1] + bytes([sealed[-1] ^ 1])],
    "a bit of the tag": lambda sealed: [bytes([sealed[0] ^ 1]) + sealed[1:]],
    "an end": lambda sealed: [sealed[:-1]],
    "more": lambda sealed: [sealed + b"\0"],
    "twice": lambda sealed: [sealed, sealed],
    "plain": lambda sealed: [PLAIN],
    "nothing": lambda sealed: [b""],
}


@pytest.mark.parametrize("relay", RELAYS)
def test_who_relays_a_stream_changes_nothing(key: Path, relay: str) -> None:
    with relayed(key, RELAYS[relay]) as own, Taking(key, own.endpoint) as took:
        took.refused("not what the pool has sent")
        until(lambda: took.reader.found(took.names) == 0)
        assert not kv_task(took).done()


# -- readers ---------------------------------------------------------------------------------------


class Reader:
    """A reader's stream, by hand; on mx's loop."""

    def __init__(self, call: Any, key: Path) -> None:
        self.call, self.key = call, namekey.load(settings(key))
        self.nonce = proof.nonce()
        self.seal: proof.Seal | None = None

    async def send(self, **request: Any) -> None:
        await self.call.write(pb.KvRequest(**request))

    async def next(self, wanted: str = "") -> pb.KvEvent:
        """Return the next event, or the next one of a kind. Raises MxError."""
        with translating("the pool"):
            async with asyncio.timeout(30):
                while True:
                    event = await anext(self.call)
                    if self.seal is not None:
                        event = pb.KvEvent.FromString(self.seal.open(event.sealed))
                    if not wanted or event.WhichOneof("event") == wanted:
                        assert isinstance(event, pb.KvEvent)
                        return event

    async def ends(self) -> MxError:
        """Return the error that the stream ends with."""
        try:
            while True:
                await self.next()
        except StopAsyncIteration:
            raise AssertionError("it ended without an error") from None
        except MxError as error:
            return error

    async def enter(self) -> pb.KvGranted:
        await self.send(hello=pb.KvHello(name=NAME, nonce=self.nonce))
        nonces = self.nonce, (await self.next("challenge")).challenge.nonce
        await self.send(proof=proof.prove(self.key, NAME, proof.READER, nonces))
        self.seal = proof.Seal(self.key, NAME, nonces)
        return (await self.next("granted")).granted


@asynccontextmanager
async def streams(endpoint: str, key: Path, count: int = 1) -> AsyncIterator[list[Reader]]:
    """Streams of one connection."""
    channel = dial(endpoint)
    service = pb.DESCRIPTOR.services_by_name["Kv"]
    stub = Stub(channel, service, Remote(Role.SOURCE, endpoint))
    calls = [stub.Open() for _ in range(count)]
    try:
        yield [Reader(each, key) for each in calls]
    finally:
        for each in calls:
            cut(each)
        await channel.close(None)


def on_loop(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(90):
            await work()

    runtime.run(bounded)


@pytest.fixture
def own(key: Path) -> Iterator[Listing]:
    with Listing(key) as made:
        yield made


def as_it_was(own: Listing, key: Path) -> None:
    """The pool has lost no slot and no block, and honest readers get them."""
    until(lambda: own.pool.counts()["readers"] == 0)
    with Taking(key, own.endpoint) as took:
        assert took.finds(ALL)
        assert took.fetch(ALL) == []
        assert took.has(own.cache, own.slots)
        counts = {"listed": ALL, "free": SLOTS - ALL, "leaving": 0, "readers": 1}
        assert own.pool.counts() == counts
        assert own.pool.wrong == 0


#: About as much as a server takes in one message.
MOST = 60_000
SHORT = pb.KvHello(name=NAME, nonce=b"short")
LONG = pb.KvHello(name=NAME, nonce=b"n" * MOST)
FIRST: dict[str, tuple[pb.KvRequest, type[MxError]]] = {
    "nothing": (pb.KvRequest(), PeerProtocolError),
    "a renewal": (pb.KvRequest(renewal=pb.KvRenewal(confirmed=1)), PeerProtocolError),
    "a proof": (pb.KvRequest(proof=pb.KvProof()), PeerProtocolError),
    "no name": (pb.KvRequest(hello=pb.KvHello()), PeerRefusedError),
    "another name": (pb.KvRequest(hello=pb.KvHello(name="x" * 10_000)), PeerRefusedError),
}


@pytest.mark.parametrize("first", FIRST)
def test_a_first_message_that_has_no_place(own: Listing, key: Path, first: str) -> None:
    async def work() -> None:
        async with streams(own.endpoint, key) as (reader,):
            await reader.call.write(FIRST[first][0])
            assert isinstance(await reader.ends(), FIRST[first][1])

    on_loop(work)
    as_it_was(own, key)


def test_bytes_that_are_no_message(own: Listing, key: Path) -> None:
    async def work() -> None:
        channel = grpc.aio.insecure_channel(own.endpoint)
        call: Any = channel.stream_stream("/mx.wire.v1.Kv/Open", None, None)(metadata=headers())  # type: ignore[call-arg]
        await call.write(b"\xff" * 1000)
        with pytest.raises(grpc.aio.AioRpcError, match="malformed"):
            await anext(aiter(call))
        await channel.close(None)

    on_loop(work)
    as_it_was(own, key)


PROOFS = {
    "none": pb.KvProof(),
    "garbage": pb.KvProof(signature=b"s" * 64),
    "a long signature": pb.KvProof(signature=b"s" * MOST),
    "a certificate that is garbage": pb.KvProof(certificate=b"c" * 200, signature=b"s" * 64),
    "a long certificate": pb.KvProof(certificate=b"c" * MOST, signature=b"s" * 64),
}


@pytest.mark.parametrize("shown", PROOFS)
@pytest.mark.parametrize("hello", [SHORT, LONG, None], ids=["short", "long", "right"])
def test_a_proof_that_is_none(own: Listing, key: Path, shown: str, hello: Any) -> None:
    async def work() -> None:
        async with streams(own.endpoint, key) as (reader,):
            await reader.send(hello=hello or pb.KvHello(name=NAME, nonce=reader.nonce))
            assert len((await reader.next("challenge")).challenge.nonce) == proof.NONCE_BYTES
            await reader.send(proof=PROOFS[shown])
            assert isinstance(await reader.ends(), NotAllowedError)

    on_loop(work)
    as_it_was(own, key)


def test_a_proof_of_another_stream(own: Listing, key: Path) -> None:
    """Nor is what the pool itself has shown one of a reader."""

    async def work() -> None:
        async with streams(own.endpoint, key, 2) as (one, other):
            challenges = []
            for each in (one, other):
                await each.send(hello=pb.KvHello(name=NAME, nonce=one.nonce))
                challenges.append((await each.next("challenge")).challenge)
            nonces = one.nonce, challenges[0].nonce
            await other.send(proof=proof.prove(one.key, NAME, proof.READER, nonces))
            await one.send(proof=challenges[0].proof)
            for each in (one, other):
                assert isinstance(await each.ends(), NotAllowedError)

    on_loop(work)
    as_it_was(own, key)


@pytest.mark.parametrize(
    "request_",
    [
        pb.KvRequest(),
        pb.KvRequest(hello=pb.KvHello(name=NAME)),
        pb.KvRequest(proof=pb.KvProof()),
        pb.KvRequest(renewal=pb.KvRenewal(confirmed=1)),
        pb.KvRequest(renewal=pb.KvRenewal(confirmed=HUGE)),
    ],
    ids=["nothing", "hello", "proof", "not told", "far from told"],
)
def test_a_reader_that_does_not_keep_to_the_protocol(
    own: Listing, key: Path, request_: pb.KvRequest
) -> None:
    async def work() -> None:
        async with streams(own.endpoint, key) as (reader,):
            await reader.enter()
            await reader.next("changes")
            await reader.call.write(request_)
            assert isinstance(await reader.ends(), PeerProtocolError)

    on_loop(work)
    as_it_was(own, key)


def test_a_reader_that_says_all_is_wrong(own: Listing, key: Path) -> None:
    """What it does not know it can't name, what is right stays; a block that it names often is
    one."""

    async def work() -> None:
        async with streams(own.endpoint, key) as (reader,):
            await reader.enter()
            await reader.next("changes")
            unknown = [at.to_bytes(32, "big") for at in range(1000)]
            await reader.send(renewal=pb.KvRenewal(wrong=[*unknown, b"", b"w" * 20_000]))
            await reader.next("renewed")
            assert own.pool.wrong == 0
            await reader.send(renewal=pb.KvRenewal(wrong=own.names))
            await reader.next("renewed")
            assert own.pool.wrong == 0 and own.pool.counts()["listed"] == ALL
            own.cache[1][:, own.slots[0]] += 1
            await reader.send(renewal=pb.KvRenewal(wrong=[own.names[0]] * 1000))
            told = (await reader.next("changes")).changes
            assert (told.blocks, list(told.slots)) == (own.names[0], [0])
            assert own.pool.wrong == 1
            assert own.pool.counts()["leaving"] == 1
            await reader.send(renewal=pb.KvRenewal(confirmed=told.number))
            await reader.next("renewed")

    on_loop(work)
    assert own.pool.counts()["free"] == SLOTS - ALL + 1


def test_a_reader_that_never_confirms(
    own: Listing, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_pool, "PATIENCE_S", 1.0)

    async def work() -> None:
        async with streams(own.endpoint, key) as (reader,):
            await reader.enter()
            own.pool.withdraw(own.names[:4])
            assert own.pool.counts()["leaving"] == 4

            async def renew() -> None:
                while True:
                    await reader.send(renewal=pb.KvRenewal())
                    await asyncio.sleep(0.05)

            renewing = asyncio.create_task(renew())
            assert "wait for this reader" in str(await reader.ends())
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)

    on_loop(work)
    until(lambda: own.pool.counts()["free"] == SLOTS - ALL + 4)
    assert own.pool.counts()["readers"] == 0


def test_a_reader_that_takes_nothing(own: Listing, key: Path) -> None:
    """Its stream fills up; what it would be told has a bound, and slots come back."""

    async def work() -> None:
        async with streams(own.endpoint, key) as (reader,):
            await reader.enter()

            async def renew() -> None:
                while True:
                    await reader.send(renewal=pb.KvRenewal())
                    await asyncio.sleep(0.02)

            renewing = asyncio.create_task(renew())
            try:
                for _ in range(200):
                    for slot in own.pool.take(1):
                        own.pool.publish(slot.to_bytes(32, "big"), slot)
                    await asyncio.sleep(0.005)
                waiting = [len(each.changes) for each in own.pool._index._readers.values()]
                assert max(waiting) <= 2 * SLOTS
            finally:
                renewing.cancel()
                await asyncio.gather(renewing, return_exceptions=True)

    on_loop(work)
    until(lambda: own.pool.counts()["leaving"] == 0)
    counts = own.pool.counts()
    assert counts["listed"] + counts["free"] == SLOTS


def test_many_streams_of_one(own: Listing, key: Path) -> None:
    """They have a bound; those that show no proof are none, and none keeps an honest reader out."""

    async def work() -> None:
        most = kv_pool.MOST_OF_ONE
        async with streams(own.endpoint, key, most + 10) as readers:
            for each in readers[:most]:
                await each.enter()
            assert own.pool.counts()["readers"] == most
            for each in readers[most : most + 3]:
                with pytest.raises(PeerBusyError):
                    await each.enter()
            for each in readers[most + 3 :]:
                await each.send(hello=pb.KvHello(name=NAME, nonce=each.nonce))
                await each.next("challenge")
            assert own.pool.counts()["readers"] == most
            cut(readers[0].call)
            await asyncio.to_thread(until, lambda: own.pool.counts()["readers"] < most)

    on_loop(work)
    as_it_was(own, key)


@pytest.mark.parametrize("stage", ["hello", "proof"])
def test_a_stream_that_stays_silent_ends(
    own: Listing, key: Path, stage: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(requests, "FIRST_MESSAGE_S", 0.5)

    async def work() -> None:
        async with streams(own.endpoint, key) as (reader,):
            if stage == "proof":
                await reader.send(hello=pb.KvHello(name=NAME, nonce=reader.nonce))
                await reader.next("challenge")
            assert isinstance(await reader.ends(), PeerProtocolError)

    on_loop(work)
    assert not [each for each in caplog.records if each.exc_info]  # gRPC's of what no one caught
    as_it_was(own, key)
