"""A source's grant begins and ends as a whole, wherever its reader or its call stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from mx.core.grants import YIELD_S, Principal
from mx.core.layout import TensorSpec
from mx.core.leases import MARGIN_S
from mx.core.limits import Bounds
from mx.core.types import ModelKey, SourceRecord
from mx.errors import ClosedError, PeerProtocolError
from mx.source import grants, requests
from mx.source.doubts import Doubts
from mx.source.grants import Grants
from mx.source.limits import SourceLimits
from mx.source.model import SourceModel, hold_tensors
from mx.source.served import ExposedModel
from mx.source.service import PeerServicer
from mx.swarm.stream import PeerStream
from mx.transport import Compressing
from mx.wire.place import place_to_wire
from mx.wire.v1 import peer_pb2
from tests.support.clock import ManualClock
from tests.support.places import nvlink_host

LEASE_S = 2.0
READER = "00000000-0000-4000-8000-000000000001"
ADDRESS = "10.0.0.1"
OTHER = Principal("ipv4:10.0.0.2:1", "10.0.0.2", "00000000-0000-4000-8000-000000000002")


@dataclass
class Exposed:
    """An exposure that sends as many bytes as the test says."""

    granted: set[str] = field(default_factory=set)
    revoked: set[str] = field(default_factory=set)
    sent: dict[str, int] = field(default_factory=dict)
    closed: bool = False

    def grant(self, grant_id: str) -> bytes:
        if self.closed:
            raise ClosedError("closed")
        self.granted.add(grant_id)
        return b"ticket"

    def revoke(self, grant_id: str) -> None:
        self.revoked.add(grant_id)
        self.sent.pop(grant_id, None)

    def set_generation(self, generation: int) -> None: ...
    def active_readers(self) -> int:
        return 0

    def close(self) -> None: ...
    def join(self, timeout_s: float | None = None) -> bool:
        return True

    def sent_bytes(self) -> int:
        return sum(self.sent.values())

    def sent_to(self, grant_id: str) -> int:
        return self.sent.get(grant_id, 0)

    def used(self) -> dict[str, int]:
        return self.sent


@dataclass
class Packing(Exposed):
    """An exposure that sends a quarter of what its readers get."""

    def delivered_to(self, grant_id: str) -> int:
        return 4 * self.sent_to(grant_id)


class Swarm:
    """A participant that counts leases, and coordinates from the second one on."""

    slots = 0

    def __init__(self) -> None:
        self.leases = 0

    def watch(self, sent: Any, trades: Any) -> None: ...
    def opened(self, reader_id: str) -> bool:
        self.leases += 1
        return self.leases > 1

    def closed(self, reader_id: str) -> None:
        self.leases -= 1
        assert self.leases >= 0

    async def trade(self, record: SourceRecord, have: bytes, stream: PeerStream) -> None: ...
    def gives(self, chunk: int) -> bool:
        return True

    def withdrawn(self) -> None: ...
    def end(self) -> None: ...


class Context:
    """The servicer's end of a call."""

    def __init__(self, port: int = 1) -> None:
        self.told: list[peer_pb2.OpenEvent] = []
        self._peer = f"ipv4:{ADDRESS}:{port}"
        self.reads = asyncio.Event()
        self.reads.set()

    def peer(self) -> str:
        return self._peer

    async def write(self, event: peer_pb2.OpenEvent) -> None:
        await asyncio.sleep(0)
        await self.reads.wait()
        self.told.append(event)

    @property
    def kinds(self) -> list[str | None]:
        return [each.WhichOneof("event") for each in self.told]


