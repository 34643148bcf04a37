"""Where views of tensors lie: boxes, the slices around them, and where they are in a slice."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mx.engines.replica.regions import Box, Region, are_disjoint, box_of, slice_of, within


def region(view: np.ndarray[Any, Any], base: np.ndarray[Any, Any]) -> Region:
    item = base.itemsize
    offset = (view.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // item
    return Region(offset, view.shape, tuple(stride // item for stride in view.strides))


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[slice, ...], tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    cuts = []
    for size in shape:
        begin = draw(st.integers(0, size - 1))
        cuts.append(slice(begin, draw(st.integers(begin + 1, size))))
    return shape, tuple(cuts), tuple(draw(st.permutations(range(len(shape)))))


@given(boxes())
def test_a_box_is_found_again_in_any_order_of_its_dimensions(drawn: Any) -> None:
    shape, cuts, order = drawn
    base = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    view = base[(*cuts, ...)].transpose(order)
    found = box_of(region(view, base), shape)
    assert found == Box(tuple(c.start for c in cuts), tuple(c.stop for c in cuts))


@given(boxes())
def test_a_region_of_a_slice_has_the_same_elements(drawn: Any) -> None:
    shape, cuts, order = drawn
    base = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    view = base[(*cuts, ...)].transpose(order)
    part = slice_of([region(view, base)], shape)
    if part is None:
        narrower = sum(c.stop - c.start < size for c, size in zip(cuts, shape, strict=True))
        assert narrower != 1
        return
    dim, begin, end = part
    sliced = np.ascontiguousarray(base[(slice(None),) * dim + (slice(begin, end),)])
    offset, sizes, strides = within(region(view, base), shape, part)
    moved = np.lib.stride_tricks.as_strided(
        sliced.reshape(-1)[offset:], sizes, [each * sliced.itemsize for each in strides]
    )
    assert (moved == view).all() and moved.shape == view.shape


@given(st.lists(boxes(), max_size=4), st.data())
def test_boxes_are_disjoint_if_they_share_no_element(drawn: Any, data: Any) -> None:
    shape = (4, 3, 5)
    found, marks = [], np.zeros(shape, int)
    for _ in drawn:
        begins = [data.draw(st.integers(0, size - 1)) for size in shape]
        pairs = zip(begins, shape, strict=True)
        ends = [data.draw(st.integers(begin + 1, size)) for begin, size in pairs]
        found.append(Box(tuple(begins), tuple(ends)))
        marks[tuple(map(slice, begins, ends))] += 1
    assert are_disjoint(found) == (marks.max(initial=0) < 2)


def test_what_is_no_box_is_none() -> None:
    base = np.arange(24).reshape(4, 6)
    assert box_of(region(base.reshape(-1), base), (4, 6)) is None
    assert box_of(region(base[:, ::2], base), (4, 6)) is None
    assert box_of(region(base[:0], base), (4, 6)) is None
    assert box_of(Region(3, (2,), (6,)), (4, 6)) == Box((0, 3), (2, 4))
    assert box_of(Region(23, (2,), (6,)), (4, 6)) is None
    assert box_of(Region(4, (3,), (1,)), (4, 6)) is None
    assert box_of(Region(0, (), ()), ()) == Box((), ())
    assert slice_of([region(base.reshape(-1), base)], (4, 6)) is None
    assert are_disjoint([]) and not are_disjoint([Box((), ()), Box((), ())])
