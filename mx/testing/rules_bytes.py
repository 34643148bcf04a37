"""Conformance rules about bytes: right ones, in the right places, reported in the right order."""

from __future__ import annotations

import gc
import threading

from mx.errors import SourceError, StaleGenerationError
from mx.testing.bench import GUARD, Bench, Recorder, require
from mx.testing.harness import GENERATION
from mx.transport import Piece, Read
from mx.units import MIB


def right_bytes(bench: Bench) -> None:
    """Random pieces of several regions arrive right, whatever their sizes and alignment."""
    source = bench.source(3 * MIB + 17, 70_001, 1, 2 * MIB)
    session = bench.open(source)
    reads, checks = [], []
    for number in range(40):
        pieces, expected = [], b""
        for _ in range(bench.random.choice((1, 1, 2, 9, 300 if number == 7 else 3))):
            region = bench.random.randrange(len(source.sizes))
            size = source.sizes[region]
            start = bench.random.randrange(size + 1)
            nbytes = min(size - start, bench.random.choice((0, 1, 511, 4096, 65_537, 3 * MIB)))
            if len(expected) + nbytes > 4 * MIB:
                continue
            expected += source.memories[region].expected[start : start + nbytes]
            pieces.append((region, start, nbytes))
        view, at, parts = bench.destination(len(expected)), 0, []
        for region, start, nbytes in pieces:
            parts.append(Piece(region, start, view[at : at + nbytes]))
            at += nbytes
        sink = bench.sink()
        reads.append(Read(f"chunk {number}", parts, sink))
        checks.append((sink, view, expected))
    session.read(reads)
    bench.succeed(*(sink for sink, _, _ in checks))
    for number, (_, view, expected) in enumerate(checks):
        require(bench.peek(view) == expected, f"chunk {number} arrived with wrong bytes")


def nothing_outside(bench: Bench) -> None:
    """Not one byte is written outside of a read's pieces."""
    source = bench.source(2 * MIB)
    session = bench.open(source)
    want = bytearray([GUARD]) * (3 * MIB)
    destination = bench.destination(len(want))
    bench.poke(destination, bytes(want))
    pieces, at = [], 4096
    for nbytes in (1, 63, 64, 4096, 4097, 1 << 20, 333):
        start = bench.random.randrange(source.sizes[0] - nbytes)
        want[at : at + nbytes] = source.memories[0].expected[start : start + nbytes]
        pieces.append(Piece(0, start, destination[at : at + nbytes]))
        at += nbytes + 4096 + nbytes % 7
    sink = bench.sink()
    session.read([Read("guarded", pieces, sink)])
    bench.succeed(sink)
    got = bench.peek(destination)
    if got == want:
        return
    wrong = [offset for offset in range(len(got)) if got[offset] != want[offset]]
    inside = [offset for offset in wrong if want[offset] != GUARD]
    require(not inside, "a piece has wrong bytes")
    require(not wrong, f"bytes outside of the pieces were written, at {wrong[:5]}")


def completes_once(bench: Bench) -> None:
    """Each sink gets `done` or `failed` exactly once, and nothing after it."""
    source = bench.source(2 * MIB)
    session = bench.open(source)
    views = [bench.destination(MIB) for _ in range(8)]
    sinks = [bench.read(session, 0, n * 4096, view) for n, view in enumerate(views)]
    bad = bench.read(session, 0, 2 * MIB, bench.destination(1), tag="outside")
    empty = bench.sink()
    session.read([Read("empty", [], empty)])
    bench.finish(*sinks, bad, empty)
    session.close()
    require(session.join(bench.harness.deadline_s), "join did not return")
    for sink in (*sinks, bad, empty):
        ends = sink.dones + len(sink.failures)
        require(ends == 1, f"a sink was completed {ends} times")
        require(not sink.late, "`landed` was called after the end")


def reports_progress(bench: Bench) -> None:
    """`landed` never goes back, ends at the read's size, and never runs ahead of the bytes."""
    source = bench.source(5 * MIB + 3)
    session = bench.open(source)
    view = bench.destination(source.sizes[0])
    ahead: list[int] = []

    def look(nbytes: int) -> None:
        if bench.peek(view[:nbytes]) != source.memories[0].expected[:nbytes]:
            ahead.append(nbytes)

    sink = bench.sink(on_landed=look)
    half = len(view) // 2 + 1
    pieces = [Piece(0, 0, view[:half]), Piece(0, half, view[half:])]
    session.read([Read("chunk", pieces, sink)])
    bench.succeed(sink)
    require(not ahead, f"landed({ahead[:1]}) was called before those bytes were there")
    require(sink.landings == sorted(sink.landings), f"landed went back: {sink.landings}")
    require(bool(sink.landings) and sink.landings[0] > 0, "landed was never called")
    require(sink.landings[-1] == len(view), f"the last landed was {sink.landings[-1]}")


def starts_in_order(bench: Bench) -> None:
    """With one stream, reads start in the order given, over several calls too."""
    source = bench.source(MIB)
    session = bench.open(source, streams=1)
    order: list[int] = []
    lock = threading.Lock()

    def note(number: int) -> Recorder:
        def landed(_: int) -> None:
            with lock:
                if number not in order:
                    order.append(number)

        return bench.sink(on_landed=landed)

    first = bench.held_read(session, bench.destination(MIB))
    sinks = [note(number) for number in range(24)]
    for start in (0, 8, 16):
        session.read(
            [
                Read(f"chunk {n}", [Piece(0, n, bench.destination(4096))], sinks[n])
                for n in range(start, start + 8)
            ]
        )
    first.release()
    bench.succeed(first, *sinks)
    require(order == list(range(24)), f"reads started in the order {order}")


