"""Reads over shm end where their pieces say, whatever the places of both sides are."""

from __future__ import annotations

import os
import sys
from array import array
from contextlib import closing
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.buffers import address_of
from mx.errors import LocalError, PeerRefusedError
from mx.transport import Piece, Read, ScatteredView, View, slices
from mx.views import Window
from mx_transports.shm.exposure import PLACE
from mx_transports.shm.session import ShmSession, _ProcessRegion
from mx_transports.toolkit import kernel

NBYTES = st.one_of(st.integers(1, 9), st.sampled_from((4095, 4096, 4097, 20_000, 70_000)))
FILL = b"\xee"


def scattered(data: st.DataObject, lengths: list[int], *, windowed: bool) -> tuple[View, bytearray]:
    """Return a view over places of these lengths, in any order in new memory, a byte apart."""
    memory = bytearray(FILL * (sum(lengths) + len(lengths) + 1))
    starts, at = [0] * len(lengths), 1
    for index in data.draw(st.permutations(range(len(lengths)))):
        starts[index] = at
        at += lengths[index] + 1
    begins = list(accumulate(lengths, initial=0))
    base = memoryview(memory)
    window = Window(base, address_of(base), starts, lengths)
    spans = window if windowed else list(window)
    return ScatteredView.over(begins[:-1], spans, begins[-1]), memory


class NoSink:
    def landed(self, nbytes: int) -> None: ...
    def done(self) -> None: ...
    def failed(self, error: Exception) -> None: ...


def move(region: _ProcessRegion, read: Read, step_nbytes: int) -> None:
    """Carry out a read of this process's memory, or of a memfd."""
    source = SimpleNamespace(regions={0: region}, ticket=SimpleNamespace(pid=os.getpid()))
    session = cast(ShmSession, SimpleNamespace(_source=source, peer="a peer"))
    for pieces, _ in slices(read, step_nbytes):
        ShmSession._move(session, pieces)


def region_of(
    data: st.DataObject, payload: bytes, descriptor: int
) -> tuple[_ProcessRegion, list[object]]:
    """Return a region with these bytes, and what keeps its memory."""
    kind = data.draw(st.sampled_from(("memfd", "one place", "scattered")))
    nbytes = len(payload)
    if kind == "memfd":
        os.pwrite(descriptor, payload, 0)
        return _ProcessRegion(nbytes, 0, descriptor), []
    if kind == "one place":
        memory = memoryview(bytearray(payload))
        return _ProcessRegion(nbytes, address_of(memory), None), [memory]
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, nbytes - 1)), max_size=8)) | {nbytes})
    lengths = [end - begin for begin, end in zip([0, *cuts], cuts, strict=False)]
    view, memory_ = scattered(data, lengths, windowed=True)
    assert isinstance(view, ScatteredView)
    at = 0
    for span in view.spans():
        assert isinstance(span, memoryview)
        span[:] = payload[at : at + len(span)]
        at += len(span)
    places = view.places()
    assert places is not None
    return _ProcessRegion(nbytes, 0, None, *(array(PLACE, each) for each in places)), [memory_]


@given(st.data(), st.one_of(st.integers(1, 12), st.just(2 << 20)))
def test_every_byte_ends_in_its_place_and_nothing_else_is_written(
    data: st.DataObject, step_nbytes: int
) -> None:
    small = step_nbytes < 2 << 20
    lengths = st.lists(st.integers(1, 9) if small else NBYTES, min_size=1, max_size=6)
    pieces: list[Piece] = []
    memories: list[bytearray] = []
    at = 0
    for _ in range(data.draw(st.integers(0, 4))):
        at += data.draw(st.sampled_from((0, 0, 1, 224, 255, 256, 300)))
        view: View
        if data.draw(st.booleans()):
            view, memory = scattered(data, data.draw(lengths), windowed=data.draw(st.booleans()))
        else:
            memory = bytearray(FILL * data.draw(st.integers(0, 9)))
            view = memoryview(memory)
        pieces.append(Piece(0, at, view))
        memories.append(memory)
        at += len(view)
    payload = bytes(byte % 0xEE for byte in os.urandom(at + 1))
    read = Read("r", data.draw(st.permutations(pieces)), NoSink())
    descriptor = os.memfd_create("test")
    try:
        region, kept = region_of(data, payload, descriptor)
        move(region, read, step_nbytes)
        del kept
    finally:
        os.close(descriptor)
    for piece, memory in zip(pieces, memories, strict=True):
        parts = piece.view.spans() if isinstance(piece.view, ScatteredView) else [piece.view]
        got = b"".join(map(bytes, cast("list[Any]", parts)))
        assert got == payload[piece.region_offset : piece.region_offset + len(piece.view)]
        assert len(memory) - memory.count(FILL) == len(piece.view)


