"""Reads cut into steps, so that bytes are reported to a sink while they arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, repeat
from operator import add
from typing import Generic, NamedTuple, TypeVar

from mx.transport import Piece, Read, ScatteredView, Span, host_view, slices
from mx.views import located_spans

View = TypeVar("View", memoryview, Span)


class Slice(NamedTuple, Generic[View]):
    """`len(view)` bytes from `offset` of the source's region `region`, to be put into `view`."""

    region: int
    offset: int
    view: View


def in_place(piece: Piece, as_view: Callable[[Span], View]) -> Iterator[Slice[View]]:
    """Return a piece's contiguous parts, one for each place where its destination lies.

    Args:
        piece: The piece.
        as_view: As in `steps`.
    """
    if not isinstance(piece.view, ScatteredView):
        return iter((Slice(piece.region, piece.region_offset, as_view(piece.view)),))
    begins, spans = piece.view.located()
    offsets = map(add, begins, repeat(piece.region_offset))
    columns = zip(repeat(piece.region), offsets, map(as_view, spans), strict=False)
    return map(partial(tuple.__new__, Slice), columns)


def steps(
    read: Read, step_nbytes: int, as_view: Callable[[Span], View]
) -> Iterator[tuple[list[Slice[View]], int]]:
    """Cut a read into steps of `step_nbytes` bytes, the last one shorter.

    A step should be small enough for the sink's hash to find the bytes in the cache, and large
    enough that what a step costs in Python does not show.

    Args:
        read: The read, whose pieces may be empty.
        step_nbytes: The size of a step in bytes, at least 1.
        as_view: Returns the view that a slice has for a piece's destination; raises LocalError for
            one that the transport can't write to.

    Yields:
        For each step its slices, none of them empty, and the bytes of the read that are in place
        once this step and all before it are. An empty read has no steps.
    """
    landed = 0
    for pieces, nbytes in slices(read, step_nbytes):
        landed += nbytes
        yield list(chain.from_iterable(map(in_place, pieces, repeat(as_view)))), landed


def host_views(read: Read, step_nbytes: int) -> Iterator[tuple[list[memoryview], int]]:
    """Cut a read as `steps` does, for a transport that fills host memory in the read's order.

    Yields:
        For each step the memory to fill, and the bytes of the read that are in place once that is
        filled.

    Raises:
        LocalError: A destination is on a device. Some of the steps may have been yielded.
    """
    views, landed, left = list[memoryview](), 0, step_nbytes
    for piece in read.pieces:
        for view in map(host_view, located_spans(piece.view)):
            while view:
                # What fits is not cut: a read may be of thousands of small tensors.
                part, view = (view, view[:0]) if len(view) <= left else (view[:left], view[left:])
                views.append(part)
                landed += len(part)
                left -= len(part)
                if not left:
                    yield views, landed
                    views, left = [], step_nbytes
    if views:
        yield views, landed


def host_pieces(read: Read) -> Iterator[Slice[memoryview]]:
    """Yield the parts of a read whose destinations are contiguous, in host memory.

    Raises:
        LocalError: A destination is on a device. Some of the parts may have been yielded.
    """
    for piece in read.pieces:
        yield from in_place(piece, host_view)
