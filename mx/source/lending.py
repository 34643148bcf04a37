"""Looks after live memory that is lent: withdraws it when it is not what was registered, and keeps
readers away while its owner writes to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection
from typing import Protocol

from mx.core.lending import TRANSITIONS, Lent, LentEvent
from mx.core.types import ModelKey, SourceRole
from mx.core.variant import membership
from mx.errors import (
    BindingError,
    ConfigError,
    CoordinatorError,
    NotAllowedError,
    UnknownModelError,
)
from mx.log import event
from mx.memory.live import LiveMemory, Memory
from mx.runtime import in_thread, uncut
from mx.source.model import HeldModel, hashed_again
from mx.source.registrar import Registrar

log = logging.getLogger(__name__)

#: How often the memory is looked at, as often as the coordinator gets a heartbeat.
WATCH_S = 1.0
#: How long to try to list changed memory while no coordinator answers, and how often.
LIST_S, LIST_AGAIN_S = 10.0, 0.5


class Server(Protocol):
    """What lending needs of `mx.source.server.SourceServer`."""

    @property
    def registrar(self) -> Registrar | None: ...
    async def offer(self, held: HeldModel) -> None: ...
    async def retire(self, source_id: str, grace_s: float) -> bool: ...
    async def retire_memory(
        self, memory: Memory, grace_s: float, *, changed: bool = False
    ) -> None: ...


class Lending:
    """One lent model; on the loop. `held` is what is lent, or was before it was withdrawn."""

    def __init__(self, server: Server, held: HeldModel) -> None:
        self.held = held
        self.state = Lent.LENT
        self.why = ""  # it was withdrawn
        self._listed = held.manifest.ref.identity  # under `held.key`
        self._server = server
        self._change: object = None  # that runs, or ran last
        self._busy = asyncio.Lock()

    @property
    def _memory(self) -> LiveMemory:
        memory = self.held.arena
        assert isinstance(memory, LiveMemory)
        return memory

    def _step(self, what: LentEvent) -> None:
        self.state = TRANSITIONS[self.state, what]

    # -- while it is lent -------------------------------------------------------------------------

    async def check(self) -> None:
        """Withdraw the memory if its owner no longer uses it. Called before each grant.

        Raises:
            NotAllowedError: It is not lent, or not any more.
        """
        if self.state is Lent.LENT:
            held = self.held
            # To its end, also if the source is closed: it holds the tensors meanwhile.
            moved = await uncut(in_thread(self._memory.changed))
            if moved and self._is_lent(held):
                await self._withdraw(moved)
        if self.state is not Lent.LENT:
            raise NotAllowedError(f"{self.held.key} is not lent at the moment")

    async def doubt(self, wrong_tensors: Callable[[], str]) -> bool:
        """Hash some of the memory again, of which a reader got wrong bytes, and withdraw all of it
        if that is not what was registered. The owner may write only when it is hashed: it may free
        memory then.

        Args:
            wrong_tensors: Hashes it, on a thread; returns the names of the tensors that are wrong.

        Returns:
            True if it is right.
        """
        held = self.held
        async with self._busy:
            if not self._is_lent(held):
                return False
            wrong = await uncut(in_thread(wrong_tensors))
        if wrong and self._is_lent(held):
            await self._withdraw(f"{wrong}: written to outside of `changing`", written=True)
        return not wrong

    async def watch(self) -> None:
        """Run forever: look whether the memory is what was registered."""
        while True:
            await asyncio.sleep(WATCH_S)
            if self.state is Lent.LENT:
                with contextlib.suppress(NotAllowedError):
                    await self.check()

    def _is_lent(self, held: HeldModel) -> bool:
        """Return True if this is what is lent: what was seen of it still counts."""
        return self.state is Lent.LENT and self.held is held

    async def _withdraw(self, why: str, *, written: bool = False) -> None:
        """Give the memory to no reader any more. `written`: readers are told that it changed."""
        self._step(LentEvent.WITHDRAW)
        self._say_withdrawn(why)
        async with self._busy:
            await uncut(self._server.retire_memory(self.held.arena, 0.0, changed=written))

    def _say_withdrawn(self, why: str) -> None:
        self.why = why
        event(
            log,
            "source.withdrawn",
            level=logging.ERROR,
            model=str(self.held.key),
            source=self.held.source_id,
            text=f"{why}; `changing` lists what is in memory again",
        )

    # -- around changes ---------------------------------------------------------------------------

    async def enter(self, change: object, grace_s: float) -> None:
        """Let the owner write: no reader trusts anything that it reads from now on.

        Readers may finish within `grace_s` seconds, and are then cut off; this returns once their
        leases have ended.

        Args:
            change: Names this change; `leave` ends no other.
            grace_s: How long readers have to finish.

        Raises:
            ConfigError: It is changing already.
        """
        if self.state is Lent.CHANGING:
            raise ConfigError(f"{self.held.key} is changing already")
        self._step(LentEvent.ENTER)
        self._change = change
        async with self._busy:  # what hashes it has stopped then
            try:
                await uncut(self._server.retire_memory(self.held.arena, grace_s))
            except BaseException as error:
                self._step(LentEvent.WITHDRAW)
                self._say_withdrawn(f"it could not be withdrawn from its readers: {error}")
                raise

    def hashed(self, names: Collection[str] | None) -> HeldModel:
        """Return what is in memory now, as a model of its own. Blocks; runs on any thread.

        Args:
            names: The tensors that may have changed; None: all.
        """
        return hashed_again(self.held, names if self.why == "" else None)

    async def leave(self, change: object, now: HeldModel | None, why: str = "") -> ModelKey:
        """Lend the memory again, as it is now, and register it. Does nothing if this change has
        ended, or was never entered.

        Its name means these weights from now on if this source bound it. Otherwise it is listed
        only if these weights are bound already.

        Args:
            change: What `enter` was given.
            now: What is in memory; None withdraws it.
            why: Why it is withdrawn.

        Returns:
            The key under which it is lent, or was.

        Raises:
            MxError: It could not be offered or registered, and is withdrawn.
        """
        async with self._busy:  # entering that was interrupted goes on until here
            if self.state is not Lent.CHANGING or self._change is not change:
                return self.held.key
        if now is None:
            self._step(LentEvent.WITHDRAW)
            self._say_withdrawn(why)
            return self.held.key
        self.held = now
        try:
            await self._server.offer(now)
            refusal = await self._list(now)
        except BaseException as error:
            self._step(LentEvent.WITHDRAW)
            self._say_withdrawn(str(error))
            await uncut(self._server.retire(now.source_id, 0.0))
            raise
        if refusal:
            self._step(LentEvent.WITHDRAW)
            self._say_withdrawn(refusal)
            await uncut(self._server.retire(now.source_id, 0.0))
        else:
            self._step(LentEvent.LIST)
            self.why, self._listed = "", now.manifest.ref.identity
        return now.key

    async def _list(self, now: HeldModel) -> str:
        """Register the memory as it is now, also if the coordinator is gone for a while. Returns
        why it may not be listed, or ""."""
        until_s = time.monotonic() + LIST_S
        while True:
            try:
                return await self._try_list(now)
            except CoordinatorError as error:
                if type(error) is not CoordinatorError or time.monotonic() >= until_s:
                    raise
            await asyncio.sleep(LIST_AGAIN_S)

    async def _try_list(self, now: HeldModel) -> str:
        registrar = self._server.registrar
        if registrar is None:
            return ""
        try:
            same = now.manifest.ref.identity == self._listed
            if same and (now.role is SourceRole.RELAY or membership(now.key.variant).alone):
                now.key = await registrar.list(now, again=True)
            elif now.role is SourceRole.ORIGIN:
                now.key = await registrar.list(now, replaces_revision=True)
            else:
                raise BindingError(f"{now.key} was pulled, and belongs to another source")
        except (BindingError, NotAllowedError) as error:
            try:
                now.key = await registrar.key_of(now)
                now.key = await registrar.list(now)
            except (BindingError, UnknownModelError):
                return f"{error.message}; no source has registered the new weights"
        registrar.keep_listed(now)
        return ""
