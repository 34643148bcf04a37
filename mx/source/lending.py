"""Looks after live memory that is lent: withdraws it when it is not what was registered, and keeps
readers away while its owner writes to it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from mx.core.lending import Lent, LentEvent, LentState
from mx.errors import ClosedError, ConfigError, CoordinatorError, LocalError
from mx.log import event
from mx.memory.live import LentMemory
from mx.runtime import in_thread, uncut, unexpected
from mx.source.changes import MemoryChange
from mx.source.model import SourceModel, hashed_again
from mx.source.registrar import INTERRUPTED
from mx.source.retirement import Retirement
from mx.source.served import MemoryFaults

log = logging.getLogger(__name__)

#: How often the memory is looked at, as often as the coordinator gets a heartbeat.
WATCH_S = 1.0
#: How long to try to list changed memory while no coordinator answers, and how often.
LIST_S, LIST_AGAIN_S = 10.0, 0.5
#: How long entering a change waits at most, besides the grace: leases end in a part of this, and a
#: coordinator that does not answer takes another.
ENTER_S = 10.0

FAILED = "`changing` ended with an error"


class Lending:
    """One lent model; on the loop. `held` is what is lent, or was before it was withdrawn.

    One task makes a change, from entering to leaving, and alone moves the state on meanwhile. The
    thread whose change it is only tells it what it wants.
    """

    def __init__(
        self,
        held: SourceModel,
        retirement: Retirement,
        serve: Callable[[SourceModel], Coroutine[Any, Any, None]],
        list_changed: Callable[[SourceModel, bytes, Callable[[], bool]], Awaitable[None]],
    ) -> None:
        """
        Args:
            held: What is lent.
            retirement: Takes it away from its readers.
            serve: Serves it again.
            list_changed: Registers it as it is now, as `Registrar.list_changed`.
        """
        self.held = held
        self._state = LentState()
        self._listed = held.manifest.ref.identity  # under `held.key`
        self._retirement = retirement
        self._serve = serve
        self._list_changed = list_changed
        self._change: MemoryChange | None = None  # that runs, or ran last
        self._changing: asyncio.Task[None] | None = None
        self._retiring: asyncio.Task[None] | None = None
        self._busy = asyncio.Lock()

    @property
    def why(self) -> str:
        """Why it was withdrawn, until it is lent again; else ""."""
        return self._state.why

    def _is_closed(self) -> bool:
        return self._state.now is Lent.CLOSED

    @property
    def _memory(self) -> LentMemory:
        memory = self.held.arena
        assert isinstance(memory, LentMemory)
        return memory

    # -- while it is lent -------------------------------------------------------------------------

    @property
    def lends(self) -> bool:
        """True while it is lent."""
        return self._state.now is Lent.LENT

    async def check(self) -> bool:
        """Withdraw the memory if its owner no longer uses it. Called before each grant.

        Returns:
            True if it is lent. What is being listed again is waited for.
        """
        if self._state.now is Lent.LEAVING and self._changing is not None:
            await asyncio.wait((self._changing,))
        if self.lends:
            held = self.held
            # To its end, also if the source is closed: it holds the tensors meanwhile.
            moved = await uncut(in_thread(self._memory.changed))
            if moved and self._is_lent(held):
                await self._withdraw(moved)
        return self.lends

    async def doubt(self, look: Callable[[], MemoryFaults]) -> bool:
        """Hash some of the memory again, of which a reader got wrong bytes, and withdraw all of it
        if that is not what was registered. The owner may write only when it is hashed: it may free
        memory then.

        Args:
            look: Hashes it, on a thread.

        Returns:
            True if it is right.
        """
        held = self.held
        async with self._busy:
            if not self._is_lent(held):
                return False
            found = await uncut(in_thread(look))
            await uncut(in_thread(self._memory.rest))
        if found.moved and self._is_lent(held):
            await self._withdraw(found.moved)
        elif found.wrong and self._is_lent(held):
            await self._withdraw(f"{found.wrong}: written to outside of `changing`", written=True)
        return not (found.moved or found.wrong)

    async def watch(self) -> None:
        """Run forever: look whether the memory is what was registered."""
        while True:
            await asyncio.sleep(WATCH_S)
            if self.lends:
                await self.check()

    def _is_lent(self, held: SourceModel) -> bool:
        """Return True if this is what is lent: what was seen of it still counts."""
        return self.lends and self.held is held

    async def _withdraw(self, why: str, *, written: bool = False) -> None:
        """Stop serving the memory. `written`: readers are told that it changed."""
        if written:
            self._retirement.written(self.held.arena)
        self._say_withdrawn(why)
        async with self._busy:
            await uncut(self._retirement.retire_memory(self.held.arena, 0.0, changed=written))

    def _say_withdrawn(self, why: str, level: int = logging.ERROR) -> None:
        self._state.step(LentEvent.WITHDRAW, why)
        if self._is_closed():
            return
        event(
            log,
            "source.withdrawn",
            level=level,
            model=str(self.held.key),
            source=self.held.source_id,
            text=f"{why}; `changing` lists what is in memory again",
        )

    # -- around changes ---------------------------------------------------------------------------

    def begin(self, change: MemoryChange) -> None:
        """Begin a change: let its owner write, and lend the memory again once it has left.

        No reader trusts anything that it reads from the moment at which `change.entered` is set.
        When `change.ended` is set the memory is lent, withdrawn, or closed.

        Args:
            change: The change. Its error is ConfigError if another one runs, ClosedError if the
                memory is not lent any more, another MxError if the memory is withdrawn. It is
                registered under a new revision if it differs and this source bound its name; if
                another one did, only if these weights are bound already.
        """
        change.begun = True
        last, before = self._change, self._changing
        if last is not None and not last.ended.is_set and not last.gone and not self._is_closed():
            change.end(ConfigError(f"{self.held.key} is changing already"))
            return
        if last is not None:
            last.wake()
        self._change = change
        self._changing = asyncio.create_task(self._run(change, before), name="mx-changing")

    async def close(self) -> None:
        """Lend the memory no more, and wait for the end of a change. Idempotent."""
        self._state.step(LentEvent.CLOSE)
        if self._change is not None:
            self._change.wake()
        running = [task for task in (self._changing, self._retiring) if task is not None]
        if running:
            await asyncio.wait(running)

    async def _run(self, change: MemoryChange, before: asyncio.Task[None] | None) -> None:
        """Make a change, once the one before has ended."""
        try:
            if before is not None:
                await asyncio.wait((before,))
                before = None
            await self._make(change)
            change.end(None)
        except Exception as error:  # noqa: BLE001 - it is raised on the owner's thread
            change.end(unexpected(error))
        finally:
            change.end(ClosedError(f"the source of {self.held.key} was closed"))

    async def _make(self, change: MemoryChange) -> None:
        if self._is_closed():
            raise ClosedError(f"the source of {self.held.key} was closed")
        all_of_it = self._state.why != ""  # what is withdrawn may differ anywhere
        await self._enter(change)
        if self._is_closed():
            raise ClosedError(f"the source of {self.held.key} was closed")
        entered = not change.gone
        if entered:
            self._state.step(LentEvent.OPEN)
            self._memory.yield_claim()  # its owner may have a pull write
            change.entered.set()
            while not (change.left or change.gone or self._is_closed()):
                await change.told(WATCH_S)
            if self._is_closed():
                return
            if not change.left:
                self._say_withdrawn(INTERRUPTED)
                return
        else:
            change.failed = True  # nothing was written
        self._state.step(LentEvent.LEAVE)

        def stopped() -> bool:
            return self._is_closed() or (entered and change.gone)

        try:
            await self._leave(change, all_of_it, stopped)
        except Exception as error:
            if self._is_closed():
                return
            found = unexpected(error)
            if not isinstance(found, ClosedError):
                self._say_withdrawn(str(found))
            elif stopped():
                self._say_withdrawn(INTERRUPTED)
            else:  # the process ends
                self._say_withdrawn(str(found), logging.INFO)
            raise

    async def _enter(self, change: MemoryChange) -> None:
        """Return once no reader trusts anything that it reads from now on.

        Raises:
            LocalError: That takes too long.
        """
        self._state.step(LentEvent.ENTER)

        async def retire() -> None:
            until_s = time.monotonic() + change.grace_s
            async with self._busy:  # what hashes it has stopped then
                await self._retirement.retire_memory(
                    self.held.arena, change.grace_s, lambda: change.gone or self._is_closed()
                )
                left_s = max(0.0, until_s - time.monotonic())
                await self._retirement.let_go(self.held.key, left_s)

        self._retiring = retiring = asyncio.create_task(retire(), name="mx-withdraw")
        done, _ = await asyncio.wait((retiring,), timeout=change.grace_s + ENTER_S)
        try:
            if not done:
                raise LocalError(
                    f"{self.held.key} is in use: its readers' connections do not end",
                    hint="enter `changing` again a little later",
                )
            retiring.result()
        except Exception as error:
            self._say_withdrawn(f"it could not be withdrawn from its readers: {error}")
            raise

    async def _leave(
        self, change: MemoryChange, all_of_it: bool, stopped: Callable[[], bool]
    ) -> None:
        """Lend the memory again, as it is now, and register it.

        Args:
            change: The change; nothing differs from before if it has failed.
            all_of_it: Whether more than the change's names may differ.
            stopped: Polled; if it returns True, hashing and waiting stop.

        Raises:
            ClosedError: It was stopped.
            MxError: The memory can't be lent, or its new weights not be listed.
        """
        names = None if all_of_it else change.names
        now = await uncut(in_thread(hashed_again, self.held, names, stopped))
        if change.failed and now.manifest.ref.identity != self.held.manifest.ref.identity:
            raise LocalError(FAILED)
        self.held = now
        try:
            await uncut(self._serve(now))
            await self._list(now, stopped)
        except BaseException:
            await uncut(self._retirement.retire(now.source_id, 0.0))
            raise
        self._state.step(LentEvent.LIST)
        self._listed = now.manifest.ref.identity

    async def _list(self, now: SourceModel, stopped: Callable[[], bool]) -> None:
        """Register the memory as it is now, also if the coordinator is gone for a while."""
        until_s = time.monotonic() + LIST_S
        while True:
            if stopped():
                raise ClosedError(INTERRUPTED)
            try:
                await self._list_changed(now, self._listed, stopped)
            except CoordinatorError as error:
                if type(error) is not CoordinatorError or time.monotonic() >= until_s:
                    raise
            else:
                return
            await asyncio.sleep(LIST_AGAIN_S)
