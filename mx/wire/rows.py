"""The rows of a layer-address table as a document: columns of little-endian integers.

They are, one after the other, the layer of each row (4 bytes each), its offset in the layer's space
(8), its length (8), its region (4) and its offset in that (8). A reader checks it in
columns: a coordinator has many, of tens of thousands of rows each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mx.core.types import ROW_BYTES, AddressTable, TableRow
from mx.errors import PeerProtocolError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_COLUMNS = ("<u4", "<u8", "<u8", "<u4", "<u8")


def encode_rows(rows: Sequence[TableRow]) -> bytes:
    """Return the document of these rows, `ROW_BYTES` for each."""
    import numpy as np

    columns = zip(*rows, strict=True) if rows else [()] * len(_COLUMNS)
    return b"".join(
        np.array(column, dtype).tobytes() for column, dtype in zip(columns, _COLUMNS, strict=True)
    )


def with_rows(table: AddressTable, document: bytes) -> AddressTable:
    """Return a table with the rows that a document has.

    Raises:
        PeerProtocolError: As `check_rows`.
    """
    columns = check_rows(table, document)
    rows = map(TableRow, *(column.tolist() for column in columns))
    return replace(table, rows=tuple(rows))


def check_rows(table: AddressTable, document: bytes) -> list[NDArray[Any]]:
    """Check the rows of a table, and return their columns, which are views of the document.

    Rows must be ascending by (layer, offset), must not overlap, and must stay inside regions
    without layers of their own.

    Args:
        table: The table, without its rows.
        document: The rows.

    Raises:
        PeerProtocolError: A row is not valid, or there are not as many as the table says.
    """
    import numpy as np

    count = table.row_count
    if len(document) != count * ROW_BYTES:
        raise PeerProtocolError(f"rows: {len(document)} bytes for {count} rows")
    columns, at = [], 0
    for dtype in _COLUMNS:
        columns.append(np.frombuffer(document, dtype, count, at))
        at += count * np.dtype(dtype).itemsize
    layer, offset, nbytes, region, region_offset = columns
    end = offset + nbytes
    same = layer[1:] == layer[:-1]
    # One size more, 0: that of a region which is not there.
    sizes = [0 if each.layers else each.nbytes for each in table.regions] + [0]
    size = np.array(sizes, "<u8")[np.minimum(region, len(table.regions))]
    wrongs = (
        (_after((layer[1:] < layer[:-1]) | (same & (offset[1:] < end[:-1]))), "is out of order"),
        ((nbytes == 0) | (end < offset), "has no bytes, or too many"),
        (size == 0, "names a region that takes no rows"),
        ((nbytes > size) | (region_offset > size - nbytes), "lies outside its region"),
    )
    for wrong, what in wrongs:
        if wrong.any():
            row = int(wrong.argmax())
            raise PeerProtocolError(
                f"rows: the extent of layer {layer[row]} at {offset[row]} {what}"
            )
    return columns


def _after(wrong: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return what is wrong by row, from what is wrong by row after the first."""
    import numpy as np

    return np.concatenate((np.zeros(1, bool), wrong)) if len(wrong) else np.zeros(0, bool)