class Source:
    """One source of a process, with all that counts its grants."""

    def __init__(
        self, held: SourceModel, *, lease_s: float = LEASE_S, max_readers: int = 1
    ) -> None:
        self.clock = ManualClock()
        self.limits = SourceLimits(Bounds(max_readers=max_readers), clock=self.clock)
        self.grants = Grants(lease_s, self.limits, self.clock)
        self.exposures = Exposed(), Exposed()
        self.swarm = Swarm()
        self.returned = False
        self.served = ExposedModel(held, dict(zip("ab", self.exposures, strict=True)), self.swarm)

        async def is_right(served: ExposedModel, chunk: int) -> bool:
            return True

        self.doubts = Doubts(is_right)
        self.service = PeerServicer(_no_record, self.doubts, self.grants)
        self.service.models[held.source_id] = self.served
        self.first = peer_pb2.OpenRequest(
            source_id=held.source_id,
            identity=held.manifest.ref.identity,
            generation=held.generation,
            reader_id=READER,
            place=place_to_wire(nvlink_host()),
        )

    async def requests(self, *renewals: peer_pb2.OpenRequest) -> AsyncIterator[Any]:
        for each in (self.first, *renewals):
            await settle(3)
            yield each
        await settle(3)
        self.returned = True

    async def held_open(self, then: asyncio.Event) -> AsyncIterator[Any]:
        yield self.first
        await then.wait()

    def open(self, requests: AsyncIterator[Any], context: Context) -> asyncio.Task[None]:
        return asyncio.create_task(self.service.Open(requests, context))

    def assert_nothing_left(self) -> None:
        assert len(self.grants.leases) == 0
        assert self.swarm.leases == 0
        assert self.grants.counts.nbytes(self.served.held.source_id, READER) is not None
        for exposure in self.exposures:
            assert exposure.granted <= exposure.revoked
        assert self.limits.admit(OTHER) == []  # its place is free
        assert [task for task in asyncio.all_tasks() if task.get_name() == "mx-lease-events"] == []


def _no_record(served: ExposedModel) -> SourceRecord:
    raise AssertionError("no record is asked for")


async def settle(steps: int = 20) -> None:
    for _ in range(steps):
        await asyncio.sleep(0)


@pytest.fixture
def held() -> Iterator[SourceModel]:
    data = b"w" * 300
    held = hold_tensors(
        [TensorSpec("w", "U8", (300,))], [], {"w": memoryview(data)}, ModelKey("m"), shortcuts=False
    )
    yield held
    held.release()


async def test_a_reader_is_said_to_have_what_it_got_and_a_limit_holds_what_is_sent(
    held: SourceModel,
) -> None:
    source, context, over = Source(held), Context(), asyncio.Event()
    packing = Packing()
    assert isinstance(packing, Compressing)
    source.served.exposures["a"] = packing
    call = source.open(source.held_open(over), context)
    await settle()
    (grant_id,) = packing.granted
    packing.sent[grant_id], source.exposures[1].sent[grant_id] = 100, 7
    # Swarms compare it with the sizes of chunks, and metrics show it.
    assert source.grants.counts.nbytes(held.source_id, READER) == 407
    assert source.grants.given_nbytes() == {"several": 407}
    assert source.served.sent_bytes() == 107  # the rate that is shown
    over.set()
    await asyncio.gather(call, return_exceptions=True)
    assert source.grants.counts.nbytes(held.source_id, READER) == 407


@pytest.mark.parametrize("times", [1, 2])
async def test_a_call_that_is_cancelled_at_any_step_leaves_nothing(
    held: SourceModel, times: int
) -> None:
    step, granted = 0, 0
    while True:
        source, context = Source(held), Context()
        call = source.open(source.requests(*[peer_pb2.OpenRequest()] * 3), context)
        for _ in range(step):
            await asyncio.sleep(0)
        if call.done():
            break
        for _ in range(times):
            call.cancel()
            await asyncio.sleep(0)
        await asyncio.gather(call, return_exceptions=True)
        await settle()
        source.assert_nothing_left()
        # What a reader was given it may trust until its lease ends, unless it has returned it.
        lost = bool(source.exposures[0].granted) and not source.returned
        assert source.grants.has_unexpired(held.source_id) is lost
        granted += lost
        step += 1
    assert granted >= 5
    assert context.kinds == ["granted", "renewed", "renewed", "renewed"]
    source.assert_nothing_left()
    assert not source.grants.has_unexpired(held.source_id)  # it was returned


