"""Scattered views against a plain model of them: bytes, and which of them have memory."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.errors import LocalError
from mx.transport import Piece, Read
from mx.views import (
    DeviceView,
    ScatteredView,
    View,
    as_bytes,
    contiguous,
    host_view,
    spans_of,
)
from mx_transports.toolkit.limiting import LEAST_SLICE, paced
from mx_transports.toolkit.slicing import host_pieces, steps


@dataclass
class Model:
    """A view, and what it should show: a byte, or None in a hole."""

    view: ScatteredView
    bytes: list[int | None]
    memories: list[bytearray]


@st.composite
def models(draw: st.DrawFn, *, holes: bool = True) -> Model:
    sizes = draw(st.lists(st.integers(1, 9), max_size=8))
    gaps = [draw(st.integers(0, 4)) if holes else 0 for _ in range(len(sizes) + 1)]
    begins, memories, expected, value = [], [], [None] * gaps[0], 0
    found: list[int | None] = list(expected)
    for size, gap in zip(sizes, gaps[1:], strict=True):
        begins.append(len(found))
        memories.append(bytearray((value + i) % 256 for i in range(size)))
        found += [*memories[-1], *[None] * gap]
        value += size
    # In memory they are in any order: nothing depends on where.
    view = ScatteredView.over(begins, [memoryview(m) for m in memories], len(found))
    return Model(view, found, memories)


def cut(data: st.DataObject, view: View, bytes_: list[int | None]) -> tuple[View, list[int | None]]:
    for _ in range(data.draw(st.integers(0, 3))):
        bound = st.none() | st.integers(-len(bytes_) - 2, len(bytes_) + 2)
        part = slice(data.draw(bound), data.draw(bound))
        view, bytes_ = view[part], bytes_[part]
    return view, bytes_


def shown(view: View) -> list[int | None]:
    """What a view shows, by `located` alone."""
    if isinstance(view, memoryview):
        return list(view)
    assert isinstance(view, ScatteredView)
    found: list[int | None] = [None] * len(view)
    begins, spans = view.located()
    assert begins == sorted(set(begins))
    for begin, span in zip(begins, spans, strict=True):
        assert len(span)
        found[begin : begin + len(span)] = list(host_view(span))
    assert len(found) == len(view) == view.nbytes
    return found


@given(st.data())
def test_parts_of_parts_show_what_they_should(data: st.DataObject) -> None:
    model = data.draw(models())
    view, expected = cut(data, model.view, model.bytes)
    assert len(view) == len(expected)
    assert shown(view) == expected
    if None in expected:
        with pytest.raises(LocalError, match="in no memory"):
            spans_of(view)
    else:
        assert b"".join(bytes(host_view(span)) for span in spans_of(view)) == bytes(
            each for each in expected if each is not None
        )


@given(st.data())
def test_what_lies_in_one_place_is_a_plain_view(data: st.DataObject) -> None:
    model = data.draw(models())
    begin = data.draw(st.integers(0, len(model.bytes)))
    end = data.draw(st.integers(begin, len(model.bytes)))
    begins, spans = model.view.located()
    one = begin == end or any(
        at <= begin and end <= at + len(span) for at, span in zip(begins, spans, strict=True)
    )
    part = model.view[begin:end]
    assert isinstance(part, memoryview) == one
    if one:
        assert contiguous(part) is part and host_view(part) is part
    else:
        with pytest.raises(LocalError, match="several places"):
            contiguous(part)
        with pytest.raises(LocalError, match="several places"):
            host_view(part)


@given(st.data())
def test_what_is_written_through_a_part_is_in_the_memory(data: st.DataObject) -> None:
    model = data.draw(models())
    view, expected = cut(data, model.view, model.bytes)
    before = [bytes(memory) for memory in model.memories]
    frozen = view.toreadonly() if isinstance(view, ScatteredView | memoryview) else None
    assert frozen is not None
    for span in frozen.located()[1] if isinstance(frozen, ScatteredView) else [frozen]:
        assert host_view(span).readonly
    assert shown(frozen) == expected
    for span in view.located()[1] if isinstance(view, ScatteredView) else [view]:
        if len(span):
            host_view(span)[:] = b"\xff" * len(span)
    written = sum(
        a != b
        for m, old in zip(model.memories, before, strict=True)
        for a, b in zip(m, old, strict=True)
    )
    assert written == sum(each is not None for each in expected)
    assert shown(frozen) == [None if each is None else 0xFF for each in expected]


def test_spans_in_a_wrong_order_are_refused() -> None:
    spans = [memoryview(bytearray(4)), memoryview(bytearray(4))]
    for begins, nbytes in (([0, 3], 8), ([4, 0], 8), ([0, 4], 7), ([-1, 4], 8)):
        with pytest.raises(ValueError, match=r"overlap|order"):
            ScatteredView.over(begins, spans, nbytes)
    with pytest.raises(ValueError, match="steps"):
        ScatteredView.over([0, 4], spans, 8)[::2]


def test_a_part_keeps_the_memory_and_no_longer_than_itself() -> None:
    class Owned(bytearray):
        pass

    memory = Owned(8)
    left = weakref.ref(memory)
    view: View = ScatteredView.over([0, 8], [memoryview(memory)[:4], memoryview(memory)[4:]], 12)
    part = view[2:10]
    del memory, view
    gc.collect()
    assert left() is not None
    del part
    gc.collect()
    assert left() is None


def test_memory_of_a_device_stays_of_the_device() -> None:
    one, other = DeviceView("cuda:GPU-1", 4096, 8), DeviceView("cuda:GPU-1", 16384, 8)
    view = ScatteredView.over([0, 8], [one, other], 16)
    assert view[2:6] == DeviceView("cuda:GPU-1", 4098, 4)
    assert view[5:5] == DeviceView("cuda:GPU-1", 4096, 0)
    assert view[4:12].toreadonly().spans() == [one[4:], other[:4]]  # type: ignore[union-attr]
    with pytest.raises(LocalError, match="cuda:GPU-1"):
        host_view(view[2:6])


def test_a_plain_view_is_released_and_a_scattered_one_given_as_it_is() -> None:
    plain = memoryview(bytearray(8))
    with as_bytes(plain) as found:
        assert isinstance(found, memoryview)
    with pytest.raises(ValueError, match="released"):
        found[0]
    scattered = ScatteredView.over([0], [plain], 9)
    with as_bytes(scattered) as given_:
        assert given_ is scattered


class NoSink:
    def landed(self, nbytes: int) -> None: ...
    def done(self) -> None: ...
    def failed(self, error: Exception) -> None: ...


@given(st.data(), st.integers(1, 12))
def test_steps_of_a_read_into_several_places(data: st.DataObject, step_nbytes: int) -> None:
    """Each step's slices, in order, are the read's bytes: where they come from, where they go."""
    pieces, expected, memories = [], [], []
    for number in range(data.draw(st.integers(0, 4))):
        model = data.draw(models(holes=False))
        offset = data.draw(st.integers(0, 50))
        pieces.append(Piece(number, offset, model.view))
        expected += [(number, offset + i) for i in range(len(model.view))]
        memories += model.memories
    read = Read("r", pieces, NoSink())
    got, landed = [], 0
    for slices, now in steps(read, step_nbytes, host_view):
        assert 0 < now - landed <= step_nbytes
        assert sum(len(each.view) for each in slices) == now - landed
        landed = now
        for each in slices:
            assert len(each.view)
            got += [(each.region, each.offset + i) for i in range(len(each.view))]
            each.view[:] = b"\xee" * len(each.view)
    assert got == expected and landed == read.nbytes
    assert all(memory == b"\xee" * len(memory) for memory in memories)
    pieces_again = list(host_pieces(read))
    assert [(s.region, s.offset + i) for s in pieces_again for i in range(len(s.view))] == expected


class Counted:
    """A limiter that never waits, and notes what is taken."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken: list[int] = []

    def slice_nbytes(self, grant_id: str) -> int:
        assert grant_id == "grant"
        return self.size

    def delay_s(self, nbytes: int) -> float:
        self.taken.append(nbytes)
        return 0.0


@given(
    st.lists(st.sampled_from([0, 1, 100, 4096, LEAST_SLICE, 3 * LEAST_SLICE + 7]), max_size=12),
    st.sampled_from([1, LEAST_SLICE, 2 * LEAST_SLICE, 5 * LEAST_SLICE + 3]),
    st.integers(0, 4),
)
def test_many_views_are_paced_as_one(sizes: list[int], slice_nbytes: int, streams: int) -> None:
    """The limiter is asked for whole slices, whatever the places: not once for each of them."""
    data = bytes(i * 31 % 251 for i in range(sum(sizes)))
    views, at = [], 0
    for size in sizes:
        views.append(memoryview(data)[at : at + size])
        at += size
    limiter = Counted(slice_nbytes)
    slices = list(paced(views, limiter, "grant", lambda: streams, lambda: False))
    assert b"".join(bytes(part) for parts in slices for part in parts) == data
    assert limiter.taken == [sum(map(len, parts)) for parts in slices]
    size = max(LEAST_SLICE, slice_nbytes // max(1, streams))
    assert all(taken == size for taken in limiter.taken[:-1])
    assert all(0 < taken <= size for taken in limiter.taken)
