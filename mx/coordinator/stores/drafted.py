"""The verbs of a store whose steps run over a draft.

Steps read copies, and what they write takes effect in memory only when it has been kept. So readers
see what is kept, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from mx.coordinator.stores.draft import Draft, Renewal
from mx.coordinator.stores.encoding import copied
from mx.core.answers import ListedSource
from mx.core.changes import Entry
from mx.core.memory_store import MemoryStore
from mx.core.name_state import NameState
from mx.core.store import CountedKind, FormerSource
from mx.errors import MxError


class DraftedStore(MemoryStore):
    """The state in memory, and the draft that steps run over."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self._draft: Draft | None = None
        #: Why nothing can be kept now; None if it can. Time ends nothing meanwhile.
        self._trouble: MxError | None = None
        #: Documents that are to be kept, or no longer, with the next commit.
        self._fresh: dict[bytes, bytes] = {}
        self._dropped: set[bytes] = set()

    @property
    def _written(self) -> Draft:
        """The draft of the steps that run: nothing else writes."""
        assert self._draft is not None
        return self._draft

    def name(self, name: str) -> NameState | None:
        draft = self._draft
        if draft is None:
            return self._names.get(name)
        if name not in draft.names:
            draft.names[name] = copied(self._names.get(name))
        state = draft.names[name]
        return None if state is None or (name in draft.decided and state.empty) else state

    def names(self) -> Iterable[NameState]:
        draft = self._draft
        if draft is None or not draft.decided:
            return self._names.values()
        return [s for s in ({**self._names, **draft.written_names()}).values() if s is not None]

    def decide(self, state: NameState) -> None:
        draft = self._written
        draft.names[state.name] = state
        draft.decided[state.name] = None

    def due_names(self, now: float) -> Sequence[str]:
        draft = self._draft
        if self._trouble is not None:
            return ()
        found = []
        if now >= self._next_due_s:
            found = [name for name, due_s in self._due.items() if due_s <= now]
            self._next_due_s = min(self._due.values(), default=math.inf)
        if draft is not None and draft.decided:
            found = [name for name in found if name not in draft.decided]
            written = draft.written_names().items()
            found += [name for name, state in written if state is not None and state.due_s <= now]
        return found

    def source(self, source_id: str) -> ListedSource | None:
        draft = self._draft
        if draft is None:
            return self._sources.get(source_id)
        if source_id not in draft.sources:
            draft.sources[source_id] = copied(self._sources.get(source_id))
        return draft.sources[source_id]

    def sources(self) -> Iterable[ListedSource]:
        draft = self._draft
        if draft is None or not draft.put:
            return self._sources.values()
        return [s for s in ({**self._sources, **draft.written_sources()}).values() if s is not None]

    def put_source(self, listed: ListedSource) -> None:
        draft = self._written
        source_id = listed.record.source_id
        was = self.source(source_id)
        if was is not None:
            listed.lease_until_s = was.lease_until_s
            listed.readers, listed.gb_per_s = was.readers, was.gb_per_s
        draft.sources[source_id] = listed
        draft.put[source_id] = None

    def renew(
        self, source_id: str, until_s: float, readers: int, gb_per_s: float, *, first: bool = False
    ) -> None:
        said = Renewal(until_s, readers, gb_per_s, first)
        if source_id in self._sources:
            self._renew_kept(source_id, said)
        draft = self._draft
        if draft is None:
            return
        draft.renewals[source_id] = said
        listed = draft.sources.get(source_id)
        if listed is not None:
            listed.lease_until_s, listed.readers, listed.gb_per_s = until_s, readers, gb_per_s

    def _renew_kept(self, source_id: str, said: Renewal) -> None:
        super().renew(source_id, said.until_s, said.readers, said.gb_per_s, first=said.first)

    def due_sources(self, now: float) -> Sequence[str]:
        draft = self._draft
        if self._trouble is not None:
            return ()
        found = [each for each in super().due_sources(now) if self._has_ended(each)]
        if draft is not None and found:
            found = [each for each in found if draft.sources.get(each, each) is not None]
            draft.due.update(found)
        return found

    def _has_ended(self, source_id: str) -> bool:
        """Return True if the lease of a source that is due has ended everywhere."""
        del source_id
        return True

    def drop(self, source_id: str) -> None:
        draft = self._written
        self.source(source_id)
        draft.sources[source_id] = None
        draft.put[source_id] = None
        draft.renewals.pop(source_id, None)
        if source_id in draft.due:
            draft.expired.add(source_id)

    def _drop_kept(self, source_id: str) -> None:
        super().drop(source_id)

    def gone(self, source_id: str) -> FormerSource | None:
        draft = self._draft
        if draft is None:
            return super().gone(source_id)
        found = draft.gone.get(source_id, self._gone.get(source_id))
        return found if found is not None and found.until_s > draft.now else None

    def bury(self, source_id: str, gone: FormerSource, most: int) -> None:
        draft = self._written
        excess = len(self._gone) + sum(1 if g else -1 for g in draft.gone.values()) + 1 - most
        for each in self._gone if excess > 0 else ():
            if excess > 0 and each not in draft.gone:
                draft.gone[each] = None
                excess -= 1
        draft.gone[source_id] = gone

    def forget(self, now: float, source_id: str = "") -> None:
        draft = self._written
        draft.now = now
        if source_id and self.gone(source_id) is not None:
            draft.gone[source_id] = None

    def _forget_lapsed(self, draft: Draft) -> None:
        """Have a draft that writes forget tombstones whose time is over."""
        for source_id, gone in self._gone.items():
            if gone.until_s > draft.now:
                break
            draft.gone.setdefault(source_id, None)

    def counted(self, kind: CountedKind, address: str) -> tuple[int, int]:
        total, here = super().counted(kind, address)
        if self._draft is not None:
            counts = self._draft.counts
            total += sum(by for (each, _), by in counts.items() if each is kind)
            here += counts[kind, address]
        return total, here

    def counted_within(self, kind: CountedKind, most: int) -> int:
        found = super().counted_within(kind, most)
        for each, address in [] if self._draft is None else self._draft.counts:
            if each is kind:
                before = super().counted(kind, address)[1]
                found += min(self.counted(kind, address)[1], most) - min(before, most)
        return found

    def count(self, kind: CountedKind, address: str, by: int) -> None:
        self._written.counts[kind, address] += by

    def put_document(self, digest: bytes, data: bytes) -> None:
        super().put_document(digest, data)
        self._fresh[digest] = data
        self._dropped.discard(digest)

    def drop_document(self, digest: bytes) -> None:
        super().drop_document(digest)
        if self._fresh.pop(digest, None) is None:
            self._dropped.add(digest)

    def append(self, entry: Entry) -> None:
        self._written.entries.append(entry)

    def read(self, after: int) -> Sequence[Entry] | None:
        return super().read(after) if after <= self._latest else None

    # -- what has been kept ------------------------------------------------------------------------

    def _apply(self, draft: Draft) -> None:
        """Apply the committed state to the memory."""
        for name, state in draft.written_names().items():
            super().decide(state or NameState(name))
        for source_id, listed in draft.written_sources().items():
            if listed is None:
                if source_id in self._sources:
                    self._drop_kept(source_id)
                continue
            is_new = source_id not in self._sources
            super().put_source(listed)
            if is_new:
                said = draft.renewals.get(source_id) or Renewal(listed.lease_until_s, 0, 0.0, True)
                # No heartbeat: this lease has been kept with the commit.
                MemoryStore.renew(
                    self, source_id, said.until_s, said.readers, said.gb_per_s, first=said.first
                )
        for source_id, gone in draft.gone.items():
            self._gone.pop(source_id, None)
            if gone is not None:
                self._gone[source_id] = gone
        for (kind, address), by in draft.counts.items():
            super().count(kind, address, by)
        for entry in draft.entries:
            super().append(entry)
        if draft.epoch is not None:
            self._begin_epoch(*draft.epoch)
        self._wake()
        while len(self._entries) > self._kept_entries:
            self._entries.popleft()

    def _count_anew(self) -> None:
        """Count what is in memory."""
        for counts in self._counts.values():
            counts.clear()
        self._totals.clear()
        for listed in self._sources.values():
            super().count(CountedKind.SOURCES, listed.address, 1)
        for state in self._names.values():
            for binding in state.bindings():
                super().count(CountedKind.MODELS, binding.address, 1)
            if state.kept is not None:
                super().count(CountedKind.KEPT_NAMES, state.kept.address, 1)
