"""Keeps a pull's ways in use: opens those that go together, replaces those that are lost."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from mx.core.planner import Plan, SourcePath, why_not
from mx.errors import (
    ConfigError,
    DigestError,
    MxError,
    PathError,
    PathSlowError,
    PeerBusyError,
    PeerLostError,
    PeerProtocolError,
    StaleGenerationError,
)
from mx.target.backoff import Backoff
from mx.target.connector import Connector, OpenPath
from mx.target.report import LeftSource
from mx.target.transfer import Transfer

#: After these the source may be as well as ever, and its other ways worth a try.
_PATH_ERRORS = (PathError, PeerLostError, PeerProtocolError)
#: How often lanes are looked at that may have become too slow to wait for.
TICK_S = 0.25


class _PartedError(PeerLostError):
    """A neighbour is not read from any more: nothing is wrong with it."""


class ConnectionPool:
    """One pull's, on the loop.

    `open_way` connects one way; `add` makes a lane of what that gave, and numbers it. `causes`
    collects why ways failed.
    """

    def __init__(
        self,
        plan: Plan,
        connector: Connector,
        open_path: Callable[[SourcePath], Coroutine[Any, Any, OpenPath]],
        add: Callable[[OpenPath], int],
        causes: list[MxError],
        patience_s: float = 0.0,
    ) -> None:
        self._candidates = list(plan.paths)  # best first
        self._connector = connector
        self._open_path = open_path
        self._add = add
        self._causes = causes
        self._changed = asyncio.Event()
        self._lost: dict[int, MxError] = {}  # lanes that the engine gave up
        self._opening: dict[SourcePath, asyncio.Task[OpenPath]] = {}
        self._live: dict[int, OpenPath] = {}
        self._useless: list[OpenPath] = []  # open, but could not be made a lane of
        self._resting: list[SourcePath] = []  # too slow beside the others: better than nothing
        self._aside: list[SourcePath] = []  # not used as long as there is a swarm
        self._neighbours: set[str] = set()  # sources that are read from beside all others
        self._busy = Backoff(patience_s)
        self._left: dict[str, str] = {}  # endpoint -> why
        self._coordinated = self._hopeless = False
        self._met = {path.source.source_id for path in plan.paths}
        self._complaints: set[tuple[SourcePath, str]] = set()
        self._banned: set[str] = set()  # sources that lied, or hold something else by now
        self.expecting: Callable[[], bool] = lambda: False  # may more sources come?
        self.hoping: Callable[[], bool] = lambda: False  # nobody is left: are they waited for?
        self.none_left: Callable[[], None] = lambda: None  # no source that is known to be whole
        self.source_lost: Callable[[str], None] = lambda source_id: None  # no way to it is left
        self._fatal: BaseException | None = None
        self._transfer: Callable[[], Transfer | None] = lambda: None

    async def run(self, ended: Callable[[], bool], transfer: Callable[[], Transfer | None]) -> None:
        """Until the pull has ended, or nobody is there to begin it with. `engine` gives the
        pull's, once there is one. Raises what no other way would mend."""
        self._transfer = transfer
        ticking = asyncio.create_task(self._tick(transfer), name="mx-tick")
        try:
            while not ended():
                self._changed.clear()
                while self._useless:
                    await self._connector.give_back(self._useless.pop())
                for number in sorted(self._lost):
                    await self._replace(number, self._lost.pop(number))
                self._fill()
                if self._fatal is not None:
                    raise self._fatal
                if self.idle and not self._coordinated:
                    self.none_left()
                reading = transfer()
                # Neighbours may be there and have nothing that is missing.
                stuck = self.idle or self._coordinated
                if stuck and not self.expecting() and not self._hopes():
                    if reading is None:
                        return
                    self._hopeless = True
                    reading.no_more_connections()
                elif self._hopeless and reading is not None:  # reads that were lost have yet to end
                    self._hopeless = False
                    reading.expect_connections()
                if not ended():
                    await self._changed.wait()
        finally:
            ticking.cancel()
            await asyncio.gather(ticking, return_exceptions=True)

    def _hopes(self) -> bool:
        """Nobody is being read from: is anybody waited for? Both waits begin, and end, together."""
        return any((self.hoping(), self._busy.hope()))

    async def _tick(self, transfer: Callable[[], Transfer | None]) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            reading = transfer()
            if reading is not None:
                reading.tick()
            if self._coordinated or not self._live:
                self._changed.set()  # what was hoped for may be hopeless by now

    def wake(self) -> None:
        """The pull has ended."""
        self._changed.set()

    def connection_lost(self, number: int, error: MxError) -> None:
        """The engine gave a lane up."""
        self._lost[number] = error
        self._changed.set()

    def take(self, opened: OpenPath) -> None:
        """Use a link that is open already."""
        self._candidates.remove(opened.path)
        self._live[self._add(opened)] = opened

    def leave_out(self, path: SourcePath) -> None:
        """It was tried, and is of no use, or of none for now."""
        self._candidates.remove(path)
        for cause in self._causes:
            if isinstance(cause, PeerBusyError) and cause.peer == path.source.endpoint:
                self._busy.put(path, cause.retry_after_s)

    def left(self) -> list[LeftSource]:
        """The sources that were left, or could not be used, and are not in use now; and why."""
        in_use = {opened.path.source.endpoint for opened in self._live.values()}
        return [LeftSource(*each) for each in self._left.items() if each[0] not in in_use]

    # -- those that are found later ---------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Is nobody being read from, nor about to be?"""
        return not (self._candidates or self._resting or self._opening or self._live)

    def bans(self, source_id: str) -> bool:
        """Did it lie, or is it known to hold something else by now?"""
        return source_id in self._banned

    def wants(self, source_id: str) -> bool:
        """Is a source of use that is known to hold the model? If it is new; one that was given up
        only if there is nobody else. One that lied, or changed, never is."""
        if source_id in self._banned or self._busy.of(source_id):
            return False
        return source_id not in self._met or self.idle

    def add_candidates(self, paths: Sequence[SourcePath]) -> None:
        """Ways to sources that are wanted, to be used as those of the plan are."""
        new = [path for path in paths if self.wants(path.source.source_id)]
        self._met.update(path.source.source_id for path in new)
        if self._coordinated:
            aside = [w for w in new if w.source.source_id not in self._neighbours]
            self._aside += [w for w in aside if w not in self._aside]
            new = [w for w in new if w.source.source_id in self._neighbours]
        self._candidates += new
        if new:
            self._changed.set()

    # -- in a swarm -----------------------------------------------------------------------------

    def coordinate(self, source_ids: Iterable[str] = ()) -> None:
        """From now on only neighbours are read from; those that are in use, and these, are some."""
        self._coordinated = True
        self._neighbours.update(source_ids, (path.source.source_id for path in self._in_use()))
        self._aside += [w for w in self._candidates if w.source.source_id not in self._neighbours]
        self._candidates = [w for w in self._candidates if w not in self._aside]

    def read_freely(self) -> None:
        """There is no swarm: use what there was without one."""
        self._coordinated = False
        self._neighbours.clear()
        self._candidates, self._aside = self._candidates + self._aside, []
        self._changed.set()

    def join(self, source_id: str, paths: Sequence[SourcePath]) -> None:
        """Read from this source beside all others, by the ways that go together."""
        if source_id in self._banned:
            return
        self._neighbours.add(source_id)
        if all(path.source.source_id != source_id for path in self._in_use()):
            self._give_up(source_id)
            self._candidates += paths
        self._changed.set()

    def leave(self, source_id: str) -> None:
        """Read from it no more."""
        self._give_up(source_id)
        for path, task in self._opening.items():
            if path.source.source_id == source_id:
                task.cancel()
        reading = self._transfer()
        for number, opened in list(self._live.items()):
            if reading is not None and opened.path.source.source_id == source_id:
                peer = opened.lease.peer
                reading.connection_lost(number, _PartedError(f"{peer} was left", peer=peer))
        self._changed.set()

    def _in_use(self) -> list[SourcePath]:
        return [*(opened.path for opened in self._live.values()), *self._opening]

    def _beside(self, path: SourcePath, in_use: Sequence[SourcePath]) -> list[SourcePath]:
        """Those that a way has to go together with: of a neighbour, only its own."""
        source_id = path.source.source_id
        if source_id in self._neighbours:
            return [other for other in in_use if other.source.source_id == source_id]
        return [other for other in in_use if other.source.source_id not in self._neighbours]

    # -- ways -----------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Open whatever goes together with what is in use."""
        if not (self._candidates or self._opening or self._live):
            self._candidates, self._resting = self._resting, []
            # In a swarm one is asked again when it is greeted again.
            if not self._coordinated and self._busy.hope():
                self._candidates += self._busy.due()
        in_use = self._in_use()
        for path in list(self._candidates):
            if why_not(path, self._beside(path, in_use)) is None:
                self._candidates.remove(path)
                in_use.append(path)
                task = asyncio.create_task(self._open_path(path), name="mx-open-way")
                self._opening[path] = task
                task.add_done_callback(functools.partial(self._opened, path))

    def _opened(self, path: SourcePath, task: asyncio.Task[OpenPath]) -> None:
        self._opening.pop(path, None)
        if task.cancelled():
            self._look_after(path.source.source_id)  # it may be wanted again by now
            self._changed.set()
            return
        error = task.exception()
        if error is None:
            opened = task.result()
            try:
                self._live[self._add(opened)] = opened
                self._busy.reading()
            except MxError as refused:  # such as memory that can't be registered
                self._useless.append(opened)
                error = refused
        if isinstance(error, StaleGenerationError):
            self._banned.add(path.source.source_id)
        if isinstance(error, PeerBusyError):
            self._busy.put(path, error.retry_after_s)
        if isinstance(error, MxError):
            self._left[path.source.endpoint] = error.message
        if isinstance(error, MxError) and not isinstance(error, ConfigError):
            if (path, error.message) not in self._complaints:  # it may be tried again and again
                self._complaints.add((path, error.message))
                self._causes.append(error)
        elif error is not None:
            self._fatal = error
        self._look_after(path.source.source_id)
        self._changed.set()

    async def _replace(self, number: int, error: MxError) -> None:
        opened = self._live.pop(number, None)
        if opened is None:
            return
        source_id = opened.path.source.source_id
        if not isinstance(error, _PartedError):
            self._left[opened.path.source.endpoint] = error.message
        if isinstance(error, DigestError | StaleGenerationError):
            self._banned.add(source_id)
        if isinstance(error, PathSlowError):
            if source_id not in self._neighbours:
                self._resting.append(opened.path)
        elif isinstance(error, PeerBusyError):
            self._give_up(source_id)
            self._busy.put(opened.path, error.retry_after_s)
        elif not isinstance(error, _PATH_ERRORS) or opened.lease.check() is not None:
            self._give_up(source_id)
        await self._connector.give_back(opened)
        self._look_after(source_id)

    def _look_after(self, source_id: str) -> None:
        """Tell of a neighbour to which no way is left, and of any source that is banned."""
        left = [*self._candidates, *self._in_use()]
        gone = source_id in self._neighbours and all(w.source.source_id != source_id for w in left)
        if gone or source_id in self._banned:
            self.source_lost(source_id)

    def _give_up(self, source_id: str) -> None:
        """Nothing more is begun with a source: it stopped, changed, lied, or gave no more."""
        self._candidates = [w for w in self._candidates if w.source.source_id != source_id]
        self._resting = [w for w in self._resting if w.source.source_id != source_id]

    async def close(self) -> None:
        """Stop opening; what is open stays its `Links`'."""
        self.source_lost = lambda source_id: None
        opening = list(self._opening.values())
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
