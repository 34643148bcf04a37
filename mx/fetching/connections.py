"""Opens and closes a pull's connections, and looks for more sources. `mx.core.connections` decides
over which paths."""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Callable, Sequence

from mx.core.connections import Connections, PathEntry, PeerLeftError
from mx.core.planner import Plan
from mx.core.reasons import PathReason, Why, reason_of
from mx.core.types import SourceRecord, cover
from mx.errors import (
    ChunkElsewhereError,
    ConfigError,
    MxError,
    NoSourceError,
    PeerLostError,
    PeerRefusedError,
)
from mx.fetching.connector import Connector
from mx.fetching.edition import EditionLog
from mx.fetching.events import EventLog
from mx.fetching.reads import Connection
from mx.fetching.report import LeftSource, superseded
from mx.fetching.resolver import FIRST_S, LONGEST_S
from mx.fetching.transfer import Transfer
from mx.runtime import set_by
from mx.swarm.sharing import Sharing
from mx.tasks import end_tasks
from mx.transport import AdoptsPlaces, ScatteredView
from mx.units import format_seconds
from mx.wire.client import LocatedModel
from mx.wire.locate import Locator

#: Pause between look-ups while there is a source to read from,
ORDINARY_S = 1.0
#: longer where there are many: each of them that still pulls looks them up.
SOURCES_PER_S = 50.0
#: ... and no longer than this: a coordinator says how many there are.
LONGEST_ORDINARY_S = 60.0
#: Sources on links of this pull's own are enough if they will be done within this time,
SOON_S = 10.0
#: or if its share of the network should be no more than so many times as fast: few networks are as
#: fast as their interfaces say.
NOMINAL = 4.0


def ordinary_pause_s(source_count: int) -> float:
    """Return how long to pause between look-ups of a model with so many sources."""
    return min(max(ORDINARY_S, source_count / SOURCES_PER_S), LONGEST_ORDINARY_S)


