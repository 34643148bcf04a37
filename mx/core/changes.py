"""What changes at a coordinator, as entries of the stream that watchers read."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from mx.core.pull_status import PullStatus
from mx.core.types import ManifestRef, SourceRecord


class ChangeKind(enum.Enum):
    UP = "up"
    CHANGED = "changed"
    LAYERS = "layers"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Change:
    """One change of one source.

    `before` is its record until now (None: it was not listed), `record` the one from now on. If
    the source is GONE, both are its last record, and `reason` says why. `address` is where a source
    that is UP has registered from.
    """

    kind: ChangeKind
    record: SourceRecord
    before: SourceRecord | None = None
    reason: str = ""
    address: str = ""

    @property
    def row_id(self) -> str:
        """What tells the rows of all sources and pulls apart."""
        return self.record.source_id


@dataclass(frozen=True, slots=True)
class PullChange:
    """One change of one pull that reports, as `Change`. It is in no stream: pulls are not kept."""

    kind: ChangeKind
    record: PullStatus
    before: PullStatus | None = None
    reason: str = ""

    @property
    def row_id(self) -> str:
        """As `Change.row_id`: a pull has the id of a source where it is one as well."""
        return f"pull {self.record.pull_id}"


@dataclass(frozen=True, slots=True)
class NameMeaning:
    """The revision that NAME means for the ranks of a bundle; "" if none is bound any more."""

    name: str
    bundle: str
    revision: str


@dataclass(frozen=True, slots=True)
class AnswerChange:
    """A manifest that names have come to be answered with, or, if not `held`, no longer are."""

    ref: ManifestRef
    held: bool


Entry = Change | NameMeaning | AnswerChange


@dataclass(frozen=True, slots=True)
class Tail:
    """The entries of the stream after a place in it, by kind, each in order.

    If the stream no longer has them all it `begins_again`: then the entries say what there is, and
    what they do not name is gone.
    """

    latest: int
    changes: Sequence[Change]
    meant: Sequence[NameMeaning]
    answered: Sequence[AnswerChange]
    begins_again: bool = False
