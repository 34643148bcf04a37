"""Sources as messages, made once for all answers that name them."""

from __future__ import annotations

from mx import codec
from mx.core.types import SourceRecord
from mx.wire.v1 import coordinator_pb2 as pb


class SourceMessages:
    """The last message of each source. To be read only: answers copy it."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[SourceRecord, int, pb.Source]] = {}

    def of(self, record: SourceRecord, row_count: int) -> pb.Source:
        """The message of a source that is listed; made anew where its record is another one."""
        made = self._made.get(record.source_id)
        if made is None or made[0] is not record or made[1] != row_count:
            message = codec.source_to_wire(record, row_count=row_count)
            made = self._made[record.source_id] = (record, row_count, message)
        return made[2]

    def forget(self, source_id: str) -> None:
        """The source is gone."""
        self._made.pop(source_id, None)