@given(
    st.lists(st.tuples(st.sampled_from((0, 0, 1, 3)), st.integers(1, 9)), min_size=1, max_size=9),
    st.data(),
)
def test_a_region_has_the_bytes_of_its_places_and_no_others(
    cut: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Against a table of the address of each byte; offsets in gaps have none."""
    columns = begins, addresses, lengths = array(PLACE), array(PLACE), array(PLACE)
    there: dict[int, int] = {}
    at = 0
    for number, (gap, nbytes) in enumerate(cut):
        at += gap
        for column, value in zip(columns, (at, 1000 * number + 7, nbytes), strict=True):
            column.append(value)
        there.update((at + i, 1000 * number + 7 + i) for i in range(nbytes))
        at += nbytes
    region = _ProcessRegion(at, 0, None, begins, addresses, lengths)
    offset = data.draw(st.integers(0, at + 2))
    nbytes = data.draw(st.integers(1, at + 3))
    found = array(kernel.PLACE, (5, 6))
    wanted = [there.get(i) for i in range(offset, offset + nbytes)]
    if None in wanted:
        with pytest.raises(ValueError, match="no memory"):
            region.places(offset, nbytes, found)
        assert list(found) == [5, 6]
        return
    region.places(offset, nbytes, found)
    places = zip(found[2::2], found[3::2], strict=True)
    assert [begin + i for begin, length in places for i in range(length)] == wanted
    assert list(begins) == list(region.begins) and list(lengths) == [n for _, n in cut]


def test_a_destination_with_a_hole_is_refused_before_it_is_written_to() -> None:
    memory = memoryview(bytearray(8))
    window = Window(memory, address_of(memory), [0, 4], [3, 4])
    hole = Read("r", [Piece(0, 0, ScatteredView.over([0, 4], window, 8))], NoSink())
    source = memoryview(bytearray(b"x" * 8))
    with closing(os.fdopen(os.memfd_create("test"), "wb", buffering=0)) as file:
        file.write(source)
        for region in (
            _ProcessRegion(8, 0, file.fileno()),
            _ProcessRegion(8, address_of(source), None),
        ):
            with pytest.raises(LocalError, match="in no memory"):
                move(region, hole, 8)
    assert memory == bytes(8)


def test_a_read_beyond_a_source_s_places_is_refused() -> None:
    columns = (array(PLACE, (value,)) for value in (0, 4096, 4))
    read = Read("r", [Piece(0, 2, memoryview(bytearray(4)))], NoSink())
    with pytest.raises(PeerRefusedError, match="has no memory"):
        move(_ProcessRegion(8, 0, None, *columns), read, 8)


def test_a_read_takes_as_many_calls_whatever_the_number_of_its_places() -> None:
    def calls_of(count: int, *, file: bool) -> int:
        memory, target = memoryview(bytearray(3 * count)), memoryview(bytearray(3 * count))
        starts, lengths = list(range(0, 3 * count, 3)), [2] * count
        begins = list(range(0, 2 * count, 2))
        there = [begins, [address_of(memory) + start for start in starts], lengths]
        columns = () if file else (array(PLACE, each) for each in there)
        view = ScatteredView.over(
            begins, Window(target, address_of(target), starts, lengths), 2 * count
        )
        with closing(os.fdopen(os.memfd_create("test"), "wb", buffering=0)) as written:
            written.write(bytes(2 * count))
            region = _ProcessRegion(2 * count, 0, written.fileno() if file else None, *columns)
            events: list[str] = []
            sys.setprofile(lambda frame, event, _: events.append(event))
            try:
                move(region, Read("r", [Piece(0, 0, view)], NoSink()), 2 * count)
            finally:
                sys.setprofile(None)
        return events.count("call") + events.count("c_call")

    for file in (True, False):
        assert calls_of(900, file=file) == calls_of(20, file=file)
