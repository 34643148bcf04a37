"""A store whose state is all in memory, for the reading verbs, and kept elsewhere as well.

Steps run over a draft: they read copies, and what they write takes effect in memory only when it
has been kept. So readers see what is kept, and nothing else. Steps that write nothing but renewals
end at once. The others wait for a commit: while one is under way further ones queue, and the next
commit takes all of them, so that a thousand registrations wait for a few commits. If another
coordinator has written what they read, the whole batch runs again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import uuid
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from mx.coordinator.stores.draft import Draft, Renewal
from mx.coordinator.stores.encoding import copied
from mx.core.answers import Listed
from mx.core.changes import Entry
from mx.core.memory_store import MemoryStore
from mx.core.name_state import NameState
from mx.core.store import Gone, Kind
from mx.errors import ClosedError, CoordinatorError, MxError, UnknownSourceError, another
from mx.log import event
from mx.tasks import unexpected

_T = TypeVar("_T")

log = logging.getLogger(__name__)

#: The longest that the steps of one commit keep the event loop.
_BATCH_S = 0.01
#: How long steps are tried again because other coordinators write the same.
_CONTENDED_S = 5.0
#: How often what need not be kept at once is kept.
PERIOD_S = 0.5
_CLOSE_S = 5.0
_SAY_AGAIN_S = 10.0


class _Call:
    """Steps that are to take effect, and what came of their last run."""

    def __init__(self, steps: Callable[[], Any]) -> None:
        self.steps = steps
        self.result: Any = None
        self.error: Exception | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self, error: Exception | None = None) -> None:
        """Let the caller go on."""
        self.error = error or self.error
        if not self.done.done():
            self.done.set_result(None)

    def outcome(self) -> Any:
        """Return what the steps returned, or raise what they raised."""
        error, self.error = self.error, None
        if error is None:
            return self.result
        try:
            raise error
        finally:
            del error


class KeptStore(MemoryStore):
    """The part that all kept stores share. Begin with `open`; end with `close`."""

    outlives = True

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self.epoch = ""
        self._draft: Draft | None = None
        self._queue: deque[_Call] = deque()
        self._queued = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False
        self._period_s = PERIOD_S
        #: Why nothing can be kept now; None if it can.
        self._trouble: MxError | None = None
        #: When that was logged last, and whether the end of it is to be.
        self._said_s, self._said = -math.inf, False
        #: Documents that are to be kept, or no longer, with the next commit.
        self._fresh: dict[bytes, bytes] = {}
        self._dropped: set[bytes] = set()

    # -- what the kinds of stores do ---------------------------------------------------------------

    @abstractmethod
    async def _load(self) -> None:
        """Begin with what is kept."""

    @abstractmethod
    async def _keep(self, draft: Draft) -> bool:
        """Keep what a draft writes, whole, and the documents.

        Returns:
            True if it is kept; False if something else has changed what the draft read, which is in
            memory by now.

        Raises:
            MxError: It is not kept.
        """

    @abstractmethod
    async def _keep_rest(self) -> None:
        """Keep what need not be kept at once. Called every `_period_s`, also in trouble.

        Raises:
            MxError: It is not kept.
        """

    async def _unload(self) -> None:
        """Release what `_load` took."""

    # -- life --------------------------------------------------------------------------------------

    async def open(self) -> None:
        if self._tasks:
            return
        await self._load()
        self._wake(begins_again=True)
        self._tasks = [
            asyncio.create_task(self._commit(), name="mx-state-commit"),
            asyncio.create_task(self._periodically(), name="mx-state-period"),
        ]

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self._idle.wait()
        for task in self._tasks:
            while not task.done():
                task.cancel()  # once more where a library has taken the first one for its own
                await asyncio.wait((task,), timeout=0.1)
        for call in self._queue:
            call.end(ClosedError("the coordinator is shutting down"))
        self._queue.clear()
        if self._tasks:
            with contextlib.suppress(MxError):
                await self._keep_rest()
        await self._unload()

    def _in_trouble(self, error: MxError) -> None:
        """Note that nothing can be kept now: from here on time ends nothing."""
        self._trouble = error
        # A disk that is nearly full takes some writes and refuses others.
        if time.monotonic() > self._said_s + _SAY_AGAIN_S:
            self._said_s = time.monotonic()
            self._said = True
            event(log, "state.trouble", level=logging.ERROR, text=str(error))

    def _recovered(self) -> None:
        if self._trouble is not None and self._said:
            self._said = False
            event(log, "state.recovered", level=logging.WARNING, text="the state is kept again")
        self._trouble = None

    # -- steps -------------------------------------------------------------------------------------

    async def atomically(self, steps: Callable[[], _T]) -> _T:
        if self._closed:
            raise ClosedError("the coordinator is shutting down")
        assert self._tasks, "open it first"
        call = _Call(steps)
        draft = self._run(call)
        self._check_refused(draft)
        if draft.writes:
            self._queue.append(call)
            self._idle.clear()
            self._queued.set()
            await call.done
        found: _T = call.outcome()
        return found

    def _check_refused(self, draft: Draft) -> None:
        """Raise what is the matter if the steps of a draft need what cannot be had."""
        if draft.refused and self._trouble is not None:
            raise another(self._trouble)

    def _run(self, call: _Call, draft: Draft | None = None) -> Draft:
        """Run steps over a draft, or over a new one, and return that."""
        self._draft = draft = Draft() if draft is None else draft
        try:
            call.error, call.result = None, call.steps()
        except MxError as error:
            call.error = error
        finally:
            self._draft = None
        return draft

    async def _commit(self) -> None:
        """Keep what queues, batch by batch."""
        while True:
            await self._queued.wait()
            most = len(self._queue)
            until_s = time.monotonic() + _CONTENDED_S
            while self._queue:
                batch = [self._queue.popleft() for _ in range(min(most, len(self._queue)))]
                try:
                    kept = await self._decide(batch)
                except asyncio.CancelledError:
                    for call in batch:
                        call.end(ClosedError("the coordinator is shutting down"))
                    raise
                except Exception as error:  # noqa: BLE001 - the callers raise it
                    for call in batch:
                        call.end(unexpected(error))
                    continue
                if kept:
                    most, until_s = len(self._queue), time.monotonic() + _CONTENDED_S
                elif time.monotonic() < until_s:
                    self._queue.extendleft(reversed(batch))
                    most = max(1, len(batch) // 2)
                else:
                    for call in batch:
                        call.end(CoordinatorError("other coordinators write the same state"))
            self._queued.clear()
            self._idle.set()

    async def _decide(self, batch: list[_Call]) -> bool:
        """Run a batch, and keep what it writes. Returns False if it has to run again."""
        draft, began_s = Draft(), time.monotonic()
        ran = 0
        for ran, call in enumerate(batch, 1):  # noqa: B007 - it is how many ran
            try:
                self._run(call, draft)
            except Exception as error:  # noqa: BLE001 - the caller raises it
                # What it wrote is not to stay: the others run again without it.
                batch.remove(call)
                call.end(unexpected(error))
                return False
            if time.monotonic() - began_s > _BATCH_S:
                break
        self._queue.extendleft(reversed(batch[ran:]))
        del batch[ran:]
        self._check_refused(draft)
        if draft.writes:
            self._forget_lapsed(draft)
            try:
                if not await self._keep(draft):
                    return False
            except UnknownSourceError:
                if len(batch) > 1:
                    return False  # it is of one of them, which is found as it runs alone
                raise
            except MxError as error:
                self._in_trouble(error)
                raise
            self._recovered()
        for call in batch:
            call.end()
        return True

    async def _periodically(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            try:
                await self._keep_rest()
            except Exception as error:  # noqa: BLE001 - it goes on whatever happens
                self._in_trouble(unexpected(error))
            else:
                self._recovered()

    def _apply(self, draft: Draft) -> None:
        """Let what is kept take effect in memory."""
        for name, state in draft.written_names().items():
            self.decide(state or NameState(name))
        for source_id, listed in draft.written_sources().items():
            if listed is None:
                if source_id in self._sources:
                    self.drop(source_id)
                continue
            is_new = source_id not in self._sources
            self.put_source(listed)
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
            self.count(kind, address, by)
        for entry in draft.entries:
            self.append(entry)
        if draft.epoch is not None:
            self.epoch, self.doubt_until_s = draft.epoch
        self._wake()
        while len(self._entries) > self._kept_entries:
            self._entries.popleft()

    def _count_anew(self) -> None:
        """Count what is in memory."""
        for counts in self._counts.values():
            counts.clear()
        self._totals.clear()
        for listed in self._sources.values():
            self.count(Kind.SOURCES, listed.address, 1)
        for state in self._names.values():
            for binding in state.bindings():
                self.count(Kind.MODELS, binding.address, 1)
            if state.kept is not None:
                self.count(Kind.KEPT_NAMES, state.kept.address, 1)

    async def catch_up(self) -> None:
        pass  # one process writes

    async def begin_epoch(self, expected: str, doubt_until_s: float) -> None:
        def begin() -> None:
            assert self._draft is not None
            if (self._draft.epoch or (self.epoch, 0.0))[0] == expected:
                self._draft.epoch = uuid.uuid4().hex, doubt_until_s

        await self.atomically(begin)

    # -- verbs: over the draft while steps run -----------------------------------------------------

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
        draft = self._draft
        if draft is None:
            return super().decide(state)
        if state.name not in draft.names:
            self.name(state.name)  # it is compared, also if the steps have not read it
        draft.names[state.name] = state
        draft.decided[state.name] = None
        return None

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

    def source(self, source_id: str) -> Listed | None:
        draft = self._draft
        if draft is None:
            return self._sources.get(source_id)
        if source_id not in draft.sources:
            draft.sources[source_id] = copied(self._sources.get(source_id))
        return draft.sources[source_id]

    def sources(self) -> Iterable[Listed]:
        draft = self._draft
        if draft is None or not draft.put:
            return self._sources.values()
        return [s for s in ({**self._sources, **draft.written_sources()}).values() if s is not None]

    def put_source(self, listed: Listed) -> None:
        draft = self._draft
        if draft is None:
            return super().put_source(listed)
        source_id = listed.record.source_id
        was = self.source(source_id)
        if was is not None:
            listed.lease_until_s = was.lease_until_s
            listed.readers, listed.gb_per_s = was.readers, was.gb_per_s
        draft.sources[source_id] = listed
        draft.put[source_id] = None
        return None

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
        draft = self._draft
        if draft is None:
            return super().drop(source_id)
        self.source(source_id)
        draft.sources[source_id] = None
        draft.put[source_id] = None
        draft.renewals.pop(source_id, None)
        if source_id in draft.due:
            draft.expired.add(source_id)
        return None

    def gone(self, source_id: str) -> Gone | None:
        draft = self._draft
        if draft is None:
            return super().gone(source_id)
        draft.gone_read.add(source_id)
        found = draft.gone.get(source_id, self._gone.get(source_id))
        return found if found is not None and found.until_s > draft.now else None

    def bury(self, source_id: str, gone: Gone, most: int) -> None:
        draft = self._draft
        if draft is None:
            return super().bury(source_id, gone, most)
        excess = len(self._gone) + sum(1 if g else -1 for g in draft.gone.values()) + 1 - most
        for each in self._gone if excess > 0 else ():
            if excess > 0 and each not in draft.gone:
                draft.gone[each] = None
                excess -= 1
        draft.gone[source_id] = gone
        return None

    def forget(self, now: float, source_id: str = "") -> None:
        draft = self._draft
        if draft is None:
            return super().forget(now, source_id)
        draft.now = now
        if source_id and self.gone(source_id) is not None:
            draft.gone[source_id] = None
        return None

    def _forget_lapsed(self, draft: Draft) -> None:
        """Have a draft that writes forget tombstones whose time is over."""
        for source_id, gone in self._gone.items():
            if gone.until_s > draft.now:
                break
            draft.gone.setdefault(source_id, None)

    def counted(self, kind: Kind, address: str) -> tuple[int, int]:
        total, here = super().counted(kind, address)
        if self._draft is not None:
            counts = self._draft.counts
            total += sum(by for (each, _), by in counts.items() if each is kind)
            here += counts[kind, address]
        return total, here

    def count(self, kind: Kind, address: str, by: int) -> None:
        if self._draft is None:
            return super().count(kind, address, by)
        self._draft.counts[kind, address] += by
        return None

    def put_document(self, digest: bytes, data: bytes) -> None:
        super().put_document(digest, data)
        self._fresh[digest] = data
        self._dropped.discard(digest)

    def drop_document(self, digest: bytes) -> None:
        super().drop_document(digest)
        if self._fresh.pop(digest, None) is None:
            self._dropped.add(digest)

    def append(self, entry: Entry) -> None:
        if self._draft is None:
            return super().append(entry)
        self._draft.entries.append(entry)
        return None

    def read(self, after: int) -> Sequence[Entry] | None:
        return super().read(after) if after <= self._latest else None
