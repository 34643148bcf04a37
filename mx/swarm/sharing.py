"""Lets others find a pull and read from it, once that is worth it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from mx.core.holdings import Holdings
from mx.core.types import Manifest, ModelKey, SourceRecord
from mx.errors import MxError
from mx.memory.arena import Arena

if TYPE_CHECKING:
    from mx.swarm.node import Node

log = logging.getLogger(__name__)

#: A pull that takes at least this long is worth telling others of.
LONG_S = 2.0


class Host(Protocol):
    """Lets others read what a pull has received so far: `mx.source.relay.Relay`. On the loop."""

    async def start(self, node: Node) -> None:
        """Listen, and offer the pull's memory. Raises MxError."""

    def record(self) -> SourceRecord | None:
        """Return how others find it; None before it listens."""

    async def keep_listed(
        self, holdings: Holdings, sources: Callable[[], Sequence[SourceRecord]]
    ) -> None:
        """Tell the coordinator, if there is one, which layers are held, until all are.

        Args:
            holdings: The chunks that are verified.
            sources: Gives the known sources, from which to take what else readers may want.
        """

    async def close(self) -> None:
        """End all reading here. Idempotent."""


#: Makes the host of a pull: (its source id, model, manifest, arena that fills).
MakeHost = Callable[[str, ModelKey, Manifest, Arena], Host]


class Sharing:
    """One pull's, on the loop."""

    def __init__(
        self, host: Host | None, *, expected_s: float = 0.0, alone_because: str = ""
    ) -> None:
        """
        Args:
            host: Lets others read here; None: the pull takes no part in swarms.
            expected_s: How long the pull should take.
            alone_because: Why there is no host, where that may surprise.
        """
        self.sources: Sequence[SourceRecord] = ()  # that were found last
        self._host = host
        self._alone_because = alone_because
        self._due_s = time.monotonic() + (0.0 if expected_s > LONG_S else LONG_S / 2)
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def possible(self) -> bool:
        """Could others read here?"""
        return self._host is not None

    @property
    def begun(self) -> bool:
        """Can others read here, or are they about to?"""
        return self._task is not None and self._host is not None

    @property
    def host(self) -> Host | None:
        """What lets others read here; None before it listens."""
        return None if self.record() is None else self._host

    def record(self) -> SourceRecord | None:
        """Return how others find this pull; None before they can."""
        return None if self._host is None else self._host.record()

    def plan(self, node: Node) -> None:
        """The pull reads: begin as soon as it turns out to take long."""
        if self._timer is None:
            delay_s = max(0.0, self._due_s - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._due, node)

    def _due(self, node: Node) -> None:
        if self._host is not None:
            self.begin(node)
        elif self._alone_because:
            log.warning("%s", self._alone_because)

    def begin(self, node: Node) -> None:
        """Listen, be listed, and meet the others. Idempotent."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(node), name="mx-sharing")

    async def _run(self, node: Node) -> None:
        assert self._host is not None
        try:
            await self._host.start(node)
        except MxError as error:
            log.warning("others can't read here: %s", str(error))
            self._host = None
            node.read_freely()
            return
        node.peers.met(self.sources)
        await self._host.keep_listed(node.holdings, lambda: self.sources)

    def reading_ended(self) -> None:
        """What has not begun by now is not worth it."""
        if self._timer is not None:
            self._timer.cancel()

    async def stop(self) -> None:
        """Tell nothing more to the coordinator. Idempotent."""
        self.reading_ended()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def close(self) -> None:
        """`stop`, and end all reading here. Idempotent."""
        await self.stop()
        if self._host is not None:
            await self._host.close()
