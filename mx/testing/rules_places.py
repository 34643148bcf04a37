"""Conformance rules about bytes that lie in several places, at the source or at the reader.

A transport may refuse to expose scattered memory, with a LocalError that says why. Every transport
fills scattered destinations.
"""

from __future__ import annotations

from mx.errors import SourceError
from mx.testing.bench import GUARD, Bench, require
from mx.testing.memory import cut
from mx.transport import Piece, Read
from mx.units import KIB, MIB

#: As many as a large chunk has that consists of small tensors, and more than system calls take.
MANY_PLACES = 10_000


def gathers(bench: Bench) -> None:
    """Bytes of scattered memory arrive right, from few places or many; or it is refused."""
    source = bench.scattered(3 * MIB + 17)
    if isinstance(source, str):
        require(len(source) > 10, "scattered memory is refused without a reason")
        return
    expected = source.memories[0].expected
    session = bench.open(source)
    ranges = [(0, len(expected))]
    for nbytes in (1, 63, 4096, 65_537, 300 * KIB, MIB + 3):
        start = bench.random.randrange(len(expected) - nbytes)
        ranges.append((start, nbytes))
    for start, nbytes in ranges:
        view = bench.destination(nbytes)
        bench.succeed(bench.read(session, 0, start, view))
        right = bench.peek(view) == expected[start : start + nbytes]
        require(right, f"{nbytes} bytes at {start} of scattered memory are wrong")
    require(source.memories[0].unchanged(), "the source's memory was written to")
    small = bench.scattered(7 * MANY_PLACES, [(7 * n, 7) for n in range(MANY_PLACES)])
    if isinstance(small, str):
        require(False, f"many small places are refused where others are not: {small}")
        return
    session = bench.open(small)
    for start, nbytes in ((0, 7 * MANY_PLACES), (5, 6 * MANY_PLACES)):
        view = bench.destination(nbytes)
        bench.succeed(bench.read(session, 0, start, view))
        right = bench.peek(view) == small.memories[0].expected[start : start + nbytes]
        require(right, "the bytes of many small places are wrong")


def refuses_holes(bench: Bench) -> None:
    """A read that reaches where scattered memory has none fails alone."""
    # Holes before, between and after the places.
    source = bench.scattered(8192, [(100, 900), (1000, 24), (2048, 2048)])
    if isinstance(source, str):
        return
    session = bench.open(source)
    expected = source.memories[0].expected
    for start, nbytes in (
        (0, 8192),
        (0, 1),
        (99, 2),
        (100, 925),
        (1024, 1024),
        (1500, 1),
        (2047, 1),
        (4095, 2),
        (8191, 1),
    ):
        tag = f"{nbytes} bytes at {start}"
        sink = bench.read(session, 0, start, bench.destination(nbytes), tag=tag)
        bench.failure(sink, SourceError, tag)
    for start, nbytes in ((100, 924), (2048, 2048), (1023, 1)):
        view = bench.destination(nbytes)
        bench.succeed(bench.read(session, 0, start, view))
        right = bench.peek(view) == expected[start : start + nbytes]
        require(right, "bytes between holes are wrong")


def scatters(bench: Bench) -> None:
    """Bytes arrive right in a destination of few places or many, and not one beside them."""
    nbytes = 3 * MIB + 17
    source = bench.source(nbytes)
    session = bench.open(source)
    for sizes in (
        [size for _, size in cut(nbytes, seed=1)],
        [7] * MANY_PLACES,
        [2 * MIB, 1, MIB],
    ):
        view, memory = bench.scattered_destination(sizes)
        start = bench.random.randrange(nbytes - len(view) + 1)
        guards = len(memory) - len(view)
        half = len(view) // 2 + 1
        pieces = [Piece(0, start, view[:half]), Piece(0, start + half, view[half:])]
        sink = bench.sink()
        session.read([Read("chunk", pieces, sink)])
        bench.succeed(sink)
        data = source.memories[0].expected[start : start + len(view)]
        at = 0
        for span in view.spans():
            right = bench.peek(span) == data[at : at + len(span)]
            require(right, f"bytes at {at} of a scattered destination are wrong")
            at += len(span)
        left = bench.peek(memory).count(GUARD) - data.count(GUARD)
        require(left == guards, "bytes beside a scattered destination were written")
