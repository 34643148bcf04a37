"""Reads that hold themselves to a share: a session like any other, only no faster."""

from __future__ import annotations

import math
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.core.limits import BURST_S, LEAST_BYTES_PER_S
from mx.errors import ClosedError, MxError, PeerProtocolError
from mx.testing import conformance
from mx.testing.fake import FakeHarness, FakeTransport
from mx.transport import Grant, Piece, Read, Session, slices
from mx.units import KIB, MIB
from mx.wire.pacing import PacedSession, Pacer
from tests.support.clock import ManualClock


class PacedTransport(FakeTransport):
    """The fake, with each session paced, so fast that nothing takes long."""

    def open(self, grant: Grant) -> Session:
        return PacedSession(super().open(grant), Pacer(2e9, grant.peer), grant.peer)


@pytest.mark.parametrize("rule", conformance.RULES)
def test_a_paced_session_keeps_every_rule(rule: str) -> None:
    conformance.check(rule, FakeHarness(PacedTransport))


class Sink:
    def __init__(self) -> None:
        self.landings: list[int] = []
        self.ended = threading.Event()
        self.error: MxError | None = None

    def landed(self, nbytes: int) -> None:
        self.landings.append(nbytes)

    def done(self) -> None:
        self.ended.set()

    def failed(self, error: MxError) -> None:
        self.error = error
        self.ended.set()


def read_of(sizes: list[int], sink: Sink) -> Read:
    pieces = [
        Piece(0, 10 * MIB * index, memoryview(bytearray(size))) for index, size in enumerate(sizes)
    ]
    return Read("chunk 0", pieces, sink)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=8), st.integers(1, 400))
def test_slices_are_the_read_in_order(sizes: list[int], nbytes: int) -> None:
    read = read_of(sizes, Sink())
    parts = list(slices(read, nbytes))
    assert [size for _, size in parts[:-1]] == [nbytes] * (len(parts) - 1)
    assert 0 < parts[-1][1] <= nbytes
    for pieces, size in parts:
        assert sum(len(piece.view) for piece in pieces) == size
    offsets = [
        piece.region_offset + at for pieces, _ in parts for piece in pieces
        for at in range(len(piece.view))
    ]  # fmt: skip
    assert offsets == [10 * MIB * i + at for i, size in enumerate(sizes) for at in range(size)]


def test_a_pacer_lets_through_what_its_rate_says() -> None:
    clock = ManualClock()
    pacer = Pacer(10e6, "peer", clock)
    sent = 0
    while clock() < 10:
        clock.advance(pacer.delay_s(pacer.slice_nbytes))
        sent += pacer.slice_nbytes
    assert sent == pytest.approx(10e6 * (10 + BURST_S), rel=0.02)
    pacer.set_rate(20e6)
    start_s, sent = clock(), 0
    while clock() < start_s + 10:
        clock.advance(pacer.delay_s(pacer.slice_nbytes))
        sent += pacer.slice_nbytes
    assert sent == pytest.approx(200e6, rel=0.02)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_a_share_that_is_none_is_the_peers_fault(rate: float) -> None:
    with pytest.raises(PeerProtocolError) as caught:
        Pacer(rate, "10.0.0.1:7")
    assert caught.value.peer == "10.0.0.1:7"
    with pytest.raises(PeerProtocolError):
        Pacer(1e6, "10.0.0.1:7").set_rate(rate)


def test_a_tiny_share_blocks_no_reader_for_ever() -> None:
    pacer = Pacer(1e-9, "peer", ManualClock())
    assert pacer.delay_s(LEAST_BYTES_PER_S) <= 1.0


class Inner:
    """A session that completes each read at once, and reports it."""

    depth = 4

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.error: MxError | None = None

    def adopt(self, arena: object) -> None: ...

    def attach(self, region: int) -> memoryview:
        return memoryview(b"")

    def read(self, reads: list[Read]) -> None:
        for read in reads:
            self.sizes.append(read.nbytes)
            if self.error is not None:
                read.sink.failed(self.error)
                return
            read.sink.landed(read.nbytes)
            read.sink.done()

    def close(self) -> None: ...

    def join(self, timeout_s: float | None = None) -> bool:
        return True


def test_a_read_is_issued_in_slices_and_reported_as_one() -> None:
    inner, sink = Inner(), Sink()
    session = PacedSession(inner, Pacer(1e9, "peer"), "peer")  # type: ignore[arg-type]
    session.read([read_of([5 * MIB, 300 * KIB], sink)])
    assert sink.ended.wait(10)
    session.close()
    assert session.join(10)
    assert len(inner.sizes) > 1 and sum(inner.sizes) == 5 * MIB + 300 * KIB
    assert sink.error is None
    assert sink.landings == [sum(inner.sizes[: n + 1]) for n in range(len(inner.sizes))]


def test_a_slice_that_fails_fails_its_read_and_no_other() -> None:
    inner, sinks = Inner(), [Sink(), Sink()]
    inner.error = PeerProtocolError("chunk 0: nonsense", peer="peer")
    session = PacedSession(inner, Pacer(1e9, "peer"), "peer")  # type: ignore[arg-type]
    session.read([read_of([MIB], sinks[0])])
    assert sinks[0].ended.wait(10) and sinks[0].error is inner.error
    inner.error = None
    session.read([read_of([MIB], sinks[1])])
    assert sinks[1].ended.wait(10) and sinks[1].error is None
    session.close()
    assert session.join(10)


def test_a_session_that_is_closed_while_it_waits_fails_what_is_left() -> None:
    inner, sinks = Inner(), [Sink(), Sink()]
    session = PacedSession(inner, Pacer(1.0, "peer"), "peer")  # type: ignore[arg-type]
    session.read([read_of([64 * MIB], sink) for sink in sinks])  # a quarter of an hour
    session.close()
    assert session.join(10)
    assert all(isinstance(sink.error, ClosedError) for sink in sinks)
    with pytest.raises(ClosedError):
        session.read([read_of([MIB], Sink())])
