"""The updates that a watch of the coordinator yields."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from mx.codec import bundle_from_wire, source_from_wire
from mx.core.types import ModelKey, SourceRecord
from mx.errors import PeerProtocolError
from mx.wire.v1 import coordinator_pb2 as pb


class WatchKind(enum.Enum):
    """The kind of an update; SNAPSHOT_END ends the list of what was there at first.

    NAMED says what a name without a revision means for all ranks of a bundle from now on. Until it
    comes the name means what it meant, whatever sources of other revisions are there.
    """

    UP = pb.WatchEvent.KIND_SOURCE_UP
    CHANGED = pb.WatchEvent.KIND_SOURCE_CHANGED
    LAYERS = pb.WatchEvent.KIND_LAYERS
    GONE = pb.WatchEvent.KIND_SOURCE_GONE
    NAMED = pb.WatchEvent.KIND_NAMED
    SNAPSHOT_END = pb.WatchEvent.KIND_SNAPSHOT_END


@dataclass(frozen=True, slots=True)
class WatchUpdate:
    """One update. `record` is None for SNAPSHOT_END and NAMED; `reason` says why a source is GONE.

    `named` is for NAMED: the name, the revision ("" if it means nothing any more) and the bundle,
    in place of a variant.
    """

    kind: WatchKind
    record: SourceRecord | None = None
    reason: str = ""
    named: ModelKey | None = None


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
    if kind is WatchKind.NAMED:
        return WatchUpdate(kind, named=bundle_from_wire(event.named))
    return WatchUpdate(kind, source_from_wire(event.source), event.reason)
