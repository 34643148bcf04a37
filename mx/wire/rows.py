"""The rows of a scattered source's table, sent in pages and checked on arrival."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import grpc.aio

from mx.core.types import AddressTable, SourceRecord, TableRow
from mx.errors import PeerProtocolError
from mx.wire.channel import Remote, translating
from mx.wire.rpc import Stub
from mx.wire.v1 import common_pb2 as pb
from mx.wire.v1 import peer_pb2

#: Few enough that checking a page does not hold up the event loop.
ROWS_PER_PAGE = 16_384
_U64 = 1 << 64


def rows_to_wire(rows: Sequence[TableRow]) -> Iterator[pb.TableRows]:
    """Yield the rows in pages that stay below the default message limit."""
    for first in range(0, len(rows), ROWS_PER_PAGE):
        page = rows[first : first + ROWS_PER_PAGE]
        yield pb.TableRows(
            layer=[row.layer for row in page],
            offset=[row.offset for row in page],
            nbytes=[row.nbytes for row in page],
            region=[row.region for row in page],
            region_offset=[row.region_offset for row in page],
        )


async def fetch_table(
    channel: grpc.aio.Channel,
    source: SourceRecord,
    *,
    most_rows: int,
    who: Remote,
    timeout_s: float = 30.0,
) -> AddressTable:
    """Return a source's table with the rows that the source itself gives.

    Args:
        channel: A channel to the source.
        source: The source, as the coordinator or it itself has described it.
        most_rows: The most rows to accept: a source needs one for each tensor.
        who: The process at the channel's other end.
        timeout_s: The deadline.

    Raises:
        PeerProtocolError: A row is not valid, or there are too many.
        PeerRefusedError: The process serves no such source.
        MxError: As `translate`, if the RPC fails.
    """
    if not source.table.scattered:
        return source.table
    decoder = RowsDecoder(source.table, most_rows)
    rows: list[TableRow] = []
    stub = Stub(channel, peer_pb2.DESCRIPTOR.services_by_name["Peer"], who)
    stream = stub.Table(peer_pb2.TableRequest(source_id=source.source_id), timeout=timeout_s)
    try:
        with translating(who):
            async for page in stream:
                rows += decoder.feed(page)
    finally:
        stream.cancel()
    return replace(source.table, rows=tuple(rows))


class RowsDecoder:
    """Checks the pages of one table's rows in order.

    Rows must be ascending by (layer, offset), must not overlap, and must stay inside regions
    without layers of their own.
    """

    def __init__(self, table: AddressTable, expected: int) -> None:
        """
        Args:
            table: The table without its rows.
            expected: The announced number of rows.
        """
        self._sizes = [-1 if region.layers else region.nbytes for region in table.regions]
        self._expected = expected
        self._count = 0
        self._layer = 0
        self._end = 0

    def check(self, page: pb.TableRows) -> int:
        """Check a page, and return the number of its rows.

        Raises:
            PeerProtocolError: A row is not valid, or there are more than announced.
        """
        columns = (page.layer, page.offset, page.nbytes, page.region, page.region_offset)
        count = len(page.layer)
        if count > ROWS_PER_PAGE:
            raise PeerProtocolError(f"rows: {count} in one message, more than {ROWS_PER_PAGE}")
        if any(len(column) != count for column in columns):
            raise PeerProtocolError("rows: the columns differ in length")
        if self._count + count > self._expected:
            raise PeerProtocolError(f"rows: more than the {self._expected} announced")
        sizes, last_layer, last_end = self._sizes, self._layer, self._end
        for layer, offset, nbytes, region, region_offset in zip(*columns, strict=True):
            if layer != last_layer:
                if layer < last_layer:
                    raise self._wrong(layer, offset, "is out of order")
                last_layer, last_end = layer, 0
            if offset < last_end:
                raise self._wrong(layer, offset, "is out of order or overlaps")
            last_end = offset + nbytes
            if not nbytes or last_end > _U64:
                raise self._wrong(layer, offset, f"has {nbytes} bytes")
            if region >= len(sizes) or sizes[region] < 0:
                raise self._wrong(layer, offset, f"names region {region}, which takes no rows")
            if region_offset + nbytes > sizes[region]:
                raise self._wrong(layer, offset, f"lies outside region {region}")
        self._layer, self._end = last_layer, last_end
        self._count += count
        return count

    def feed(self, page: pb.TableRows) -> list[TableRow]:
        """Check a page, and return its rows.

        Raises:
            PeerProtocolError: As `check`.
        """
        self.check(page)
        columns = (page.layer, page.offset, page.nbytes, page.region, page.region_offset)
        return [TableRow(*row) for row in zip(*columns, strict=True)]

    def finish(self) -> None:
        """Check that all rows have come.

        Raises:
            PeerProtocolError: There were fewer rows than announced.
        """
        if self._count != self._expected:
            raise PeerProtocolError(f"rows: {self._count} of {self._expected} were sent")

    @staticmethod
    def _wrong(layer: int, offset: int, what: str) -> PeerProtocolError:
        return PeerProtocolError(f"rows: the extent of layer {layer} at {offset} {what}")
