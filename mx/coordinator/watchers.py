"""The changes that watchers have not seen yet: the latest state of each row, kept once for all.

A row is what a replica serves, as a source, or what it receives, as a pull that reports. A watcher
has a position in the log of changes and a bit for each row that it has seen, and no copy of any
change: a watcher that does not read costs the same however much changes meanwhile.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from mx.core.changes import Change, ChangeKind, NameMeaning, PullChange
from mx.core.pull_status import PullStatus
from mx.core.topology import Place
from mx.core.types import AddressTable, SourceRecord
from mx.errors import CapacityError

INTERVAL_S = 0.1  # at most ten batches a second, each row at most once in each
#: The most ended rows that are kept for watchers that have not seen their end yet.
MAX_GONE = 10_000
_NOWHERE = Place()

AnyChange = Change | PullChange
#: Says of which models a watcher sees the sources, or the pulls.
Sees = Callable[[str], bool]


@dataclass(slots=True)
class _LastChange:
    """One row's last change.

    `seq` is the number of that change over all rows; `changed_seq` is that of the last one that was
    not of its layers alone. `slot` is the row's bit. `left` is what it was before it last moved to
    another model's key.
    """

    change: AnyChange
    seq: int
    changed_seq: int
    slot: int
    left: SourceRecord | PullStatus | None = None


class WatchLog:
    """The last change of each row, in order, for any number of watchers."""

    def __init__(self, max_gone: int = MAX_GONE) -> None:
        self.latest = 0
        #: The last change of a source.
        self.latest_source = 0
        #: Changes up to this number may be missing: those of rows that are gone.
        self.forgotten = 0
        self._max_gone = max_gone
        self._entries: dict[str, _LastChange] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._seqs: list[int] = []
        self._ids: list[str] = []
        self._free_slots: list[int] = []
        self._slots = 0
        self._watchers: dict[str, set[Watcher]] = {}  # by the name that they watch

    def push(self, changes: Sequence[AnyChange], *, begins_again: bool = False) -> None:
        """Record changes, and wake who watches them. Of several changes of one row only the last
        one is kept.

        Args:
            changes: The changes.
            begins_again: They are all sources that there are: the others are gone.
        """
        if begins_again:
            there = {change.row_id for change in changes}
            lost = [
                _gone(entry.change, "lost")
                for row_id, entry in self._entries.items()
                if isinstance(entry.change, Change)
                and row_id not in there
                and row_id not in self._gone
            ]
            changes = [*lost, *changes]
        names = set()
        for change in changes:
            row_id, name = change.row_id, change.record.model.name
            self.latest += 1
            entry = self._entries.get(row_id)
            if entry is None:
                entry = self._entries[row_id] = _LastChange(change, 0, 0, self._new_slot())
            before = change.before
            if before is not None and before.model != change.record.model:
                entry.left = _slim(before)
                names.add(before.model.name)
            if change.kind is not ChangeKind.LAYERS:
                entry.changed_seq = self.latest
            self._gone.pop(row_id, None)
            if change.kind is ChangeKind.GONE:
                change = _gone(change, change.reason)
                self._gone[row_id] = None
            if isinstance(change, Change):
                self.latest_source = self.latest
            entry.change, entry.seq = change, self.latest
            self._seqs.append(self.latest)
            self._ids.append(row_id)
            names.add(name)
        while len(self._gone) > self._max_gone:
            row_id, _ = self._gone.popitem(last=False)
            entry = self._entries.pop(row_id)
            self.forgotten = max(self.forgotten, entry.seq)
            self._free_slots.append(entry.slot)
        if len(self._ids) > 2 * len(self._entries) + 64:
            self._compact()
        self.wake(None if begins_again else names)

    @contextmanager
    def watching(self, watcher: Watcher) -> Iterator[None]:
        """Wake a watcher at each change of what it watches, while the block runs."""
        watchers = self._watchers.setdefault(watcher.name, set())
        watchers.add(watcher)
        try:
            yield
        finally:
            watchers.discard(watcher)
            if not watchers and self._watchers.get(watcher.name) is watchers:
                del self._watchers[watcher.name]

    def wake(self, names: Iterable[str] | None = None) -> None:
        """Wake the watchers of models of these names, and those of all; None: all watchers."""
        for name in self._watchers if names is None else {"", *names}:
            for watcher in self._watchers.get(name, ()):
                watcher.woken.set()

    def after(self, seq: int, limit: int) -> list[_LastChange]:
        """Return the rows that have changed after `seq`, the oldest change first, at most
        `limit`."""
        found: list[_LastChange] = []
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
        live = sorted((entry.seq, row_id) for row_id, entry in self._entries.items())
        self._seqs = [seq for seq, _ in live]
        self._ids = [row_id for _, row_id in live]


class MeantLog:
    """What each name means for each bundle now, and the order in which that changed last."""

    def __init__(self) -> None:
        self.latest = 0
        self._meant: OrderedDict[tuple[str, str], tuple[int, NameMeaning]] = OrderedDict()

    def push(self, meant: Sequence[NameMeaning], *, begins_again: bool = False) -> None:
        """Record changes. What means nothing any more is kept no longer than `MAX_GONE` of its
        kind, for watchers that have not seen its end yet.

        Args:
            meant: The changes.
            begins_again: They are all that names mean: other names mean nothing any more.
        """
        if begins_again:
            there = {(each.name, each.bundle) for each in meant}
            meant = [*(NameMeaning(*key, "") for key in self._meant if key not in there), *meant]
        for each in meant:
            self.latest += 1
            key = (each.name, each.bundle)
            self._meant[key] = self.latest, each
            self._meant.move_to_end(key)
        if meant and len(self._meant) > MAX_GONE:
            ended = [key for key, (_, each) in self._meant.items() if not each.revision]
            for key in ended[: len(self._meant) - MAX_GONE]:
                del self._meant[key]

    def after(self, seq: int) -> list[NameMeaning]:
        """Return the changes after `seq`, the oldest first."""
        found = []
        for number, each in reversed(self._meant.values()):
            if number <= seq:
                break
            found.append(each)
        return found[::-1]


class Watcher:
    """One watcher's position in a log. `woken` is set when there may be changes."""

    def __init__(
        self,
        log: WatchLog,
        name: str = "",
        revision: str = "",
        sees: Sees = lambda model: True,
        observes: Sees = lambda model: False,
    ) -> None:
        """
        Args:
            log: The log.
            name: The model; "" for all.
            revision: The revision; "" for all.
            sees: Says of which models it is told the sources, and what names mean.
            observes: Says of which models it is told the pulls.
        """
        self.name = name
        self._sees, self._observes = sees, observes
        self._revision = revision
        self._log = log
        self._began = log.latest
        self._seq = 0
        self._sent = bytearray()
        self._meant_seq = 0
        self._known = 0
        self.woken = asyncio.Event()

    @property
    def behind(self) -> bool:
        """True while there are changes that `take` has not examined."""
        return self.is_before(self._log.latest)

    def is_before(self, seq: int) -> bool:
        """Return True while there are changes up to number `seq` of the log that `take` has not
        examined."""
        return self._seq < seq

    def look_again(self) -> None:
        """Examine all rows again: what `sees` or `observes` says of them has changed."""
        self._began = max(self._began, self._seq)
        self._known, self._seq, self._meant_seq = self._seq, 0, 0

    def take(self, limit: int) -> list[AnyChange]:
        """Return the next changes for the watcher, in order.

        Args:
            limit: The most rows to examine. The list may be empty while the watcher is still
                `behind`.

        Raises:
            CapacityError: The watcher has read so slowly that a change it needs is no longer kept.
        """
        if self._log.forgotten > max(self._began, self._seq):
            raise CapacityError("this watch was read too slowly", hint="watch again")
        entries = self._log.after(self._seq, limit)
        found = [change for entry in entries if (change := self._news(entry)) is not None]
        self._seq = entries[-1].seq if len(entries) == limit else self._log.latest
        return found

    def take_meant(self, log: MeantLog) -> list[NameMeaning]:
        """Return what names have come to mean since the last call; at first, what they mean. A
        watcher of one revision wants none of it."""
        if self._meant_seq == log.latest or self._revision:
            return []
        begins, seq = not self._meant_seq, self._meant_seq
        self._meant_seq = log.latest
        return [
            each
            for each in log.after(seq)
            if self.name in ("", each.name)
            and (each.revision or not begins)
            and self._sees(each.name)
        ]

    def _wants(self, record: SourceRecord | PullStatus) -> bool:
        model = record.model
        wanted = self.name in ("", model.name) and self._revision in ("", model.revision)
        return wanted and self._may_see(record)

    def _may_see(self, record: SourceRecord | PullStatus) -> bool:
        sees = self._observes if isinstance(record, PullStatus) else self._sees
        return sees(record.model.name)

    def _news(self, entry: _LastChange) -> AnyChange | None:
        change, sent = entry.change, self._is_sent(entry.slot)
        if change.kind is ChangeKind.GONE:
            self._set_sent(entry.slot, False)
            return change if sent else None
        if not self._wants(change.record):
            # The watcher may have seen it before it moved to a name that is not watched.
            self._set_sent(entry.slot, False)
            before: Any = entry.left or change.record
            reason = "replaced" if self._may_see(before) else "the policy hides it"
            return _gone(replace(change, record=before), reason) if sent else None
        self._set_sent(entry.slot, True)
        if not sent:
            return replace(change, kind=ChangeKind.UP, before=None, reason="")
        if entry.seq <= self._known:
            return None
        only_layers = entry.changed_seq <= max(self._seq, self._known)
        kind = ChangeKind.LAYERS if only_layers else ChangeKind.CHANGED
        return replace(change, kind=kind)

    def _is_sent(self, slot: int) -> bool:
        return slot >> 3 < len(self._sent) and bool(self._sent[slot >> 3] >> (slot & 7) & 1)

    def _set_sent(self, slot: int, sent: bool) -> None:
        if sent:
            self._sent.extend(bytes(max(0, (slot >> 3) + 1 - len(self._sent))))
            self._sent[slot >> 3] |= 1 << (slot & 7)
        elif slot >> 3 < len(self._sent):
            self._sent[slot >> 3] &= ~(1 << (slot & 7))


def _gone(change: AnyChange, reason: str) -> AnyChange:
    """Return the end of a change's row."""
    slim = _slim(change.record)
    return replace(change, kind=ChangeKind.GONE, record=slim, before=slim, reason=reason)


def _slim(record: SourceRecord | PullStatus) -> Any:
    """Return what is kept of a row that is gone: its id, its model and its address."""
    if isinstance(record, PullStatus):
        return record._replace(ready=0, sources=())
    table = AddressTable(record.table.layout_digest, ())
    return replace(record, place=_NOWHERE, table=table)
