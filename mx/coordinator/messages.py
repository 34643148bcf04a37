"""The wire messages of sources and their changes, each made once for all answers."""

from __future__ import annotations

from collections import OrderedDict

from mx import codec
from mx.core.changes import Change, ChangeKind
from mx.core.types import SourceRecord
from mx.wire.v1 import coordinator_pb2 as pb

#: The most changes whose messages are kept: watchers read each at about the same time.
_MAX_EVENTS = 2048

_KINDS = {
    ChangeKind.UP: pb.WatchEvent.KIND_SOURCE_UP,
    ChangeKind.CHANGED: pb.WatchEvent.KIND_SOURCE_CHANGED,
    ChangeKind.LAYERS: pb.WatchEvent.KIND_LAYERS,
    ChangeKind.GONE: pb.WatchEvent.KIND_SOURCE_GONE,
}


class SourceMessages:
    """The last messages of each source. Callers only read them, and copy them into answers."""

    def __init__(self) -> None:
        self._sources: dict[str, tuple[SourceRecord, pb.Source, int]] = {}
        # By the id() of the changed record, which the entry itself keeps alive.
        self._events: OrderedDict[
            int, tuple[SourceRecord, dict[tuple[ChangeKind, str], pb.WatchEvent]]
        ] = OrderedDict()

    def source(self, record: SourceRecord) -> pb.Source:
        """Return the message of a listed source; makes a new one if its record has changed."""
        return self.sized(record)[0]

    def sized(self, record: SourceRecord) -> tuple[pb.Source, int]:
        """Return the message of a listed source, and its size in bytes."""
        made = self._sources.get(record.source_id)
        if made is None or made[0] is not record:
            message = codec.source_to_wire(record)
            made = self._sources[record.source_id] = (record, message, message.ByteSize())
        return made[1:]

    def event(self, change: Change) -> pb.WatchEvent:
        """Return the message that watchers get for a change."""
        record = change.record
        _, events = self._events.setdefault(id(record), (record, {}))
        key = (change.kind, change.reason)
        event = events.get(key)
        if event is None:
            if change.kind is ChangeKind.GONE:
                source = codec.source_to_wire(record)
            else:
                source = self.source(record)
            event = events[key] = pb.WatchEvent(
                kind=_KINDS[change.kind], source=source, reason=change.reason
            )
            if len(self._events) > _MAX_EVENTS:
                self._events.popitem(last=False)
        return event

    def forget_all(self) -> None:
        """Drop the messages of all sources; those that are still listed are made anew."""
        self._sources.clear()

    def forget(self, source_id: str) -> None:
        """Drop the message of a source that is gone."""
        self._sources.pop(source_id, None)
