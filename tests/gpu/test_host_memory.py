"""Host memory that a GPU reaches in place: which windows are registered, when they are given back,
and what happens where they can't be."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mx.buffers import address_of
from mx.cuda import driver as cuda
from mx.cuda.device import Device, PinnedRegion
from mx.errors import PeerLostError
from mx.testing.bench import GUARD, Bench
from mx.testing.memory import Kind, pattern
from mx.transport import Session
from mx.units import MIB
from mx_transports.pcie_p2p import PciePeerTransport
from mx_transports.toolkit.cuda import hosts, windows
from mx_transports.toolkit.cuda.hosts import HostOptions, source_maps
from tests.gpu.rig import Spy
from tests.support import gpu_rig
from tests.support.outcomes import until

#: Of gpu_rig: of four steps each.
WINDOW = 4 * gpu_rig.STEP_BYTES


@contextmanager
def rig(kind: Kind, there: str, here: str) -> Iterator[Bench]:
    with Bench(gpu_rig.harness("pcie_p2p", kind, cuda.load(), there, here)) as bench:
        yield bench


def close(session: Session) -> None:
    session.close()
    assert session.join(10)


def test_a_sealed_file_is_registered_as_it_is_read(spy: Spy) -> None:
    with rig(Kind.SEALED, "cpu", "0") as bench:
        source = bench.source(10 * WINDOW + 5)
        session = bench.open(source)
        destination = bench.destination(MIB)
        assert not spy.calls["cuMemHostRegister"]
        bench.succeed(bench.read(session, 0, 7, destination))
        assert bench.peek(destination) == source.memories[0].expected[7 : 7 + MIB]
        # The one that was read, and those after it, which nothing waits for.
        until(lambda: spy.calls["cuMemHostRegister"] >= 1 + windows.AHEAD, "windows ahead")
        assert spy.calls["cuMemHostRegister"] == 1 + windows.AHEAD
        across = bench.destination(3 * MIB)
        begin = 2 * WINDOW - MIB - 3
        bench.succeed(bench.read(session, 0, begin, across))
        assert bench.peek(across) == source.memories[0].expected[begin : begin + 3 * MIB]
        end = bench.destination(5)
        bench.succeed(bench.read(session, 0, 10 * WINDOW, end))
        assert bench.peek(end) == source.memories[0].expected[-5:]
        close(session)
        assert not spy.calls["cuMemHostAlloc"]
        assert spy.calls["cuMemHostUnregister"] == spy.calls["cuMemHostRegister"]


def test_sessions_share_a_sources_map(spy: Spy) -> None:
    with rig(Kind.SEALED, "cpu", "0") as bench:
        source = bench.source(WINDOW)
        first, second = bench.open(source), bench.open(source)
        for session in (first, second):
            destination = bench.destination(WINDOW)
            bench.succeed(bench.read(session, 0, 0, destination))
            assert bench.peek(destination) == source.memories[0].expected
        close(first)
        assert not spy.calls["cuMemHostUnregister"]
        close(second)
        assert spy.calls["cuMemHostUnregister"] == spy.calls["cuMemHostRegister"] == 1


def test_a_map_is_kept_within_bounds(spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "KEPT_BYTES", 3 * WINDOW)
    with rig(Kind.SEALED, "cpu", "0") as bench:
        options = HostOptions(MIB, WINDOW, kept_s=60.0)
        bench.transport = PciePeerTransport(MIB, MIB, options)
        small, large = bench.source(WINDOW), bench.source(3 * WINDOW)
        for source, registered in ((small, 1), (small, 1), (large, 4), (large, 7), (small, 7)):
            session = bench.open(source)
            destination = bench.destination(source.sizes[0])
            bench.succeed(bench.read(session, 0, 0, destination))
            close(session)
            assert spy.calls["cuMemHostRegister"] == registered
    source_maps.clear()
    assert spy.calls["cuMemHostUnregister"] == 7


@pytest.mark.parametrize("code", ["CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_OUT_OF_MEMORY"])
@pytest.mark.parametrize("after", [0, 2])
def test_a_refusal_leaves_the_slots(
    spy: Spy, caplog: pytest.LogCaptureFixture, code: str, after: int
) -> None:
    spy.fail("cuMemHostRegister", code, after=after)
    with rig(Kind.SEALED, "cpu", "0") as bench, caplog.at_level(logging.WARNING):
        source = bench.source(8 * WINDOW)
        session = bench.open(source)
        reads = []
        for at in range(0, 8 * WINDOW, MIB):
            destination = bench.destination(MIB)
            reads.append((at, destination, bench.read(session, 0, at, destination)))
        bench.succeed(*(sink for _, _, sink in reads))
        for at, destination, _ in reads:
            assert bench.peek(destination) == source.memories[0].expected[at : at + MIB]
        assert spy.calls["cuMemHostAlloc"]
        close(session)
    (said,) = [line for line in caplog.messages if "through slots" in line]
    assert code in said and ("ulimit -l" in said) is ("OUT_OF_MEMORY" in code)


def test_a_destination_is_given_back_by_join(spy: Spy) -> None:
    with rig(Kind.GPU, "0", "cpu") as bench:
        source = bench.source(WINDOW)
        arena = memoryview(bytearray(2 * WINDOW))
        sessions = [bench.open(source), bench.open(source)]
        for session in sessions:
            session.adopt(arena[100:-100])
        for number, session in enumerate(sessions):
            begin = 100 + number * WINDOW // 2
            bench.succeed(bench.read(session, 0, 0, arena[begin : begin + WINDOW]))
            assert arena[begin : begin + WINDOW] == source.memories[0].expected
        close(sessions[0])
        close(sessions[1])
        # Of both sessions together; the last ones may be registered after the reads have ended.
        assert spy.calls["cuMemHostRegister"] == spy.calls["cuMemHostUnregister"] == 3
        assert not spy.calls["cuMemHostAlloc"]


def test_tensors_in_many_places_are_written_in_place(spy: Spy) -> None:
    with rig(Kind.GPU, "0", "cpu") as bench:
        sizes = [1, 4097, 7, MIB + 3, 64, 2 * MIB, 300]
        source = bench.source(sum(sizes))
        into, around = bench.scattered_destination(sizes)
        session = bench.open(source)
        session.adopt_places(into)  # type: ignore[attr-defined]
        bench.succeed(bench.read(session, 0, 0, into))
        assert b"".join(bench.peek(span) for span in into.spans()) == source.memories[0].expected
        close(session)
        assert not spy.calls["cuMemHostAlloc"] and spy.calls["cuMemHostRegister"]
        assert bench.peek(around)[:64] == bench.peek(around)[-64:] == bytes([GUARD]) * 64


def test_memory_that_somebody_else_has_registered(gpu: Device, spy: Spy) -> None:
    with rig(Kind.GPU, "0", "cpu") as bench:
        source = bench.source(2 * WINDOW)
        memory = ctypes.create_string_buffer(2 * WINDOW + 4096)
        arena = memoryview(memory).cast("B")[: 2 * WINDOW]
        page = -address_of(arena) % 4096
        session = bench.open(source)
        session.adopt(arena)
        with PinnedRegion(gpu, address_of(arena) + page, MIB):
            bench.succeed(bench.read(session, 0, 0, arena))
            assert arena == source.memories[0].expected
            close(session)
        assert spy.calls["cuMemHostAlloc"]


def test_a_source_dies_while_its_memory_is_registered(spy: Spy) -> None:
    with rig(Kind.SEALED, "cpu", "0") as bench:
        remote, session = bench.remote(2 * WINDOW)
        destination = bench.destination(2 * WINDOW)
        held = bench.held_read(session, destination)
        remote.kill()
        held.release()
        bench.failure(held, PeerLostError, "held")
        assert spy.calls["cuMemHostRegister"]
        # What had landed is right: the pages stay for those who have them mapped.
        expected = pattern(2 * WINDOW, bench.last_seed)
        assert bench.peek(destination[: gpu_rig.STEP_BYTES]) == expected[: gpu_rig.STEP_BYTES]
        close(session)
        assert spy.calls["cuMemHostUnregister"] == spy.calls["cuMemHostRegister"]