async def test_an_exposure_that_is_closed_takes_the_other_ticket_back(held: SourceModel) -> None:
    source, context = Source(held), Context()
    source.exposures[1].closed = True
    with pytest.raises(ClosedError):
        await source.open(source.requests(), context)
    assert source.exposures[0].granted
    source.assert_nothing_left()
    assert not source.grants.has_unexpired(held.source_id)


async def test_a_reader_that_does_not_take_the_answer_has_nothing(
    held: SourceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, context = Source(held), Context()
    context.reads.clear()
    call = source.open(source.held_open(asyncio.Event()), context)
    await settle()
    assert len(source.grants.leases) == 1
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    monkeypatch.setattr(requests, "FIRST_MESSAGE_S", 0.0)
    with pytest.raises(PeerProtocolError, match="not taken"):
        await requests.answer(context, peer_pb2.OpenEvent())
    source.assert_nothing_left()


async def test_a_lease_that_ends_takes_its_grant_with_it_before_its_call(
    held: SourceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grants, "_EXPIRE_S", 0.0)
    source, context, renews = Source(held), Context(), asyncio.Event()

    async def requests() -> AsyncIterator[Any]:
        yield source.first
        await renews.wait()
        yield peer_pb2.OpenRequest()
        await asyncio.Event().wait()

    call, expiry = source.open(requests(), context), asyncio.create_task(source.grants.expire())
    await settle()
    (grant_id,) = source.exposures[0].granted
    source.exposures[0].sent[grant_id] = 7
    source.clock.advance(LEASE_S + MARGIN_S)
    await settle()
    assert not call.done()
    assert source.exposures[0].revoked == source.exposures[1].revoked == {grant_id}
    assert source.swarm.leases == len(source.grants.leases) == 0
    assert source.grants.counts.nbytes(held.source_id, READER, ADDRESS) == 7
    renews.set()
    await call  # the renewal of a lease that has ended ends it
    expiry.cancel()
    assert context.kinds == ["granted"]
    assert source.grants.counts.nbytes(held.source_id, READER) == 7
    source.assert_nothing_left()


async def test_an_idle_grant_ends_for_another_reader_and_is_told(held: SourceModel) -> None:
    source = Source(held)
    contexts, returned = [Context(1), Context(2), Context(3)], asyncio.Event()
    calls = [source.open(source.held_open(returned), contexts[0])]
    await settle()
    await source.open(source.held_open(returned), contexts[1])  # too early
    assert contexts[1].kinds == ["busy"]
    source.clock.advance(YIELD_S)
    calls.append(source.open(source.held_open(returned), contexts[2]))
    await settle()
    assert contexts[0].kinds == ["granted", "busy"]
    assert contexts[2].kinds == ["granted"]
    assert len(source.exposures[0].revoked) == len(source.grants.leases) == 1
    assert source.swarm.leases == 1
    returned.set()
    await asyncio.gather(*calls)
    source.assert_nothing_left()


async def test_a_pull_that_reads_freely_is_told_once_that_reading_is_coordinated(
    held: SourceModel,
) -> None:
    source, returned = Source(held, max_readers=0), asyncio.Event()
    contexts = [Context(port) for port in range(3)]
    calls = []
    for context in contexts:
        calls.append(source.open(source.held_open(returned), context))
        await settle()
    assert [context.told[0].granted.coordinated for context in contexts] == [False, True, True]
    assert contexts[0].kinds == ["granted", "coordinated"]
    assert contexts[1].kinds == contexts[2].kinds == ["granted"]
    returned.set()
    await asyncio.gather(*calls)
    source.assert_nothing_left()


async def test_a_reader_that_reads_no_events_loses_them_and_then_its_lease(
    held: SourceModel,
) -> None:
    source, context = Source(held, lease_s=0.05), Context()

    async def requests() -> AsyncIterator[Any]:
        yield source.first
        while True:
            yield peer_pb2.OpenRequest()
            context.reads.clear()  # once it is granted

    call = source.open(requests(), context)
    await call
    assert context.kinds[0] == "granted" and len(context.kinds) < 5
    source.grants.tell(peer_pb2.OpenEvent(draining=peer_pb2.Draining()))
    source.assert_nothing_left()
