"""tcp under a limiter: it calls the limiter for every byte before it sends, and never delays a
reader longer than needed."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from mx.errors import SourceError
from mx.source.limits import SendLimiter
from mx.testing import conformance
from mx.testing.bench import Bench
from mx.testing.harness import GENERATION, Harness
from mx.transport import (
    ExposedRegion,
    ExposeOptions,
    Exposure,
    Limiter,
    Sending,
    Transport,
    Witness,
)
from mx.units import MIB
from mx_transports.tcp import TcpTransport, wire
from mx_transports.toolkit import framing
from mx_transports.toolkit.pieces import PIECE

RULES = (
    "right_bytes",
    "reports_progress",
    "several_sessions",
    "two_exposures",
    "clogged_reader",
    "revoked",
    "close_cancels",
    "checks_generation",
    "counts_readers",
    "leaves_nothing",
)


class LimitedTcp(TcpTransport):
    def __init__(self, limiter: Limiter) -> None:
        self.limiter = limiter

    def expose(self, regions: Sequence[ExposedRegion], options: ExposeOptions) -> Exposure:
        return super().expose(regions, replace(options, limiter=self.limiter))


class LimitedHarness(Harness):
    """Sources on the bench are limited; those in processes of their own are not."""

    def __init__(self, limiter: Limiter) -> None:
        super().__init__("mx_transports.tcp:TcpTransport", stall_timeout_s=10.0)
        self.limiter = limiter

    def transport(self) -> Transport:
        return LimitedTcp(self.limiter)


class Counting:
    """Lets everything through, or nothing for `delay`; counts what was requested."""

    SLICE = MIB // 2

    def __init__(self, delay: float = 0.0) -> None:
        self.delay = delay
        self.lock = threading.Lock()
        self.slices: list[int] = []
        self.called = threading.Event()

    def slice_nbytes(self, grant_id: str) -> int:
        return self.SLICE

    def delay_s(self, nbytes: int) -> float:
        with self.lock:
            self.slices.append(nbytes)
        self.called.set()
        return self.delay


@pytest.mark.parametrize("rule", RULES)
def test_limited_it_keeps_the_rules(rule: str) -> None:
    conformance.check(rule, LimitedHarness(SendLimiter(2e9)))


@pytest.mark.parametrize("streams", [1, 2])
def test_every_byte_is_requested_once_in_slices_that_streams_share(streams: int) -> None:
    limiter = Counting()
    with Bench(LimitedHarness(limiter)) as bench:
        source = bench.source(9 * MIB + 77)
        session = bench.open(source, streams=streams)
        views = [memoryview(bytearray(3 * MIB)) for _ in range(3)]
        bench.succeed(*(bench.read(session, 0, n * 3 * MIB, view) for n, view in enumerate(views)))
        assert sum(limiter.slices) == 9 * MIB
        assert max(limiter.slices) == limiter.SLICE // streams
        assert isinstance(source.exposure, Sending)
        assert source.exposure.sent_bytes() == 9 * MIB
        assert b"".join(views) == source.memories[0].expected[: 9 * MIB]


def test_what_is_sent_is_counted_without_a_limiter_too() -> None:
    with Bench(Harness("mx_transports.tcp:TcpTransport")) as bench:
        source = bench.source(2 * MIB)
        session = bench.open(source)
        bench.succeed(bench.read(session, 0, 5, memoryview(bytearray(MIB))))
        assert isinstance(source.exposure, Sending) and isinstance(source.exposure, Witness)
        assert source.exposure.sent_bytes() == MIB
        assert list(source.exposure.used().values()) == [MIB]


@pytest.mark.parametrize("limited", [False, True])
def test_what_is_sent_on_each_grant_is_counted(limited: bool) -> None:
    made = LimitedHarness(Counting()) if limited else Harness("mx_transports.tcp:TcpTransport")
    with Bench(made) as bench:
        source = bench.source(3 * MIB)
        assert isinstance(source.exposure, Sending)
        grants = []
        for nbytes in (MIB, 2 * MIB):
            grant_id, ticket = source.grant()
            session = bench.open_ticket(grant_id, ticket, source.sizes, tls=None)
            bench.succeed(bench.read(session, 0, 0, memoryview(bytearray(nbytes))))
            grants.append(grant_id)
        assert [source.exposure.sent_to(each) for each in grants] == [MIB, 2 * MIB]
        source.exposure.revoke(grants[0])
        assert [source.exposure.sent_to(each) for each in grants] == [0, 2 * MIB]
        assert source.exposure.sent_bytes() == 3 * MIB


def test_a_read_that_is_not_taken_in_is_counted_while_it_is_sent() -> None:
    """So that a source can distinguish a slow reader from one that has stopped."""
    with Bench(Harness("mx_transports.tcp:TcpTransport")) as bench:
        source = bench.source(64 * MIB)
        exposure = source.exposure
        assert isinstance(exposure, Sending)
        grant_id, ticket = source.grant()
        described = json.loads(ticket)
        key, secret = bytes.fromhex(described["key"]), bytes.fromhex(described["secret"])
        with socket.create_connection(tuple(described["addresses"][0])) as reader:
            reader.sendall(framing.PREAMBLE.pack(wire.MAGIC, key, secret))
            reader.recv(framing.HELLO.size, socket.MSG_WAITALL)
            piece = PIECE.pack(0, 0, 64 * MIB)
            reader.sendall(wire.REQUEST.pack(1, GENERATION, 1) + piece)
            bench.eventually(lambda: exposure.sent_to(grant_id) > 0, lambda: "nothing is counted")
            assert exposure.sent_to(grant_id) < 64 * MIB


def test_a_grant_that_is_withdrawn_ends_a_long_pause() -> None:
    limiter = Counting(delay=1e6)
    with Bench(LimitedHarness(limiter)) as bench:
        source = bench.source(MIB)
        grant_id, ticket = source.grant()
        session = bench.open_ticket(grant_id, ticket, source.sizes, tls=None)
        sink = bench.read(session, 0, 0, memoryview(bytearray(MIB)))
        bench.wait(limiter.called, "the limiter was not called")
        source.exposure.revoke(grant_id)
        bench.failure(sink, SourceError, "chunk 0")
        bench.eventually(lambda: not source.exposure.active_readers(), lambda: "it still sends")
