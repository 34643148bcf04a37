"""Lets others find a pull and read from it, if the pull takes long enough."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from mx.core.holdings import Holdings
from mx.core.pages import Pages
from mx.core.types import Manifest, ModelKey, SourceRecord
from mx.errors import MxError
from mx.memory.live import Memory
from mx.runtime import uncut

if TYPE_CHECKING:
    from mx.swarm.node import Node

log = logging.getLogger(__name__)

#: Others may find a pull that should take longer than this, or has run for half of it.
LONG_S = 2.0


class Host(Protocol):
    """Serves what a pull has received so far: `mx.source.relay.Relay`. On the loop."""

    async def start(self, node: Node) -> None:
        """Listen, and offer the pull's memory. Raises MxError."""

    def record(self) -> SourceRecord | None:
        """Return the record by which others find the pull; None before it listens."""

    async def keep_listed(
        self, holdings: Holdings, sources: Callable[[], Sequence[SourceRecord]]
    ) -> None:
        """Report the held layers to the coordinator, if there is one, until all are held.

        Args:
            holdings: The chunks that are verified.
            sources: Returns the known sources, which may give side files that readers want.
        """

    async def close(self) -> None:
        """End all reads here. Idempotent."""


#: Makes the host of a pull from (its source id, model, manifest, pages that are known, arena that
#: is being filled).
MakeHost = Callable[[str, ModelKey, Manifest, Pages, Memory], Host]


class Sharing:
    """One pull's; on the loop."""

    def __init__(
        self, host: Host | None, *, expected_s: float = 0.0, alone_because: str = ""
    ) -> None:
        """
        Args:
            host: Lets others read here; None: the pull takes no part in swarms.
            expected_s: How many seconds the pull should take.
            alone_because: Why there is no host, to be logged where the user may not expect that.
        """
        self.sources: Sequence[SourceRecord] = ()  # as found last
        self._host = host
        self._failed = False  # to listen
        self._alone_because = alone_because
        self._due_s = time.monotonic() + (0.0 if expected_s > LONG_S else LONG_S / 2)
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def possible(self) -> bool:
        """Return True if others may be let read here."""
        return self._host is not None and not self._failed

    @property
    def begun(self) -> bool:
        """Return True if others can read here, or will be able to soon."""
        return self._task is not None and self.possible

    @property
    def host(self) -> Host | None:
        """The host of this pull; None before it listens."""
        return None if self.record() is None else self._host

    def record(self) -> SourceRecord | None:
        """Return the record by which others find this pull; None before they can."""
        return None if self._host is None or self._failed else self._host.record()

    def plan(self, node: Node) -> None:
        """Plan to `begin` as soon as the pull turns out to take long. Called when it reads."""
        if self._timer is None:
            delay_s = max(0.0, self._due_s - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._due, node)

    def _due(self, node: Node) -> None:
        if self.possible:
            self.begin(node)
        elif self._alone_because:
            log.warning("%s", self._alone_because)

    def begin(self, node: Node) -> None:
        """Listen, register with the coordinator, and meet the other pulls. Idempotent."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(node), name="mx-sharing")

    async def _run(self, node: Node) -> None:
        assert self._host is not None
        try:
            # Uncut: what a host that is cancelled half-way has opened, `close` would not know.
            await uncut(self._host.start(node))
        except MxError as error:
            log.warning("other pulls can't read from this one: %s", str(error))
            self._failed = True
            node.read_freely()
            return
        node.peers.met(self.sources)
        await self._host.keep_listed(node.holdings, lambda: self.sources)

    def reading_ended(self) -> None:
        """Cancel the plan to begin: the pull is almost over."""
        if self._timer is not None:
            self._timer.cancel()

    async def stop(self) -> None:
        """End the reports to the coordinator. Idempotent."""
        self.reading_ended()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def close(self) -> None:
        """`stop`, and end all reads here. Idempotent."""
        await self.stop()
        if self._host is not None:
            await self._host.close()
            self._host = None  # and the memory that it gave
