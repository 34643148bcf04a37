"""Bytes in memory: contiguous ones, in the host or on a device, and scattered ones.

A layer space is contiguous by definition, while the tensors in it may lie anywhere in a process: an
engine has allocated them. A `ScatteredView` is such a layer space as transports and hashers use it:
they slice it as they slice an arena, and get plain views of the tensors' own memory::

    arena = ScatteredView.over(begins, spans, nbytes)
    arena[begin : begin + MIB]  # within a tensor: a memoryview of its memory
    arena[begin : begin + 9 * MIB].spans()  # of several: one view for each
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, repeat
from operator import add, gt, sub
from typing import NamedTuple, overload

from mx.errors import LocalError


@dataclass(frozen=True, slots=True)
class DeviceView:
    """Bytes in GPU memory, as a byte memoryview is bytes in the host's. `device` is "cuda:UUID",
    `address` a device pointer valid in this process; the view refers to `owner`, which keeps the
    memory."""

    device: str
    address: int
    nbytes: int
    owner: object = None

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, part: slice) -> DeviceView:
        start, stop, step = part.indices(self.nbytes)
        if step != 1:
            raise ValueError("a device view is contiguous")
        return DeviceView(self.device, self.address + start, max(0, stop - start), self.owner)


#: Contiguous bytes, wherever they are.
Span = memoryview | DeviceView


class TensorView(NamedTuple):
    """A tensor as it lies in memory: its form, and its bytes in the order in which they are stored.

    `dtype` is as safetensors spells it, `stride` in elements. `view` is a memoryview that can't be
    written through, or a `DeviceView`, whose memory must not be written to. It keeps the memory.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    view: Span


class Window(Sequence[memoryview]):
    """Spans of host memory that one view reaches, at ascending or any other places in it.

    The view may span memory that is not there, which nothing touches. Spans are made as they are
    needed: for many small tensors that takes a tenth of what a view of each by itself takes.
    """

    __slots__ = ("base", "address", "starts", "lengths")

    def __init__(
        self, base: memoryview, address: int, starts: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """
        Args:
            base: The view, of bytes. It keeps the memory.
            address: The address of its first byte.
            starts: Where each span begins in it.
            lengths: The length of each.
        """
        self.base, self.address, self.starts, self.lengths = base, address, starts, lengths

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, at: int) -> memoryview: ...
    @overload
    def __getitem__(self, at: slice) -> list[memoryview]: ...
    def __getitem__(self, at: int | slice) -> memoryview | list[memoryview]:
        base = self.base
        if isinstance(at, slice):
            parts = zip(self.starts[at], self.lengths[at], strict=True)
            return [base[start : start + nbytes] for start, nbytes in parts]
        start = self.starts[at]
        return base[start : start + self.lengths[at]]

    def toreadonly(self) -> Window:
        """Return the same spans, which can't be written through."""
        return Window(self.base.toreadonly(), self.address, self.starts, self.lengths)


