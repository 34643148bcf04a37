"""Reads the lists of a coordinator entry by entry: a malformed entry does not affect the others."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from mx.codec import bundle_from_wire, source_from_wire, source_id_from_wire
from mx.core.answers import BundleStatus
from mx.core.pull_status import PullStatus
from mx.core.reference import ModelReference
from mx.core.types import ModelKey, SourceRecord
from mx.core.variant import membership
from mx.errors import PeerProtocolError
from mx.units import count
from mx.wire.progress import pull_from_wire
from mx.wire.status import Remote
from mx.wire.v1 import common_pb2
from mx.wire.v1 import coordinator_pb2 as pb

_log = logging.getLogger(__name__)

_M = TypeVar("_M")
_T = TypeVar("_T")
#: The most different warnings: lists that are read repeatedly repeat their malformed entries.
_MAX_SAID = 64


class SourceStatus(NamedTuple):
    """A source as the coordinator lists it; `gb_per_s` is its recent rate."""

    record: SourceRecord
    lease_left_s: float
    readers: int
    gb_per_s: float

    def __repr__(self) -> str:
        """Return one line: what it serves, where, and its number of readers."""
        record = self.record
        return (
            f"<SourceStatus {record.model} at {record.endpoint}: {record.role.value}, "
            f"{record.state.value}, {count(self.readers, 'reader')}>"
        )


class Overview(NamedTuple):
    """The pulls and sources that a coordinator knew at one moment, oldest first."""

    pulls: tuple[PullStatus, ...]
    sources: tuple[SourceStatus, ...]

    def of(self, wanted: ModelReference) -> Overview:
        """Return those of one model; of pulls no pin is known."""
        return Overview(
            tuple(each for each in self.pulls if wanted.fits_key(each.model)),
            tuple(each for each in self.sources if wanted.fits(each.record.model, each.record.ref)),
        )


def bundle_status(message: pb.Bundle) -> BundleStatus:
    """Return the status that a message describes. Raises PeerProtocolError."""
    key = bundle_from_wire(
        common_pb2.ModelKey(name=message.name, revision=message.revision, variant=message.variant)
    )
    ranks = membership(key.variant).ranks
    missing = tuple(message.missing)
    fits = all(membership(each).bundle == key.variant for each in missing)
    if not (ranks == message.ranks >= message.missing_count >= len(missing) and fits):
        raise PeerProtocolError(f"{key} has {ranks} ranks, and its status contradicts that")
    return BundleStatus(
        key.name, key.revision, key.variant, ranks, missing, message.missing_count, message.named
    )


class Lists:
    """Reads the lists of one coordinator. Warns once of each malformed entry that it skips."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._said: set[tuple[str, str]] = set()

    def read(self, what: str, messages: Iterable[_M], decode: Callable[[_M], _T]) -> list[_T]:
        """Decode each message, and leave out those that `decode` refuses with PeerProtocolError.

        Args:
            what: The name of an entry in warnings, such as "source".
            messages: The entries.
            decode: Returns a decoded entry.
        """
        found = []
        for message in messages:
            try:
                found.append(decode(message))
            except PeerProtocolError as error:
                self._skipped(what, error.message)
        return found

    def _skipped(self, what: str, why: str) -> None:
        if (what, why) in self._said or len(self._said) >= _MAX_SAID:
            return
        self._said.add((what, why))
        text = " ".join(why.split())[:300]
        _log.warning(
            "skipped a %s that the coordinator at %s lists: %s", what, self._remote.address, text
        )


class WatchKind(enum.Enum):
    """The kind of an update; SNAPSHOT_END ends the list of what was there at first.

    NAMED says what a name without a revision means for all ranks of a bundle from now on. Until it
    comes the name means what it meant, whatever sources of other revisions are there. PULL is what
    a pull reports now, PULL_GONE that it reports no more; the others are of sources.
    """

    UP = pb.WatchEvent.KIND_SOURCE_UP
    CHANGED = pb.WatchEvent.KIND_SOURCE_CHANGED
    LAYERS = pb.WatchEvent.KIND_LAYERS
    GONE = pb.WatchEvent.KIND_SOURCE_GONE
    NAMED = pb.WatchEvent.KIND_NAMED
    PULL = pb.WatchEvent.KIND_PULL
    PULL_GONE = pb.WatchEvent.KIND_PULL_GONE
    SNAPSHOT_END = pb.WatchEvent.KIND_SNAPSHOT_END


class WatchUpdate(NamedTuple):
    """One update. `record` is of a source, `pull` of a PULL, and `pull_id` of a pull in any case;
    `reason` says why a source or a pull is gone, as far as there is more to say.

    `named` is for NAMED: the name, the revision ("" if it means nothing any more) and the bundle,
    in place of a variant.
    """

    kind: WatchKind
    record: SourceRecord | None = None
    reason: str = ""
    named: ModelKey | None = None
    pull: PullStatus | None = None
    pull_id: str = ""


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
    if kind in (WatchKind.PULL, WatchKind.PULL_GONE):
        pull = pull_from_wire(event.pull) if kind is WatchKind.PULL else None
        pull_id = source_id_from_wire(event.pull.pull_id)
        return WatchUpdate(kind, reason=event.reason, pull=pull, pull_id=pull_id)
    return WatchUpdate(kind, source_from_wire(event.source), event.reason)
