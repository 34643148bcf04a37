"""Where the bytes of a layout are in the memory of one process. Pure.

An arena that is laid out as the layout says has one span a layer. Memory that was laid out
otherwise has rows: layer-space ranges and their places in its regions. That is the memory of an
engine, which a source lends or a pull fills. Each process applies its own map, so that between two
of them only places in layer space are named::

    extents = ExtentMap.of_table(layout, table)
    places = extents.places(layer, begin, end)  # of a range in layer space

Tables carry the rows to people and tools, and to transports whose readers need addresses.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import repeat
from operator import add, sub
from typing import NamedTuple

from mx.core.types import AddressTable, Layout, TableRow
from mx.errors import PeerProtocolError


class PlacedExtent(NamedTuple):
    """`nbytes` bytes from `offset` in a layer's space, and their place in a region."""

    region: int
    region_offset: int
    offset: int
    nbytes: int


class _RegionSpan(NamedTuple):
    """Bytes up to `end` in layer space are `shift` further on in the region."""

    end: int
    region: int
    shift: int


class ExtentMap:
    """Maps layer space to regions. Immutable; any thread may use it."""

    def __init__(
        self, begins: Sequence[list[int]], spans: Sequence[list[_RegionSpan]], *, contiguous: bool
    ) -> None:
        """Use `of_arena`, `of_places` or `of_table`. `begins` and `spans` are by layer,
        ascending."""
        self._begins = begins
        self._spans = spans
        #: True if the layers are in one region as an arena has them, or in several in order.
        self.contiguous = contiguous

    @classmethod
    def of_arena(cls, layout: Layout) -> ExtentMap:
        """Return the map of an arena with this layout, which is region 0."""
        layers = layout.layers
        spans = [[_RegionSpan(layer.nbytes, 0, layer.arena_offset)] for layer in layers]
        return cls([[0] for _ in layers], spans, contiguous=True)

    @classmethod
    def of_places(cls, layout: Layout, places: Sequence[int]) -> ExtentMap:
        """Return the map of tensors that lie anywhere in one region.

        Args:
            layout: The layout.
            places: Where each tensor that has bytes begins in region 0, in the layout's order.
        """
        begins: list[list[int]] = []
        spans: list[list[_RegionSpan]] = []
        done = 0
        for layer in layout.layers:
            own = [extent for extent in layer.extents if extent[1]]
            shifts = places[done : done + len(own)]
            done += len(own)
            offsets = [offset for offset, _ in own]
            ends = map(sum, own)
            begins.append(offsets)
            columns = (ends, repeat(0), map(sub, shifts, offsets))
            spans.append(
                list(map(partial(tuple.__new__, _RegionSpan), zip(*columns, strict=False)))
            )
        return cls(begins, spans, contiguous=False)

    @classmethod
    def of_table(cls, layout: Layout, table: AddressTable) -> ExtentMap:
        """Return the map of a source.

        Args:
            layout: The layout of its manifest.
            table: Its table, with its rows if it is scattered; the codec and `mx.wire.rows` have
                checked it in itself.

        Raises:
            PeerProtocolError: A region is too small for its layers, a row lies outside its layer,
                or a layer that the source holds is not covered.
        """
        layers = layout.layers
        begins: list[list[int]] = [[] for _ in layers]
        spans: list[list[_RegionSpan]] = [[] for _ in layers]
        for region in table.regions:
            if region.layers is None:
                continue
            first, end = region.layers
            if end > len(layers):
                raise PeerProtocolError(f"region {region.index} has layers that the model has not")
            base = layers[first].arena_offset
            if layers[end - 1].arena_offset + layers[end - 1].nbytes - base > region.nbytes:
                raise PeerProtocolError(f"region {region.index} is too small for its layers")
            for layer in layers[first:end]:
                begins[layer.index] = [0]
                spans[layer.index] = [
                    _RegionSpan(layer.nbytes, region.index, layer.arena_offset - base)
                ]
        in_regions = [bool(each) for each in begins]
        for row in table.rows:
            end = row.offset + row.nbytes
            if row.layer >= len(layers) or end > layers[row.layer].nbytes:
                raise PeerProtocolError(f"a row lies outside layer {row.layer}")
            if in_regions[row.layer]:
                raise PeerProtocolError(f"layer {row.layer} has a region and rows")
            begins[row.layer].append(row.offset)
            spans[row.layer].append(_RegionSpan(end, row.region, row.region_offset - row.offset))
        found = cls(begins, spans, contiguous=not table.rows)
        for first, end in table.held:
            for layer in layers[first:end]:
                for offset, nbytes in layer.extents:
                    found.places(layer.index, offset, offset + nbytes)
        return found

    def places(self, layer: int, begin: int, end: int) -> list[PlacedExtent]:
        """Return where bytes [begin, end) of a layer's space are, ascending.

        Raises:
            PeerProtocolError: The source has not said where all of them are.
        """
        begins, spans = self._begins[layer], self._spans[layer]
        at = bisect_right(begins, begin) - 1
        found: list[PlacedExtent] = []
        while begin < end:
            if not (0 <= at < len(spans) and begins[at] <= begin < spans[at].end):
                raise PeerProtocolError(f"no row says where bytes at {begin} of layer {layer} are")
            until, region, shift = spans[at]
            nbytes = min(until, end) - begin
            found.append(PlacedExtent(region, begin + shift, begin, nbytes))
            begin += nbytes
            at += 1
        return found

    @cached_property
    def rows(self) -> tuple[TableRow, ...]:
        """The rows of the table, ascending; none if it is contiguous."""
        if self.contiguous:
            return ()
        found: list[TableRow] = []
        row = partial(tuple.__new__, TableRow)
        for layer, (begins, spans) in enumerate(zip(self._begins, self._spans, strict=True)):
            if begins:
                ends, regions, shifts = zip(*spans, strict=True)
                lengths, places = map(sub, ends, begins), map(add, begins, shifts)
                columns = (repeat(layer), begins, lengths, regions, places)
                found += map(row, zip(*columns, strict=False))
        return tuple(found)
