"""What watchers have yet to be told: the latest state of each source, kept once for all of them.

A watcher has a position in the log of changes and a bit for each source that it was told of, and
no copy of anything: one that does not read costs the same however much happens meanwhile.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mx.core.registry import Change, ChangeKind
from mx.core.topology import Place
from mx.core.types import AddressTable, SourceRecord
from mx.errors import CapacityError

INTERVAL_S = 0.1  # at most ten batches a second, each source at most once in each
#: Sources that are gone and that are kept for watchers that have yet to hear of it.
MAX_GONE = 10_000
_NOWHERE = Place()


@dataclass(slots=True)
class _Entry:
    """One source's last change. `seq` counts changes over all sources, `changed_seq` leaves out
    those of its layers alone; `slot` is its bit. `left` is what it was before it last moved to
    another model's key."""

    change: Change
    seq: int
    changed_seq: int
    slot: int
    left: SourceRecord | None = None


class WatchLog:
    """The last change of each source, in order, for any number of watchers."""

    def __init__(self, max_gone: int = MAX_GONE) -> None:
        self.latest = 0
        #: Changes up to here may be missing: of sources that are gone.
        self.forgotten = 0
        self._max_gone = max_gone
        self._entries: dict[str, _Entry] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._seqs: list[int] = []
        self._ids: list[str] = []
        self._free_slots: list[int] = []
        self._slots = 0

    def push(self, changes: Sequence[Change]) -> None:
        """Note changes; of several of one source the last one counts."""
        for change in changes:
            source_id = change.record.source_id
            self.latest += 1
            entry = self._entries.get(source_id)
            if entry is None:
                entry = self._entries[source_id] = _Entry(change, 0, 0, self._new_slot())
            before = change.before
            if before is not None and before.model != change.record.model:
                entry.left = _slim(before)
            if change.kind is not ChangeKind.LAYERS:
                entry.changed_seq = self.latest
            self._gone.pop(source_id, None)
            if change.kind is ChangeKind.GONE:
                slim = _slim(change.record)
                change = Change(ChangeKind.GONE, slim, slim, change.reason)
                self._gone[source_id] = None
            entry.change, entry.seq = change, self.latest
            self._seqs.append(self.latest)
            self._ids.append(source_id)
        while len(self._gone) > self._max_gone:
            source_id, _ = self._gone.popitem(last=False)
            entry = self._entries.pop(source_id)
            self.forgotten = max(self.forgotten, entry.seq)
            self._free_slots.append(entry.slot)
        if len(self._ids) > 2 * len(self._entries) + 64:
            self._compact()

    def after(self, seq: int, limit: int) -> list[_Entry]:
        """The sources that have changed after `seq`, the longest ago first, at most `limit`."""
        found: list[_Entry] = []
        for index in range(bisect_right(self._seqs, seq), len(self._seqs)):
            entry = self._entries.get(self._ids[index])
            if entry is not None and entry.seq == self._seqs[index]:
                found.append(entry)
                if len(found) == limit:
                    break
        return found

    def _new_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        self._slots += 1
        return self._slots - 1

    def _compact(self) -> None:
        live = sorted((entry.seq, source_id) for source_id, entry in self._entries.items())
        self._seqs = [seq for seq, _ in live]
        self._ids = [source_id for _, source_id in live]


class Watcher:
    """One watcher's place in a log. `woken` is set by its owner when there may be news."""

    def __init__(self, log: WatchLog, name: str = "", revision: str = "") -> None:
        self.name = name
        self._revision = revision
        self._log = log
        self._began = log.latest
        self._seq = 0
        self._told = bytearray()
        self.woken = asyncio.Event()

    @property
    def behind(self) -> bool:
        """Return True while there is something that `take` has not looked at."""
        return self._seq < self._log.latest

    def take(self, limit: int) -> list[Change]:
        """What to tell next, in order; it counts as told. Looks at `limit` sources at most, so
        the list may be empty while the watcher is still `behind`.

        Raises:
            CapacityError: the watcher has read so slowly that something it was to be told is
                no longer kept.
        """
        if self._log.forgotten > max(self._began, self._seq):
            raise CapacityError("this watch was read too slowly", hint="watch again")
        entries = self._log.after(self._seq, limit)
        found = [change for entry in entries if (change := self._news(entry)) is not None]
        self._seq = entries[-1].seq if len(entries) == limit else self._log.latest
        return found

    def _wants(self, record: SourceRecord) -> bool:
        model = record.model
        return self.name in ("", model.name) and self._revision in ("", model.revision)

    def _news(self, entry: _Entry) -> Change | None:
        change, told = entry.change, self._is_told(entry.slot)
        if change.kind is ChangeKind.GONE:
            self._tell(entry.slot, False)
            return change if told else None
        if not self._wants(change.record):
            # It was ours, and has moved to a name that is not.
            self._tell(entry.slot, False)
            before = entry.left or change.record
            return Change(ChangeKind.GONE, before, before, "replaced") if told else None
        self._tell(entry.slot, True)
        if not told:
            return Change(ChangeKind.UP, change.record, None, "", change.row_count)
        only_layers = entry.changed_seq <= self._seq
        kind = ChangeKind.LAYERS if only_layers else ChangeKind.CHANGED
        return replace(change, kind=kind)

    def _is_told(self, slot: int) -> bool:
        return slot >> 3 < len(self._told) and bool(self._told[slot >> 3] >> (slot & 7) & 1)

    def _tell(self, slot: int, told: bool) -> None:
        if told:
            self._told.extend(bytes(max(0, (slot >> 3) + 1 - len(self._told))))
            self._told[slot >> 3] |= 1 << (slot & 7)
        elif slot >> 3 < len(self._told):
            self._told[slot >> 3] &= ~(1 << (slot & 7))


def _slim(record: SourceRecord) -> SourceRecord:
    """What is kept of a source that is gone: who it was, and of what."""
    table = AddressTable(record.table.layout_digest, ())
    return replace(record, place=_NOWHERE, table=table)