class ScatteredView:
    """Bytes that count as one run, though they lie in several places. Immutable.

    It may have holes, such as the padding between tensors: their offsets count, and have no memory.
    It keeps the memory of all its spans alive. Spans may be made as they are looked at, by a
    sequence that has `lengths` and `toreadonly` as a `Window` does.
    """

    __slots__ = ("_begins", "_ends", "_spans", "_begin", "_end")

    def __init__(
        self,
        begins: Sequence[int],
        ends: Sequence[int],
        spans: Sequence[Span],
        begin: int,
        end: int,
    ) -> None:
        """Use `over`."""
        self._begins, self._ends, self._spans = begins, ends, spans
        self._begin, self._end = begin, end

    @classmethod
    def over(cls, begins: Sequence[int], spans: Sequence[Span], nbytes: int) -> ScatteredView:
        """Return a view of `nbytes` bytes over these spans.

        Args:
            begins: Where each span begins in the view, ascending; spans do not overlap in it.
            spans: The spans, none of them empty.
            nbytes: The length of the view.

        Raises:
            ValueError: The spans overlap in the view, are not in order, or reach beyond its ends.
        """
        lengths: Sequence[int] = getattr(spans, "lengths", None) or list(map(len, spans))
        if len(lengths) != len(begins):
            raise ValueError("a scattered view has a begin for each span")
        ends = list(map(add, begins, lengths))
        if any(map(gt, chain((0,), ends), chain(begins, (nbytes,)))):
            raise ValueError("the spans of a scattered view overlap, or are out of order")
        return cls(begins, ends, spans, 0, nbytes)

    def __len__(self) -> int:
        return self._end - self._begin

    @property
    def nbytes(self) -> int:
        """The length in bytes, with holes."""
        return self._end - self._begin

    def __getitem__(self, part: slice) -> View:
        """Return a part: a plain view if it lies within one span, or is empty."""
        start, stop, step = part.indices(self._end - self._begin)
        if step != 1:
            raise ValueError("a scattered view has no steps")
        begin, end = self._begin + start, self._begin + max(start, stop)
        if begin == end:  # such as an empty tensor: it is nowhere, and not in several places
            return self._spans[0][:0] if self._spans else memoryview(b"")
        at = bisect_right(self._begins, begin) - 1
        if at >= 0 and end <= self._ends[at]:
            base = self._begins[at]
            return self._spans[at][begin - base : end - base]
        return ScatteredView(self._begins, self._ends, self._spans, begin, end)

    def toreadonly(self) -> ScatteredView:
        """Return the view with host memory that can't be written through it."""
        spans: Sequence[Span]
        if made := getattr(self._spans, "toreadonly", None):
            spans = made()
        else:
            spans = [s.toreadonly() if isinstance(s, memoryview) else s for s in self._spans]
        return ScatteredView(self._begins, self._ends, spans, self._begin, self._end)

    def cut(self, extents: Sequence[tuple[int, int]], base: int = 0) -> list[View]:
        """Return `self[base + offset : base + offset + nbytes]` of each (offset, nbytes)."""
        spans, begins, ends = self._spans, self._begins, self._ends
        if not isinstance(spans, Window):
            return [self[base + offset : base + offset + nbytes] for offset, nbytes in extents]
        whole, starts, shift = spans.base, spans.starts, self._begin + base
        if extents:  # mostly they are whole spans, one after the other
            first = bisect_left(begins, extents[0][0] + shift)
            own = slice(first, first + len(extents))
            offsets = map(sub, begins[own], repeat(shift))
            if list(zip(offsets, spans.lengths[own], strict=False)) == list(extents):
                return list(spans[own])
        found: list[View] = []
        at = -1
        for offset, nbytes in extents:
            begin = offset + shift
            at += 1
            if not (0 <= at < len(begins) and begins[at] <= begin < ends[at]):
                at = bisect_right(begins, begin) - 1
            if at >= 0 and begin + nbytes <= ends[at]:
                start = starts[at] + begin - begins[at]
                found.append(whole[start : start + nbytes])
            else:
                found.append(self[base + offset : base + offset + nbytes])
        return found

    def places(self) -> tuple[list[int], list[int], list[int]] | None:
        """Return columns of the offset in this view, the address and the length of each span; None
        where addresses are not known. Holes have none."""
        spans, begin, end = self._spans, self._begin, self._end
        if not isinstance(spans, Window):
            return None
        first = bisect_right(self._ends, begin)
        last = bisect_left(self._begins, end, first)
        begins = [at - begin for at in self._begins[first:last]]
        addresses = [spans.address + start for start in spans.starts[first:last]]
        lengths = list(spans.lengths[first:last])
        if lengths:
            lengths[-1] -= max(0, self._ends[last - 1] - end)
            if begins[0] < 0:
                addresses[0] -= begins[0]
                lengths[0] += begins[0]
                begins[0] = 0
        return begins, addresses, lengths

    def located(self) -> tuple[list[int], list[Span]]:
        """Return the offset of each span in this view, and the spans, without the holes."""
        begin, end = self._begin, self._end
        first = bisect_right(self._ends, begin)
        last = bisect_left(self._begins, end, first)
        begins = [at - begin for at in self._begins[first:last]]
        spans = list(self._spans[first:last])
        if spans:
            over = self._ends[last - 1] - end
            if over > 0:
                spans[-1] = spans[-1][: len(spans[-1]) - over]
            if begins[0] < 0:
                spans[0] = spans[0][-begins[0] :]
                begins[0] = 0
        return begins, spans

    @property
    def device(self) -> str:
        """The device of the first span with bytes of this view: "cpu" or "cuda:UUID". It is the
        only one that is made, of maybe many."""
        at = bisect_right(self._ends, self._begin)
        if at == len(self._ends) or self._begins[at] >= self._end:
            return "cpu"
        first = self._spans[at]
        return first.device if isinstance(first, DeviceView) else "cpu"

    def spans(self) -> list[Span]:
        """Return the bytes as contiguous spans, in order.

        Raises:
            LocalError: A part of the view has no memory.
        """
        spans = self.located()[1]
        if sum(map(len, spans)) != len(self):
            raise LocalError(f"a part of these {len(self)} bytes is in no memory of this process")
        return spans


#: Bytes, contiguous or not.
View = Span | ScatteredView
#: Bytes in host memory, contiguous or not.
HostView = memoryview | ScatteredView


def contiguous(view: View) -> Span:
    """Return the view as one span. Raises LocalError if it is scattered."""
    if isinstance(view, ScatteredView):
        raise LocalError("these bytes are in several places")
    return view


def spans_of(view: View) -> list[Span]:
    """Return the spans of a view, in order. Raises LocalError as `ScatteredView.spans`."""
    return view.spans() if isinstance(view, ScatteredView) else [view]


def located_spans(view: View) -> list[Span]:
    """Return the spans of a view, in order, without its holes."""
    return view.located()[1] if isinstance(view, ScatteredView) else [view]


def device_of(view: View) -> str:
    """Return the device that a view, or the first of its spans, is on: "cpu" or "cuda:UUID"."""
    return "cpu" if isinstance(view, memoryview) else view.device


def cut(view: View, extents: Sequence[tuple[int, int]], base: int = 0) -> list[View]:
    """Return `view[base + offset : base + offset + nbytes]` of each (offset, nbytes)."""
    if isinstance(view, ScatteredView):
        return view.cut(extents, base)
    return [view[base + offset : base + offset + nbytes] for offset, nbytes in extents]


def host_view(view: View) -> memoryview:
    """Return the view as contiguous host memory. Raises LocalError if it is not."""
    if isinstance(view, memoryview):
        return view
    if isinstance(view, DeviceView):
        raise LocalError(f"this transport cannot reach the memory of {view.device}")
    raise LocalError("these bytes are in several places")


@contextmanager
def as_bytes(view: HostView) -> Iterator[HostView]:
    """Give a view of bytes, which is released at the end of the block if it is a plain one."""
    if isinstance(view, memoryview):
        with view.cast("B") as found:
            yield found
    else:
        yield view


def host_bytes(view: View) -> HostView:
    """Return a view of host memory as it is. Raises LocalError if it is on a device."""
    if isinstance(view, DeviceView):
        raise LocalError(f"these bytes are in the memory of {view.device}")
    return view
