"""A store whose state is all in memory, for the reading verbs, and kept elsewhere as well.

Steps run over a draft, and what they write takes effect in memory when it has been kept. Steps that
write nothing but renewals end at once. The others wait for a commit: while one is under way further
ones queue, and the next commit takes all of them, so that a thousand registrations wait for a few
commits. If another coordinator has written what they read, the whole batch runs again.
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
from collections.abc import Callable
from typing import Any, TypeVar

from mx.coordinator.stores.draft import Draft
from mx.coordinator.stores.drafted import DraftedStore
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


class _StoreCall:
    """Steps that are to take effect, and what came of their last run."""

    def __init__(self, steps: Callable[[], Any]) -> None:
        self.steps = steps
        self.result: Any = None
        self.error: Exception | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self, error: Exception | None = None) -> None:
        """Wake the caller."""
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


class KeptStore(DraftedStore):
    """The part that all kept stores share. Begin with `open`; end with `close`."""

    outlives = True

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self.epoch = ""
        self._queue: deque[_StoreCall] = deque()
        self._queued = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False
        self._period_s = PERIOD_S
        #: When that was logged last, and whether the end of it is to be.
        self._said_s, self._said = -math.inf, False

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
        call = _StoreCall(steps)
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
        """Raise what is the matter if the steps of a draft need what cannot be obtained."""
        if draft.refused and self._trouble is not None:
            raise another(self._trouble)

    def _run(self, call: _StoreCall, draft: Draft | None = None) -> Draft:
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

    async def _decide(self, batch: list[_StoreCall]) -> bool:
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

    async def catch_up(self) -> None:
        pass  # one process writes

    async def begin_epoch(self, expected: str, doubt_until_s: float, latest: int = 0) -> None:
        def begin() -> None:
            draft = self._written
            if (draft.epoch or (self.epoch,))[0] == expected:
                draft.epoch = uuid.uuid4().hex, doubt_until_s, latest

        await self.atomically(begin)
