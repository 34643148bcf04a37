"""Follows a coordinator for all browsers: a watch of sources and pulls, and lists of what no watch
tells, while a browser shows it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mx.core.pull_status import PullPhase, PullStatus
from mx.errors import CoordinatorError, MxError, NotAllowedError
from mx.log import event
from mx.operations.web.board import Board
from mx.operations.web.rows import Row, load_row, model_row, pull_row, source_row
from mx.runtime import beside
from mx.text import plain
from mx.wire.client import CoordinatorClient
from mx.wire.listing import WatchKind

log = logging.getLogger(__name__)

#: How often what no watch tells is asked for: readers, rates and leases of sources, and models.
POLL_S = 1.5
#: A poll takes at most this part of the time, so that thousands of sources are asked less often.
_POLL_SHARE = 0.1
#: Pulls that have ended are shown for a while: short ones would hardly be seen.
ENDED_S = 300.0
MAX_ENDED = 32
_FIRST_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 2.0
#: Only a person mends a refusal.
_REFUSED_BACKOFF_S = 60.0


@dataclass(frozen=True, slots=True)
class Connectivity:
    """Whether the coordinator answers, since when (on the follower's clock), and why not; "" while
    it has not been tried."""

    is_up: bool
    since_s: float
    why: str = ""


class Follower:
    """Writes what a coordinator knows to a board. `run` it once; its client stays the caller's."""

    def __init__(
        self,
        client: CoordinatorClient,
        board: Board,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            client: The coordinator.
            board: Where rows go.
            clock: The time in seconds, monotonic.
        """
        self.connection = Connectivity(False, clock())
        self.board = board
        self.clock = clock
        self._client = client
        self._is_said = False
        self._browsers = 0
        self._looked_at = asyncio.Event()
        self._changed = asyncio.Event()
        self._pulls: dict[str, tuple[int, PullStatus]] = {}
        self._seen = itertools.count(1)
        self._ended: OrderedDict[str, float] = OrderedDict()

    @contextmanager
    def browser(self) -> Iterator[None]:
        """Count a browser while the block runs: without any, no lists are asked for."""
        self._browsers += 1
        self._looked_at.set()
        try:
            yield
        finally:
            self._browsers -= 1
            if not self._browsers:
                self._looked_at.clear()

    @property
    def changing(self) -> asyncio.Event:
        """What is set by the next change."""
        return self._changed

    async def run(self) -> None:
        """Follow until cancelled; what fails is tried again."""
        await beside(self._stay_connected(), self._poll(), self._forget())

    def _tell(self) -> None:
        was, self._changed = self._changed, asyncio.Event()
        was.set()

    # -- the stream -----------------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while True:
            refused = False
            try:
                await self._follow()
            except MxError as error:
                if self.connection.is_up:
                    backoff_s = _FIRST_BACKOFF_S
                self._lost(error)
                refused = isinstance(error, NotAllowedError)
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, _REFUSED_BACKOFF_S if refused else _MAX_BACKOFF_S)

    def _lost(self, error: MxError) -> None:
        why = plain(error.message)[:500]
        if self.connection.is_up or self.connection.why != why:
            since_s = self.connection.since_s
            if self.connection.is_up or not self._is_said:  # each further reason is on the page
                self._is_said, since_s = True, self.clock()
                event(log, "web.coordinator_lost", level=logging.WARNING, text=why)
            self.connection = Connectivity(False, since_s, why)
            self._tell()

    async def _follow(self) -> None:
        """Follow the stream until it ends. Raises its error."""
        # What the new snapshot does not have is gone.
        sources, pulls = set(self.board.ids("source")), set(self._pulls)
        async with contextlib.aclosing(self._client.watch(pulls=True)) as stream:
            async for update in stream:
                record, pull = update.record, update.pull
                if update.kind is WatchKind.SNAPSHOT_END:
                    for source_id in sources:
                        self._drop_source(source_id)
                    for pull_id in pulls:
                        self._drop_pull(pull_id)
                    self.connection = Connectivity(True, self.clock())
                    event(log, "web.coordinator_answers")
                    self._tell()
                elif pull is not None:
                    pulls.discard(pull.pull_id)
                    self._put_pull(pull)
                elif update.pull_id:
                    self._drop_pull(update.pull_id)
                elif record is not None and update.kind is WatchKind.GONE:
                    self._drop_source(record.source_id)
                elif record is not None:
                    sources.discard(record.source_id)
                    self._put("source", record.source_id, source_row(record))
        raise CoordinatorError("the coordinator ended the watch")

    def _put(self, kind: str, row_id: str, row: Row) -> None:
        if self.board.put(kind, row_id, row):
            self._tell()

    def _drop(self, kind: str, row_id: str) -> None:
        if self.board.drop(kind, row_id):
            self._tell()

    def _drop_source(self, source_id: str) -> None:
        self._drop("source", source_id)
        self._drop("load", source_id)

    def _put_pull(self, status: PullStatus) -> None:
        order, _ = self._pulls.get(status.pull_id) or (next(self._seen), None)
        self._pulls[status.pull_id] = order, status
        if self._ended.pop(status.pull_id, None) is not None:  # its process pulls again
            self._drop("ended", status.pull_id)
        self._put("pull", status.pull_id, {**pull_row(status), "order": order})

    def _drop_pull(self, pull_id: str) -> None:
        known = self._pulls.pop(pull_id, None)
        self._drop("pull", pull_id)
        # How one that was running has ended is not known.
        if known is None or known[1].phase is PullPhase.RUNNING:
            return
        now_s = self.clock()
        self._put("ended", pull_id, {**pull_row(known[1]), "at": round(now_s, 1)})
        self._ended[pull_id] = now_s
        self._ended.move_to_end(pull_id)
        self._forget_ended(now_s)

    def _forget_ended(self, now_s: float) -> None:
        while self._ended:
            pull_id, ended_s = next(iter(self._ended.items()))
            if len(self._ended) <= MAX_ENDED and now_s - ended_s < ENDED_S:
                return
            del self._ended[pull_id]
            self._drop("ended", pull_id)

    async def _forget(self) -> None:
        while True:
            await asyncio.sleep(5.0)
            self._forget_ended(self.clock())

    # -- lists ----------------------------------------------------------------------------------

    async def _poll(self) -> None:
        while True:
            await self._looked_at.wait()
            began_s = self.clock()
            # The streams say that the coordinator is gone, or refuses, and why.
            if self.connection.is_up:
                with contextlib.suppress(MxError):
                    await self._list()
            took_s = self.clock() - began_s
            await asyncio.sleep(max(POLL_S, took_s / _POLL_SHARE))

    async def _list(self) -> None:
        models = await self._client.list_models()
        rows = {model.pinned + str(model.model): model_row(model) for model in models}
        for row_id in self.board.ids("model"):
            if row_id not in rows:
                self._drop("model", row_id)
        for row_id, row in rows.items():
            self._put("model", row_id, row)
        sources = await self._client.list_sources()
        lease_s = max((source.lease_left_s for source in sources), default=0.0)
        for source in sources:
            source_id = source.record.source_id
            if self.board.has("source", source_id):
                row = load_row(source.readers, source.gb_per_s, source.lease_left_s, lease_s)
                self._put("load", source_id, row)
