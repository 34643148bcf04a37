"""The updates that a watch of the coordinator yields."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from mx.codec import source_from_wire
from mx.core.types import SourceRecord
from mx.errors import PeerProtocolError
from mx.wire.v1 import coordinator_pb2 as pb


class WatchKind(enum.Enum):
    """The kind of an update; SNAPSHOT_END ends the list of what was there at first."""

    UP = pb.WatchEvent.KIND_SOURCE_UP
    CHANGED = pb.WatchEvent.KIND_SOURCE_CHANGED
    LAYERS = pb.WatchEvent.KIND_LAYERS
    GONE = pb.WatchEvent.KIND_SOURCE_GONE
    SNAPSHOT_END = pb.WatchEvent.KIND_SNAPSHOT_END


@dataclass(frozen=True, slots=True)
class WatchUpdate:
    """One update. `record` is None for SNAPSHOT_END only; `reason` says why a source is GONE."""

    kind: WatchKind
    record: SourceRecord | None = None
    reason: str = ""


def update_from_wire(event: pb.WatchEvent) -> WatchUpdate:
    """Return the update that a message describes.

    Raises:
        PeerProtocolError: The message is not valid.
    """
    try:
        kind = WatchKind(event.kind)
    except ValueError:
        raise PeerProtocolError(f"a watch event of kind {event.kind}") from None
    if kind is WatchKind.SNAPSHOT_END:
        return WatchUpdate(kind, None, event.reason)
    return WatchUpdate(kind, source_from_wire(event.source), event.reason)
