"""Staging into a GPU keeps every rule of the transport beneath it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from mx.cuda.bindings import Driver
from mx.cuda.device import device_key
from mx.cuda.staged import GrowingStagedSession
from mx.testing.bench import Bench, BenchSource
from mx.testing.conformance import Harness, TransportSuite
from mx.testing.harness import HERE
from mx.transport import Session
from mx.units import MIB
from tests.gpu.rig import Spy


def _reads(bench: Bench, source: BenchSource, session: Session) -> None:
    """Read a whole region, in more parts than there are slots, and compare."""
    view = bench.destination(source.sizes[0])
    bench.succeed(bench.read(session, 0, 0, view))
    assert bench.peek(view) == source.memories[0].expected


class TestStaged(TransportSuite):
    #: What a held sink holds up is its slots: the source has long sent what is in them.
    test_counts_readers = None
    #: For the same reason its connections end while the sink is held. The exposure is tcp's own,
    #: whose suite has this rule.
    test_exposure_joins_truly = None
    #: And a sink that is held up holds up all others, which this session's one thread calls.
    test_grows = None

    @pytest.fixture
    def harness(self, driver: Driver) -> Harness:
        here = dataclasses.replace(HERE, device=device_key(driver.device_uuid(0)))
        return Harness("tests.gpu.staged_rig:StagedTcp", here=here)

    @pytest.fixture
    def bench(self, harness: Harness) -> Iterator[Bench]:
        with Bench(harness) as found:
            yield found

    def test_slots_grow_with_the_connections(self, bench: Bench) -> None:
        source = bench.source(4 * MIB)
        session = bench.open(source, streams=1)
        assert isinstance(session, GrowingStagedSession)
        _reads(bench, source, session)
        assert session._ring.slots == 4
        session.grow(6)
        _reads(bench, source, session)
        bench.eventually(lambda: session.open_streams == 6, lambda: "six were asked for")
        _reads(bench, source, session)
        assert session._ring.slots == session.depth == 12

    def test_slots_stay_where_no_more_can_be_pinned(self, bench: Bench, spy: Spy) -> None:
        source = bench.source(4 * MIB)
        session = bench.open(source, streams=1)
        assert isinstance(session, GrowingStagedSession)
        spy.fail("cuMemHostAlloc", "CUDA_ERROR_OUT_OF_MEMORY")
        session.grow(6)
        for _ in range(3):
            _reads(bench, source, session)
        assert session._ring.slots == 4
