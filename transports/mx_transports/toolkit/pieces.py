"""Pieces of a source's regions: as requests name them, and where they lie in memory.

In a request each is region u32, offset u64, nbytes u64, big-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from itertools import starmap

from mx.errors import LocalError
from mx.transport import DeviceView, Piece, ScatteredView, Span, View, spans_of

PIECE = struct.Struct("!IQQ")
MAX_PIECES = 1 << 16
#: A reader requests a chunk at a time, whose tensors are no more than this.
MAX_SPANS = 1 << 17


def encode_request(head: struct.Struct, fields: tuple[int, ...], pieces: Iterable[Piece]) -> bytes:
    """Return a request: its head, and a table of pieces, of which adjacent ones travel as one.

    Args:
        head: The format of the head, which ends with the number of pieces.
        fields: The head's other fields.
        pieces: The pieces, which lie within the source's regions.

    Raises:
        LocalError: There are more pieces than a request holds.
    """
    merged: list[tuple[int, int, int]] = []
    last, begin, end = -1, 0, -1  # the region and the place of the last one
    for piece in pieces:
        offset, nbytes = piece.region_offset, len(piece.view)
        if offset == end and piece.region == last:
            end += nbytes
            merged[-1] = last, begin, end - begin
        else:
            last, begin, end = piece.region, offset, offset + nbytes
            merged.append((last, offset, nbytes))
    if len(merged) > MAX_PIECES:
        raise LocalError(f"{len(merged)} pieces in one read are more than {MAX_PIECES}")
    return head.pack(*fields, len(merged)) + b"".join(starmap(PIECE.pack, merged))


def find_piece(
    views: Mapping[int, View], region: int, offset: int, nbytes: int
) -> list[Span] | None:
    """Return the memory of `nbytes` bytes of a region, in order; None if the region does not have
    them.

    A region that lies in one place gives one span, a scattered one a span for each place.

    Args:
        views: The regions.
        region: The key of a region, which may be unknown.
        offset: Where the bytes begin in it.
        nbytes: How many bytes.
    """
    view = views.get(region)
    if view is None or offset + nbytes > len(view):
        return None
    try:
        return spans_of(view[offset : offset + nbytes])
    except LocalError:  # it reaches into a hole
        return None


def find_table(views: Mapping[int, View], table: memoryview) -> list[Span] | None:
    """Return the memory of all pieces of a table; None if one has none, or is in too many
    places."""
    spans: list[Span] = []
    for piece in PIECE.iter_unpack(table):
        found = find_piece(views, *piece)
        if found is None or len(spans) + len(found) > MAX_SPANS:
            return None
        spans += found
    return spans


def devices_of(view: View) -> set[str]:
    """Return the GPUs that a view has memory on."""
    if isinstance(view, ScatteredView) and view.places() is not None:
        return set()  # it is known to be in host memory
    spans = view.located()[1] if isinstance(view, ScatteredView) else [view]
    return {span.device for span in spans if isinstance(span, DeviceView)}
