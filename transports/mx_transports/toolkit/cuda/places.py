"""The places of a scattered region's bytes: GPU memory that mx did not lay out."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from mx.errors import LocalError
from mx.transport import DeviceView, ScatteredView

#: Places of one region at most.
MAX_PLACES = 1 << 21
_WORD = "Q"


class ScatterTable:
    """A table of places: where each begins in the region, its address at the source, its length."""

    def __init__(
        self, begins: Sequence[int], addresses: Sequence[int], lengths: Sequence[int]
    ) -> None:
        self.begins, self.addresses, self.lengths = begins, addresses, lengths

    @classmethod
    def of(cls, view: ScatteredView) -> ScatterTable:
        """Return the places of a view of GPU memory. Raises LocalError for other memory, and where
        there are too many."""
        begins, spans = view.located()
        there = [span for span in spans if isinstance(span, DeviceView)]
        if len(there) != len(spans):
            raise LocalError("these tensors are in host memory, in several places")
        if len(spans) > MAX_PLACES:
            raise LocalError(f"tensors in at most {MAX_PLACES} places are exported")
        return cls(begins, [span.address for span in there], list(map(len, there)))

    def pack(self) -> memoryview:
        """Return the columns, in network order."""
        columns = array(_WORD, [*self.begins, *self.addresses, *self.lengths])
        if sys.byteorder == "little":
            columns.byteswap()
        return memoryview(columns).cast("B")

    @classmethod
    def unpack(cls, data: memoryview, region_nbytes: int) -> ScatterTable:
        """Return the table that `pack` encoded. Raises ValueError for what no source of mx
        sends."""
        columns = array(_WORD, bytes(data))
        if sys.byteorder == "little":
            columns.byteswap()
        count = len(columns) // 3
        begins, addresses, lengths = (columns[i * count : (i + 1) * count] for i in range(3))
        limits = [*begins[1:], region_nbytes]
        for begin, nbytes, limit in zip(begins, lengths, limits, strict=True):
            if not nbytes or begin + nbytes > limit:
                raise ValueError("places that overlap, or lie outside of their region")
        return cls(begins, addresses, lengths)

    def at(self, offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield the address and the length of each part of some bytes of the region.

        Raises:
            ValueError: Some of them have no place.
        """
        number = bisect_right(self.begins, offset) - 1
        while nbytes:
            inside = offset - self.begins[number] if 0 <= number < len(self.begins) else -1
            if not 0 <= inside < self.lengths[number]:
                raise ValueError("a read reaches where the source has no memory")
            take = min(self.lengths[number] - inside, nbytes)
            yield self.addresses[number] + inside, take
            offset, nbytes, number = offset + take, nbytes - take, number + 1
