"""The store in memory, which ends with its process. It has one coordinator."""

from __future__ import annotations

import math
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from mx.core.answers import ListedSource
from mx.core.changes import Entry
from mx.core.name_state import NameState
from mx.core.store import CountedKind, FormerSource, Store

_T = TypeVar("_T")

#: The entries of the stream that are kept once readers have been woken for them.
_KEPT_ENTRIES = 256


class MemoryStore(Store):
    """State in memory: every verb takes effect at once, and steps never run again."""

    outlives = False

    def __init__(self, clock: Callable[[], float], *, kept_entries: int = _KEPT_ENTRIES) -> None:
        """
        Args:
            clock: Returns the time in seconds, and never goes back.
            kept_entries: The entries of the stream that are kept once readers have been woken.
        """
        super().__init__()
        self._clock = clock
        self._kept_entries = kept_entries
        self.epoch = uuid.uuid4().hex
        self._names: dict[str, NameState] = {}
        self._due: dict[str, float] = {}
        self._next_due_s = math.inf
        self._sources: dict[str, ListedSource] = {}
        # The ids of sources without a heartbeat and of the others, each in order of renewal: all
        # leases of one kind are equally long, and so the first ones end first.
        self._first_leases: OrderedDict[str, None] = OrderedDict()
        self._leases: OrderedDict[str, None] = OrderedDict()
        self._gone: OrderedDict[str, FormerSource] = OrderedDict()
        self._counts: dict[CountedKind, Counter[str]] = {kind: Counter() for kind in CountedKind}
        self._totals: Counter[CountedKind] = Counter()
        self._documents: dict[bytes, bytes] = {}
        self._latest = 0
        self._entries: deque[Entry] = deque()

    def clock(self) -> float:
        return self._clock()

    async def catch_up(self) -> None:
        pass  # nothing else writes

    async def begin_epoch(self, expected: str, doubt_until_s: float, latest: int = 0) -> None:
        if self.epoch == expected:
            self._begin_epoch(uuid.uuid4().hex, doubt_until_s, latest)

    def _begin_epoch(self, epoch: str, doubt_until_s: float, latest: int) -> None:
        self.epoch, self.doubt_until_s = epoch, doubt_until_s
        if latest > self._latest:
            self._latest = latest
            self._entries.clear()  # they had other numbers

    async def atomically(self, steps: Callable[[], _T]) -> _T:
        try:
            return steps()
        finally:
            self._wake()
            while len(self._entries) > self._kept_entries:
                self._entries.popleft()

    def name(self, name: str) -> NameState | None:
        return self._names.get(name)

    def names(self) -> Iterable[NameState]:
        return self._names.values()

    def decide(self, state: NameState) -> None:
        name = state.name  # nothing else writes: it is what `name` returned
        if state.empty:
            self._names.pop(name, None)
        else:
            self._names[name] = state
        if state.due_s == math.inf:
            self._due.pop(name, None)
        else:
            self._due[name] = state.due_s
            self._next_due_s = min(self._next_due_s, state.due_s)

    def due_names(self, now: float) -> Sequence[str]:
        if now < self._next_due_s:
            return ()
        found = [name for name, due_s in self._due.items() if due_s <= now]
        self._next_due_s = min(
            (each for each in self._due.values() if each > now), default=math.inf
        )
        return found

    def source(self, source_id: str) -> ListedSource | None:
        return self._sources.get(source_id)

    def sources(self) -> Iterable[ListedSource]:
        return self._sources.values()

    def put_source(self, listed: ListedSource) -> None:
        source_id = listed.record.source_id
        was = self._sources.get(source_id)
        if was is not None:
            listed.lease_until_s = was.lease_until_s
            listed.readers, listed.gb_per_s = was.readers, was.gb_per_s
        self._sources[source_id] = listed

    def renew(
        self, source_id: str, until_s: float, readers: int, gb_per_s: float, *, first: bool = False
    ) -> None:
        listed = self._sources[source_id]
        listed.lease_until_s, listed.readers, listed.gb_per_s = until_s, readers, gb_per_s
        self._first_leases.pop(source_id, None)
        self._leases.pop(source_id, None)
        (self._first_leases if first else self._leases)[source_id] = None

    def due_sources(self, now: float) -> Sequence[str]:
        found = []
        for leases in (self._first_leases, self._leases):
            for source_id in leases:
                if self._sources[source_id].lease_until_s > now:
                    break
                found.append(source_id)
        return found

    def drop(self, source_id: str) -> None:
        del self._sources[source_id]
        self._first_leases.pop(source_id, None)
        self._leases.pop(source_id, None)

    def gone(self, source_id: str) -> FormerSource | None:
        return self._gone.get(source_id)

    def bury(self, source_id: str, gone: FormerSource, most: int) -> None:
        while self._gone and len(self._gone) >= most:
            self._gone.popitem(last=False)
        self._gone[source_id] = gone

    def forget(self, now: float, source_id: str = "") -> None:
        if source_id:
            self._gone.pop(source_id, None)
        while self._gone and next(iter(self._gone.values())).until_s <= now:
            self._gone.popitem(last=False)

    def counted(self, kind: CountedKind, address: str) -> tuple[int, int]:
        return self._totals[kind], self._counts[kind][address]

    def counted_within(self, kind: CountedKind, most: int) -> int:
        return sum(min(count, most) for count in self._counts[kind].values())

    def count(self, kind: CountedKind, address: str, by: int) -> None:
        self._totals[kind] += by
        counts = self._counts[kind]
        counts[address] += by
        if not counts[address]:
            del counts[address]

    def document(self, digest: bytes) -> bytes | None:
        return self._documents.get(digest)

    def documents(self) -> Iterable[tuple[bytes, int]]:
        return [(digest, len(data)) for digest, data in self._documents.items()]

    def put_document(self, digest: bytes, data: bytes) -> None:
        self._documents[digest] = data

    def drop_document(self, digest: bytes) -> None:
        self._documents.pop(digest, None)

    @property
    def latest(self) -> int:
        return self._latest

    def append(self, entry: Entry) -> None:
        self._latest += 1
        self._entries.append(entry)

    def read(self, after: int) -> Sequence[Entry] | None:
        missing = self._latest - after
        if missing > len(self._entries):
            return None
        return [self._entries[i] for i in range(-missing, 0)]  # fast near the end
