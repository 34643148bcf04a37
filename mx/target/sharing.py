"""Whether a pull is one among others, and from when on."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence

from mx.core.planner import Plan
from mx.core.types import ModelKey, SourceRecord
from mx.memory.arena import Arena
from mx.target.connections import ConnectionPool
from mx.target.options import PullOptions
from mx.target.relay import RelayHost
from mx.target.trading import Trading
from mx.target.transfer import Transfer

log = logging.getLogger(__name__)

#: A pull that takes at least this long is worth telling others of.
LONG_S = 2.0
#: It is looked this often whether such a pull has begun to read.
CONNECTING_S = 0.05


class Sharing:
    """One pull's, on the loop. `reader_id` is "" for a pull that nobody could read from."""

    def __init__(
        self,
        options: PullOptions,
        plan: Callable[[Sequence[SourceRecord]], Plan],
    ) -> None:
        """`plan` finds the ways to read from sources."""
        able = options.relay is not None and options.device == "cpu" and options.into is None
        self.reader_id = str(uuid.uuid4()) if able else ""
        self.sources: Sequence[SourceRecord] = ()  # that were found last
        self._options = options
        self._plan = plan
        self._trading: Trading | None = None
        self._later: asyncio.TimerHandle | None = None

    @property
    def others_give(self) -> bool:
        """Is there anybody who holds a part, and might give it?"""
        others = [each for each in self.sources if each.source_id != self.reader_id]
        return bool(self.reader_id) and any(not each.whole for each in others)

    def expect(
        self, seconds: float, begin: Callable[[], None], reading: Callable[[], bool]
    ) -> None:
        """The pull should take so long: `begin` as soon as it is `reading`, or if it should turn
        out to be long."""
        loop = asyncio.get_running_loop()

        def due() -> None:
            if reading():
                begin()
            else:
                self._later = loop.call_later(CONNECTING_S, due)

        due_s = 0.0 if seconds > LONG_S else LONG_S / 2
        if self.reader_id:
            self._later = loop.call_later(due_s, due)
        elif self._options.alone_because:
            self._later = loop.call_later(due_s, log.warning, "%s", self._options.alone_because)

    def begin(
        self,
        key: ModelKey,
        transfer: Transfer,
        pool: ConnectionPool,
        arena: Arena,
        *,
        coordinated: bool = False,
        by: str = "",
    ) -> None:
        """Let others read, and read from them. `gated`: only what is permitted; `by` is the
        source that has said so."""
        make = self._options.relay
        if self._trading is not None and coordinated and not by:
            self._trading.node.coordinate()
        if not self.reader_id or make is None or self._trading is not None:
            return
        host = make(self.reader_id)
        self._trading = Trading(self.reader_id, self._options, host, transfer, pool, self._plan)
        if coordinated:
            pool.coordinate([by])
            self._trading.node.coordinate()
        self._trading.begin(key, arena, self.sources)

    def met(self, sources: Sequence[SourceRecord]) -> None:
        """These hold the model now, or parts of it."""
        self.sources = sources
        if self._trading is not None:
            self._trading.met(sources)

    @property
    def host(self) -> RelayHost | None:
        """What lets others read here, if they can."""
        return None if self._trading is None else self._trading.listening_host

    def reading_ended(self) -> None:
        """Engine and crew are about to end."""
        if self._later is not None:
            self._later.cancel()
        if self._trading is not None:
            self._trading.reading_ended()

    async def leave(self) -> None:
        """Nobody reads here any more. Idempotent."""
        self.reading_ended()
        if self._trading is not None:
            trading, self._trading = self._trading, None
            await trading.close()
