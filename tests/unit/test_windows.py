"""Scattered views over one window of memory are as views of each span by itself."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.buffers import address_of
from mx.errors import PeerProtocolError
from mx.views import DeviceView, ScatteredView, Window, cut, device_of
from mx_transports.toolkit import kernel


@st.composite
def scattered(draw: st.DrawFn) -> tuple[ScatteredView, ScatteredView, memoryview, int]:
    """Draw two views of the same spans: each by itself, and in one window; with their memory."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    gaps = draw(st.lists(st.integers(0, 9), min_size=len(lengths), max_size=len(lengths)))
    order = draw(st.permutations(range(len(lengths))))
    memory = memoryview(bytearray(os.urandom(sum(lengths) + 5 * len(lengths))))
    starts, at = [0] * len(lengths), 0
    for index in order:
        starts[index] = at
        at += lengths[index] + 5
    begins, at = [], 0
    for length, gap in zip(lengths, gaps, strict=True):
        begins.append(at + gap)
        at += gap + length
    nbytes = at + draw(st.integers(0, 9))
    spans = [memory[s : s + n] for s, n in zip(starts, lengths, strict=True)]
    window = Window(memory, address_of(memory), starts, lengths)
    return (
        ScatteredView.over(begins, spans, nbytes),
        ScatteredView.over(begins, window, nbytes),
        memory,
        nbytes,
    )


@given(scattered(), st.data())
def test_a_window_is_as_its_spans_are(
    views: tuple[ScatteredView, ScatteredView, memoryview, int], data: st.DataObject
) -> None:
    single, window, memory, nbytes = views
    begin = data.draw(st.integers(0, nbytes))
    end = data.draw(st.integers(begin, nbytes))
    plain, windowed = single[begin:end], window[begin:end]
    assert isinstance(plain, ScatteredView) == isinstance(windowed, ScatteredView)
    if not isinstance(plain, ScatteredView):
        assert plain == windowed
        return
    assert isinstance(windowed, ScatteredView)
    begins, spans = plain.located()
    assert windowed.located() == (begins, spans)
    places = windowed.places()
    assert plain.places() is None
    assert places is not None
    base = address_of(memory)
    assert [
        (at, memory[address - base : address - base + length])
        for at, address, length in zip(*places, strict=True)
    ] == list(zip(begins, spans, strict=True))


@given(scattered(), st.data())
def test_cuts_are_slices(
    views: tuple[ScatteredView, ScatteredView, memoryview, int], data: st.DataObject
) -> None:
    single, window, _, nbytes = views
    base = data.draw(st.integers(0, nbytes))
    extents = data.draw(st.lists(st.tuples(st.integers(0, nbytes), st.integers(1, 30))))
    extents = [each for each in extents if base + sum(each) <= nbytes]
    for view in (single, window):
        for (offset, length), part in zip(extents, cut(view, extents, base), strict=True):
            expected = view[base + offset : base + offset + length]
            assert isinstance(part, ScatteredView) == isinstance(expected, ScatteredView)
            if isinstance(part, ScatteredView) and isinstance(expected, ScatteredView):
                assert part.located() == expected.located()
            else:
                assert part == expected


def test_a_read_only_window_is_not_written_through() -> None:
    memory = memoryview(bytearray(8))
    view = ScatteredView.over([0], Window(memory, address_of(memory), [0], [8]), 8).toreadonly()
    part = view[2:4]
    assert isinstance(part, memoryview)
    with pytest.raises(TypeError):
        part[0] = 1


def test_spans_that_overlap_are_refused() -> None:
    memory = memoryview(bytearray(8))
    for begins, nbytes in (([0, 3], 8), ([4, 0], 8), ([0, 4], 7)):
        with pytest.raises(ValueError, match="overlap"):
            ScatteredView.over(begins, Window(memory, 0, [0, 4], [4, 4]), nbytes)
    with pytest.raises(ValueError, match="a begin for each"):
        ScatteredView.over([0], Window(memory, 0, [0, 4], [4, 4]), 8)


def _places(lengths: list[int], begin: int) -> array[int]:
    found = array(kernel.PLACE)
    for length in lengths:
        found.extend((begin, length))
        begin += length
    return found


@given(st.lists(st.integers(1, 7), min_size=1, max_size=3000), st.data())
def test_places_of_both_sides_need_not_agree(lengths: list[int], data: st.DataObject) -> None:
    nbytes = sum(lengths)
    source, target = memoryview(bytearray(os.urandom(nbytes))), memoryview(bytearray(nbytes))
    step = data.draw(st.integers(1, nbytes))
    others = [min(step, nbytes - at) for at in range(0, nbytes, step)]
    there = _places(lengths, address_of(source))
    here = _places(others, address_of(target))
    kernel.read_places(os.getpid(), there, here, "peer")
    assert target == source


def test_a_place_that_is_not_mapped_is_an_error() -> None:
    target = memoryview(bytearray(8))
    here = _places([8], address_of(target))
    with pytest.raises(PeerProtocolError, match="can't be read"):
        kernel.read_places(os.getpid(), array(kernel.PLACE, (4096, 8)), here, "peer")


def test_a_memfd_fills_more_places_than_one_call_takes() -> None:
    data = os.urandom(5000)
    descriptor = os.memfd_create("test")
    try:
        os.write(descriptor, data)
        target = memoryview(bytearray(4000))
        here = _places([2] * 2000, address_of(target))
        kernel.read_descriptor_places(descriptor, 1000, here, "peer")
        assert target == data[1000:]
        with pytest.raises(PeerProtocolError, match="shorter"):
            kernel.read_descriptor(descriptor, 4999, target[:2], "peer")
        kernel.read_descriptor(descriptor, 5000, target[:0], "peer")
        kernel.read_descriptor(descriptor, 7, target[5:9], "peer")
        assert target[5:9] == data[7:11]
    finally:
        os.close(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        kernel.read_descriptor(-1, 0, target, "peer")


class _Counted(Sequence[Any]):
    """Spans that count how many of them are made."""

    def __init__(self, spans: Sequence[Any]) -> None:
        self.spans, self.made = spans, 0

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, at: Any) -> Any:
        self.made += len(range(*at.indices(len(self)))) if isinstance(at, slice) else 1
        return self.spans[at]


@pytest.mark.parametrize("device", ["cpu", "cuda:GPU-1"])
def test_the_device_of_many_spans_is_asked_of_one(device: str) -> None:
    one = memoryview(bytearray(4)) if device == "cpu" else DeviceView(device, 4096, 4)
    spans = _Counted([one] * 1000)
    view = ScatteredView.over(range(8, 8008, 8), spans, 8008)
    spans.made = 0
    assert device_of(view) == device_of(view[14:7000]) == device_of(view[9:11]) == device
    assert spans.made <= 4  # one of them is the part within a span
    assert device_of(view[:8]) == device_of(view[12:16]) == device_of(view[8004:]) == "cpu"
    assert device_of(view[4:5000]) == device
