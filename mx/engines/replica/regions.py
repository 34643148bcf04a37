"""Where the elements of a view lie: what an engine copies from a checkpoint's tensors. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

from mx.core.layout import contiguous_strides


class Region(NamedTuple):
    """The elements of a view, in its tensor's memory: `offset` and `strides` in elements."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)


class Box(NamedTuple):
    """Elements `begins[d]` to `ends[d]`, half-open, of each dimension d of a tensor."""

    begins: tuple[int, ...]
    ends: tuple[int, ...]


def box_of(region: Region, shape: Sequence[int]) -> Box | None:
    """Return a region of a contiguous tensor as a box; None if it is none, or is empty.

    Args:
        region: The region, whose dimensions may be in another order than the tensor's.
        shape: The tensor's shape.
    """
    if not region.numel:
        return None
    dims = _dims(region, shape)
    if dims is None:
        return None
    begins, rest = [], region.offset
    for size, stride in zip(shape, contiguous_strides(shape), strict=True):
        at = rest // stride if size > 1 else 0
        begins.append(at)
        rest -= at * stride
    ends = [begin + 1 for begin in begins]
    for dim, size in dims:
        ends[dim] = begins[dim] + size
    if rest or any(end > size for end, size in zip(ends, shape, strict=True)):
        return None
    return Box(tuple(begins), tuple(ends))


def _dims(region: Region, shape: Sequence[int]) -> list[tuple[int, int]] | None:
    """Return for each of a region's dimensions that is longer than 1 the tensor's dimension that it
    goes along, and how far; None where one goes along no single dimension."""
    along = {
        stride: dim
        for dim, (size, stride) in enumerate(zip(shape, contiguous_strides(shape), strict=True))
        if size > 1
    }
    found = []
    for size, stride in zip(region.shape, region.strides, strict=True):
        if size == 1:
            continue
        dim = along.pop(stride, None)
        if dim is None:
            return None
        found.append((dim, size))
    return found


def slice_of(regions: Iterable[Region], shape: Sequence[int]) -> tuple[int, int, int] | None:
    """Return the slice of a contiguous tensor that some of its regions lie in, as `mx.pull` takes
    it: (dim, begin, end); None if that is all of it, or no slice along one dimension.

    Args:
        regions: The regions.
        shape: The tensor's shape.
    """
    begins, ends = list(shape), [0] * len(shape)
    for region in regions:
        box = box_of(region, shape)
        if box is None:
            return None
        begins = list(map(min, begins, box.begins))
        ends = list(map(max, ends, box.ends))
    parts = [
        (dim, begin, end)
        for dim, (begin, end, size) in enumerate(zip(begins, ends, shape, strict=True))
        if (begin, end) != (0, size)
    ]
    return parts[0] if len(parts) == 1 else None


def within(region: Region, shape: Sequence[int], part: tuple[int, int, int]) -> Region:
    """Return where a region is once only a slice of its contiguous tensor is there, contiguous.

    Args:
        region: A region of which `box_of` makes a box inside the slice.
        shape: The tensor's shape.
        part: (dim, begin, end).
    """
    box, dims = box_of(region, shape), _dims(region, shape)
    assert box is not None and dims is not None
    cut, begin, end = part
    strides = contiguous_strides([*shape[:cut], end - begin, *shape[cut + 1 :]])
    offset = sum(
        (at - (begin if dim == cut else 0)) * strides[dim] for dim, at in enumerate(box.begins)
    )
    longer = iter(dims)
    moved = tuple(strides[next(longer)[0]] if size > 1 else 1 for size in region.shape)
    return Region(offset, region.shape, moved)


def are_disjoint(boxes: Iterable[Box]) -> bool:
    """Return True if no two boxes of a tensor share an element."""
    ordered = sorted(boxes)
    if ordered and not ordered[0].begins:
        return len(ordered) == 1  # of a tensor with one element
    reach: list[Box] = []
    for one in ordered:
        reach = [each for each in reach if each.ends[0] > one.begins[0]]
        if any(_meet(each, one) for each in reach):
            return False
        reach.append(one)
    return True


def _meet(one: Box, other: Box) -> bool:
    return all(
        max(begins) < min(ends)
        for begins, ends in zip(
            zip(one.begins, other.begins, strict=True),
            zip(one.ends, other.ends, strict=True),
            strict=True,
        )
    )
