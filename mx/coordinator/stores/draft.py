"""What steps read and write before it is kept: copies of values, and what becomes of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from mx.core.answers import ListedSource
from mx.core.changes import Entry
from mx.core.name_state import NameState
from mx.core.store import CountedKind, FormerSource


@dataclass(frozen=True, slots=True)
class Renewal:
    """What a heartbeat says. `first`: none has come yet."""

    until_s: float
    readers: int
    gb_per_s: float
    first: bool


@dataclass(slots=True)
class Draft:
    """What a batch of steps has read and written.

    `names` and `sources` are copies that the steps may change, also of what they only read;
    `decided` and `put` say which ones they wrote. A dropped source and a forgotten tombstone are
    None. `expired` are the dropped sources whose leases had ended. `renewals` are of sources that
    are listed here first. `epoch` is a new one, until when it is in doubt, and the lowest number
    of its last entry. `refused`: the steps need what cannot be obtained now.
    """

    now: float = 0.0
    names: dict[str, NameState | None] = field(default_factory=dict)
    decided: dict[str, None] = field(default_factory=dict)
    sources: dict[str, ListedSource | None] = field(default_factory=dict)
    put: dict[str, None] = field(default_factory=dict)
    gone: dict[str, FormerSource | None] = field(default_factory=dict)
    due: set[str] = field(default_factory=set)
    expired: set[str] = field(default_factory=set)
    renewals: dict[str, Renewal] = field(default_factory=dict)
    counts: Counter[tuple[CountedKind, str]] = field(default_factory=Counter)
    entries: list[Entry] = field(default_factory=list)
    epoch: tuple[str, float, int] | None = None
    refused: bool = False

    @property
    def writes(self) -> bool:
        """True if there is something to keep."""
        return bool(self.decided or self.put or self.gone or self.entries or self.epoch)

    def written_names(self) -> dict[str, NameState | None]:
        """Return what the names have become; None: nothing is kept of it."""
        found = {}
        for name in self.decided:
            state = self.names[name]
            found[name] = None if state is None or state.empty else state
        return found

    def written_sources(self) -> dict[str, ListedSource | None]:
        """Return what the sources have become; None: it is no longer listed."""
        return {source_id: self.sources[source_id] for source_id in self.put}