class ConnectionPool:
    """One pull's; on the loop. `edition.changed` wakes it."""

    def __init__(
        self,
        connections: Connections,
        connector: Connector,
        transfer: Transfer,
        sharing: Sharing,
        locator: Locator,
        located: LocatedModel,
        plan: Callable[[Sequence[SourceRecord]], Plan],
        edition: EditionLog,
        log: EventLog,
        causes: list[MxError],
        *,
        wait_s: float = 0.0,
        stores_follow: bool = False,
    ) -> None:
        """
        Args:
            connections: The states of the paths; the pool adds those to new sources.
            connector: Opens and closes connections.
            transfer: Reads through them.
            sharing: Says which peers to read from.
            locator: Looks more sources up.
            located: The model.
            plan: Finds the paths to sources.
            edition: Says when the pull has ended, and which connections were lost.
            log: Records when reading begins, and when a wait for a source does.
            causes: Collects why paths failed, and which waits were in vain.
            wait_s: How long to wait for a source while there is none.
            stores_follow: True if the transfer goes on without sources: then it does not fail for
                want of connections.
        """
        self._stores_follow = stores_follow
        self._connections = connections
        self._connector = connector
        self._transfer = transfer
        self._sharing = sharing
        self._locator = locator
        self._located = located
        self._plan = plan
        self._edition = edition
        self._log = log
        self._causes = causes
        #: Set once a path was opened, or could not be, or there is none.
        self.tried = asyncio.Event()
        self._opening: dict[PathEntry, asyncio.Task[Connection]] = {}
        self._live: dict[int, tuple[PathEntry, Connection]] = {}
        self._useless: list[Connection] = []  # open, but the transfer can't read through them
        self._joined: dict[str, object] = {}  # neighbours, and their streams
        self._shared_links: set[str] = set()  # over which other pulls read, too
        self._exempt: frozenset[str] = frozenset()  # sources that all is read from
        self._weigh_at_s = math.inf
        self._left: dict[str, PathReason] = {}  # endpoint -> why
        self._complaints: set[tuple[str, str, str]] = set()
        self._fatal: BaseException | None = None
        self._hopeless = self._closed = False
        self._wait_s = wait_s
        self._until_s = -math.inf  # when the present wait for a source ends
        self._came_then = -1  # bytes, when it began
        self._hurry = asyncio.Event()  # to look for sources: it has begun
        self._stuck = (
            False  # at the last look, the name meant other weights, and these were not whole
        )

    # -- the pool's work --------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep connections open until the pull has ended, or none could be opened to begin with,
        or none is left and stores follow. It sleeps until something happens, or a machine is due.
        Raises errors that any other path would have too."""
        edition = self._edition
        while not edition.ended:
            edition.changed.clear()
            now_s = time.monotonic()
            if self._transfer.due_s <= now_s:
                self._transfer.tick()
            while self._useless:
                await self._connector.give_back(self._useless.pop())
            for number in sorted(edition.lost):
                await self._lose(number, edition.lost.pop(number))
            self._check_leases()
            if self._sharing.begun:
                self._weigh(now_s)
            self._follow_swarm()
            self._open()
            if not self._opening:
                self.tried.set()
            if self._fatal is not None:
                raise self._fatal
            if self._connections.idle and not self._sharing.coordinated:
                self._sharing.no_whole_source()
            if not self._expects_more(now_s):
                await self._hear()
                # Who is busy is worth a wait, and a source may have come meanwhile.
                if not self._expects_more(time.monotonic()) and not self._give_up():
                    return
            if not edition.ended:
                await set_by(edition.changed, self._due_s(now_s))

    def _due_s(self, now_s: float) -> float:
        """Return when there is next something to do, if nothing happens before."""
        named = (
            self._transfer.due_s,
            self._weigh_at_s,
            self._connections.due_s,
            self._sharing.waits_until_s,
            self._until_s,
        )
        return min((each for each in named if each > now_s), default=math.inf)

    def _expects_more(self, now_s: float) -> bool:
        """Return True while chunks are read, or may still be."""
        # In coordinated reading connections may be open, and none may read what is missing.
        if not (self._connections.idle or self._sharing.coordinated):
            return self._resume()
        if now_s < self._sharing.waits_until_s:  # peers come first
            return self._resume()
        # These waits begin at their first call, so that both are called.
        for_new = self._waits_for_new(now_s)
        for_busy = self._connections.waits(now_s)
        return (for_new or for_busy) and self._resume()

    async def _hear(self) -> None:
        """Hear the last words of the sources whose connections are lost: a transport may notice
        that before the lease says why."""
        for key, error in await self._connector.last_words():
            self._causes.append(error)
            self._connections.told(key, error, time.monotonic())

    def _resume(self) -> bool:
        if self._hopeless:  # reads that were lost have yet to end
            self._hopeless = False
            self._transfer.expect_connections()
        return True

    def _give_up(self) -> bool:
        """Expect no more connections. Returns False if no connection was ever open, or if stores
        follow."""
        if self._stores_follow or not self._transfer.started:
            return False
        self._hopeless = True
        self._transfer.no_more_connections()
        return True

    def left(self) -> list[LeftSource]:
        """Return the sources that were given up, or could not be used, and are not in use now."""
        in_use = {entry.path.source.endpoint for entry, _ in self._live.values()}
        return [LeftSource(*each) for each in self._left.items() if each[0] not in in_use]

    async def close(self) -> None:
        """Stop opening connections. The `Connector` closes those that are open."""
        self._closed = True
        await end_tasks(*self._opening.values())

    # -- sources that come later ------------------------------------------------------------------

    def _waits_for_new(self, now_s: float) -> bool:
        """Return True while a new source is worth waiting for. The wait begins with the first call,
        and anew with the first call after more bytes have come."""
        if self._wait_s <= 0:
            return False
        came = self._transfer.landed_nbytes()
        if came > self._came_then:
            self._came_then = came
            self._until_s = now_s + self._wait_s
            self._hurry.set()
            self._log.waiting()
        if now_s < self._until_s:
            return True
        waited = format_seconds(self._wait_s)
        self._causes.append(NoSourceError(f"no other source came within {waited}"))
        return False

    async def look(self) -> None:
        """Look for sources until cancelled, more often while there is none."""
        pause_s = ORDINARY_S
        while True:
            hurried = await set_by(self._hurry, time.monotonic() + pause_s)
            self._hurry.clear()
            idle = self._connections.idle
            # A peer that the user named lists no other sources while it is read from.
            if idle or self._locator.asks_coordinator:
                await self._look()
            if not idle:
                pause_s = ordinary_pause_s(self._locator.source_count)
            elif hurried:
                pause_s = FIRST_S
            else:
                pause_s = min(2 * pause_s, LONGEST_S)

    async def _look(self) -> None:
        """Add the paths to new sources."""
        try:
            sources = await self._locator.again(self._located)
        except MxError:  # `look` does so again, and running reads don't depend on it
            return
        new = [each for each in sources if each.whole and self._connections.wants(each.key)]
        if new:
            self._connections.add(self._plan(new).paths)
        self._sharing.met(sources)
        self._look_ahead(sources)
        self._edition.changed.set()

    def _look_ahead(self, sources: Sequence[SourceRecord]) -> None:
        """End the pull if its weights can't be obtained whole any more, and the name means others
        that can. At the second look: what sources hold is said a little late. A source that is not
        listed any more may still be read from to its end."""
        newest, before, self._stuck = self._locator.superseded_by, self._stuck, False
        if newest is None:
            return
        listed = {each.key for each in sources}
        reads_on = any(entry.key not in listed for entry, _ in self._live.values())
        self._stuck = not reads_on and not cover(sources, self._transfer.holdings.layers())
        if before and self._stuck:
            self._edition.broken(superseded(self._located.model, newest))

    # -- connections ------------------------------------------------------------------------------

    def take(self, connection: Connection, entry: PathEntry) -> None:
        """Read through an open connection. Raises MxError if its session can't use the arena."""
        if connection.lease.coordinated:
            self._sharing.shared(connection.path.medium)
        now_s = connection.opened_at_s = time.monotonic()
        arena = self._transfer.arena
        if not isinstance(arena, ScatteredView):
            connection.session.adopt(arena)
        elif isinstance(connection.session, AdoptsPlaces):  # else each read stands for itself
            connection.session.adopt_places(arena)
        self._log.reading_began(now_s)
        number = self._transfer.add_connection(connection)
        self._connections.opened(entry)
        self._live[number] = entry, connection
        self._sharing.reading_began()

    def _open(self) -> None:
        layout = self._transfer.manifest.layout
        for entry in self._connections.assign(time.monotonic()):
            work = self._connector.open(entry.path, layout)
            task = asyncio.create_task(work, name="mx-open-path")
            self._opening[entry] = task
            task.add_done_callback(functools.partial(self._opened, entry))

    def _opened(self, entry: PathEntry, task: asyncio.Task[Connection]) -> None:
        del self._opening[entry]
        self.tried.set()
        error = None if task.cancelled() else task.exception()
        if not task.cancelled() and error is None:
            try:
                self.take(task.result(), entry)
                self._edition.changed.set()
                return
            except MxError as refused:  # such as memory that can't be registered
                self._useless.append(task.result())
                error = refused
        known = error if isinstance(error, MxError) else None
        self._connections.failed(entry, known, time.monotonic())
        if known is not None:
            self._left[entry.path.source.endpoint] = reason_of(known)
        if known is not None and not isinstance(known, ConfigError):
            complaint = (entry.key, entry.path.label, known.message)
            if complaint not in self._complaints:  # it may be tried again and again
                self._complaints.add(complaint)
                self._causes.append(known)
        elif error is not None:
            self._fatal = error
        self._report_lost(entry.key)
        self._edition.changed.set()

    async def _lose(self, number: int, error: MxError) -> None:
        """Close a connection that the transfer gave up."""
        entry, connection = self._live.pop(number, (None, None))
        if entry is None or connection is None:
            return
        if not isinstance(error, PeerLeftError | ChunkElsewhereError):
            self._left[connection.peer] = reason_of(error)
        lease_runs = connection.lease.check() is None
        self._connections.lost(entry, error, time.monotonic(), lease_runs=lease_runs)
        ended = isinstance(error, PeerLostError | PeerRefusedError)
        lost = ended and not isinstance(error, PeerLeftError)
        await self._connector.give_back(connection, lost=lost)
        self._report_lost(entry.key)

    def _check_leases(self) -> None:
        """Give up connections whose lease is lost. (Sinks do so too, but an idle one has none.)"""
        for number, (_, connection) in list(self._live.items()):
            error = connection.lease.check()
            if error is not None:
                self._transfer.connection_lost(number, error)
            elif connection.lease.coordinated:
                self._sharing.shared(connection.path.medium)

    # -- the swarm ------------------------------------------------------------------------------

    def _weigh(self, now_s: float) -> None:
        """Exempt sources on links that no other pull reads over from coordination, and read over
        others only if those are slow."""
        live = [(entry.path.source, connection) for entry, connection in self._live.values()]
        self._shared_links |= {c.link for _, c in live if c.link and c.lease.coordinated}
        own = [
            (source.key, connection.bytes_per_s)
            for source, connection in live
            if source.whole and self._sharing.is_own(connection.link, self._shared_links)
        ]
        exempt = frozenset(key for key, _ in own)
        if exempt != self._exempt:
            self._exempt = exempt
            self._transfer.exempt(exempt)
        rate = sum(bytes_per_s for _, bytes_per_s in own)
        share = self._connections.network_bytes_per_s / (1 + self._sharing.rivals)
        enough = not own or share <= rate * NOMINAL
        if not enough:
            whole_nbytes = self._transfer.manifest.layout.payload_nbytes
            enough = whole_nbytes - self._transfer.landed_nbytes() <= rate * SOON_S
        self._connections.supplied = enough
        self._sharing.supplied(bool(own) and enough)
        self._weigh_at_s = now_s + ORDINARY_S if own and share else math.inf

    def _follow_swarm(self) -> None:
        """Follow the swarm: coordinated or free reading, and which peers to read from."""
        if self._sharing.coordinated and not self._connections.coordinated:
            self._connections.coordinate()
            self._joined.clear()
        elif not self._sharing.coordinated and self._connections.coordinated:
            self._connections.read_freely()
        peers = self._sharing.reading_from
        for key in [each for each in self._joined if each not in peers]:
            del self._joined[key]
            if key not in self._exempt:
                self._leave(key)
        for key, (stream, record) in peers.items():
            if self._joined.get(key) != stream:
                self._joined[key] = stream
                self._connections.join(key, self._plan([record]).paths)

    def _leave(self, key: str) -> None:
        entries = self._connections.leave(key)
        for entry in entries:
            if entry in self._opening:
                self._opening[entry].cancel()
        for number, (entry, connection) in list(self._live.items()):
            if entry in entries:
                left = PeerLeftError(Why.LEFT(connection.peer), peer=connection.peer)
                self._transfer.connection_lost(number, left)

    def _report_lost(self, key: str) -> None:
        # Neighbours go on reading here after the pull: its end is no reason to leave them.
        if not self._closed and self._connections.has_no_path(key):
            if self._connections.changed(key):
                self._sharing.gives_no_more(key)
            else:
                self._sharing.lost(key, for_good=self._connections.excluded(key))
