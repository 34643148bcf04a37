"""What one watcher has yet to be told: the latest state of each source, nothing older."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence

from mx.core.membership import Change, ChangeKind
from mx.core.types import SourceRecord

INTERVAL_S = 0.1  # at most ten batches a second, each source at most once in each


class Watcher:
    """Bounded by the number of sources, however slowly the watcher reads."""

    def __init__(self, name: str, revision: str, known: Iterable[SourceRecord]) -> None:
        self._name = name
        self._revision = revision
        self._pending: dict[str, Change] = {}
        self._told = {record.source_id for record in known if self.wants(record)}
        self.woken = asyncio.Event()

    def wants(self, record: SourceRecord) -> bool:
        model = record.model
        return self._name in ("", model.name) and self._revision in ("", model.revision)

    def push(self, changes: Sequence[Change]) -> None:
        """Note changes; of several of one source the last one counts."""
        for change in changes:
            source_id = change.record.source_id
            if not self.wants(change.record):
                if source_id not in self._told and source_id not in self._pending:
                    continue
                # It was ours, and has moved to a name that is not.
                before = change.before or change.record
                change = Change(ChangeKind.GONE, before, before, change.reason or "replaced")
            earlier = self._pending.pop(source_id, None)
            if earlier is not None and change.kind is ChangeKind.LAYERS:
                kind = ChangeKind.LAYERS if earlier.kind is ChangeKind.LAYERS else earlier.kind
                change = Change(kind, change.record, change.before)
            self._pending[source_id] = change
            self.woken.set()

    def drain(self) -> Iterator[Change]:
        """What to tell now, in order; afterwards it counts as told."""
        pending, self._pending = self._pending, {}
        self.woken.clear()
        for source_id, change in pending.items():
            told = source_id in self._told
            if change.kind is ChangeKind.GONE:
                if told:
                    self._told.discard(source_id)
                    yield change
            elif not told:
                self._told.add(source_id)
                yield Change(ChangeKind.UP, change.record)
            elif change.kind is ChangeKind.UP:
                yield Change(ChangeKind.CHANGED, change.record)
            else:
                yield change