def refuses_out_of_range(bench: Bench) -> None:
    """A read outside of the regions fails alone, also where the reader expects larger regions."""
    source = bench.source(MIB, 4096)
    top = (1 << 64) - 1
    for sizes in (source.sizes, (top, top, top)):
        session = bench.open(source, sizes=sizes)
        good = [bench.read(session, 0, 0, bench.destination(MIB))]
        for region, offset, nbytes in (
            (0, MIB, 1),
            (0, MIB - 1, 2),
            (1, 1, 4096),
            (1, top, 1),
            (0, top - 4, 4),
            (0, 1 << 63, 1 << 16),
            (2, 0, 1),
            ((1 << 32) - 1, 0, 1),
        ):
            view = bench.destination(nbytes)
            bench.poke(view, bytes([GUARD]) * nbytes)
            tag = f"{nbytes} bytes at {offset} of {region}"
            sink = bench.read(session, region, offset, view, tag=tag)
            bench.failure(sink, SourceError, tag)
            require(bench.peek(view) == bytes([GUARD]) * nbytes, f"{tag}: something was written")
            good.append(bench.read(session, 1, 96, bench.destination(4000)))
        bench.succeed(*good)


def checks_generation(bench: Bench) -> None:
    """Reads that name another generation than the source's are refused, before and during."""
    source = bench.source(bench.harness.big_nbytes)
    stale = bench.open(source, generation=GENERATION + 1)
    sink = bench.read(stale, 0, 0, bench.destination(64), tag="early")
    bench.failure(sink, StaleGenerationError, "early")

    session = bench.open(source)
    bench.succeed(bench.read(session, 0, 0, bench.destination(64)))
    running = bench.held_read(session, bench.destination(source.sizes[0]), tag="running")
    source.exposure.set_generation(GENERATION + 1)
    running.release()
    bench.failure(running, StaleGenerationError, "running")
    late = bench.read(session, 0, 0, bench.destination(64), tag="late")
    bench.failure(late, StaleGenerationError, "late")
    bench.succeed(bench.read(stale, 0, 0, bench.destination(64)))


def adopts(bench: Bench) -> None:
    """Reads into an adopted arena land at their destinations, and `join` releases the arena."""
    source = bench.source(3 * MIB)
    session = bench.open(source)
    destination = bench.destination(4 * MIB + 8192)
    want = bytearray([GUARD]) * len(destination)
    bench.poke(destination, bytes(want))
    arena = destination[4096 : 4096 + 4 * MIB]
    session.adopt(arena)
    sinks = []
    for to, start, nbytes in (
        (3 * MIB, 0, MIB - 1),
        (0, MIB, MIB),
        (MIB + 333, 17, 4097),
        (4 * MIB - 1, 5, 1),
    ):
        want[4096 + to : 4096 + to + nbytes] = source.memories[0].expected[start : start + nbytes]
        sinks.append(bench.read(session, 0, start, arena[to : to + nbytes]))
    bench.succeed(*sinks)
    require(bench.peek(destination) == want, "reads into an adopted arena landed elsewhere")
    session.close()
    require(session.join(bench.harness.deadline_s), "join did not return")
    memory = destination.obj if isinstance(destination, memoryview) else None
    if isinstance(memory, bytearray):
        del destination, arena, session
        gc.collect()
        try:
            memory.append(0)  # which is refused while there is a view of it
        except BufferError:
            require(False, "the arena is held on to after join")


def completes_empty_reads(bench: Bench) -> None:
    """A read without pieces, or whose pieces are empty, is done: with its turn, not before."""
    source = bench.source(MIB)
    session = bench.open(source)
    destination, sinks = bench.destination(64), [bench.sink() for _ in range(3)]
    nothing = [Piece(0, 7, destination[:0]), Piece(0, MIB, destination[64:])]
    session.read(
        [
            Read("without pieces", [], sinks[0]),
            Read("of empty pieces", nothing, sinks[1]),
            Read("chunk", [Piece(0, 0, destination)], sinks[2]),
        ]
    )
    bench.succeed(*sinks)
    require(not any(sinks[0].landings + sinks[1].landings), "bytes landed of an empty read")


def several_sessions(bench: Bench) -> None:
    """Sessions that run at the same time do not change the bytes of other sessions."""
    source = bench.source(4 * MIB)
    views = [bench.destination(3 * MIB) for _ in range(3)]
    sessions = [bench.open(source, streams=1) for _ in views]
    held = bench.held_read(sessions[0], views[0])
    others = [bench.read(sessions[n], 0, n * 1000, views[n]) for n in (1, 2)]
    bench.succeed(*others)
    held.release()
    bench.succeed(held)
    for n, view in enumerate(views):
        expected = source.memories[0].expected[n * 1000 : n * 1000 + len(view)]
        require(bench.peek(view) == expected, f"session {n} got wrong bytes")


def two_exposures(bench: Bench) -> None:
    """Two exposures of one process are two: own bytes, own tickets, own end."""
    one, other = bench.source(MIB), bench.source(MIB)
    sessions = [bench.open(source) for source in (one, other)]
    for source, session in zip((one, other), sessions, strict=True):
        view = bench.destination(MIB)
        bench.succeed(bench.read(session, 0, 0, view))
        got = bench.peek(view)
        require(got == source.memories[0].expected, "bytes came from the other exposure")
    one.exposure.close()
    require(one.exposure.join(bench.harness.deadline_s), "the exposure's join did not return")
    bench.succeed(bench.read(sessions[1], 0, 0, bench.destination(MIB)))
