"""Which paths a pull keeps open: events in, paths to open out. No IO, and time is an argument.

Each path to a source is an entry in one of five states:

    candidate   it may be opened
    opening     a connection is being made
    live        a connection is open
    resting     it is not used now; `rest` says why, and what brings it back
    excluded    its source sent wrong bytes, or holds something else by now, or what its own process
                has written: never again

In free reading every source that holds everything is a candidate. In coordinated reading only
neighbours are used: sources that were in use when it began, and those that the swarm joins; and
sources on this host that hold everything, whose bytes cross no link that other readers share.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mx.core.paths import Medium
from mx.core.planner import SourcePath, why_not
from mx.errors import (
    DigestError,
    MxError,
    PathError,
    PathSlowError,
    PeerBusyError,
    PeerLostError,
    PeerProtocolError,
    PeerVersionError,
    StaleGenerationError,
)


class ConnectionState(enum.Enum):
    CANDIDATE = "candidate"
    OPENING = "opening"
    LIVE = "live"
    RESTING = "resting"
    EXCLUDED = "excluded"


class ConnectionEvent(enum.Enum):
    OPEN = "open"
    OPENED = "opened"
    REST = "rest"
    RETRY = "retry"
    EXCLUDE = "exclude"


TRANSITIONS = {
    (ConnectionState.CANDIDATE, ConnectionEvent.OPEN): ConnectionState.OPENING,
    (ConnectionState.CANDIDATE, ConnectionEvent.REST): ConnectionState.RESTING,
    (ConnectionState.OPENING, ConnectionEvent.OPENED): ConnectionState.LIVE,
    (ConnectionState.OPENING, ConnectionEvent.REST): ConnectionState.RESTING,
    (ConnectionState.LIVE, ConnectionEvent.REST): ConnectionState.RESTING,
    (ConnectionState.RESTING, ConnectionEvent.REST): ConnectionState.RESTING,
    (ConnectionState.RESTING, ConnectionEvent.RETRY): ConnectionState.CANDIDATE,
    **{(state, ConnectionEvent.EXCLUDE): ConnectionState.EXCLUDED for state in ConnectionState},
}


class Rest(enum.Enum):
    """Why a path rests."""

    SLOW = "slow"  # beside the others; it is used again when nothing else is left
    BUSY = "busy"  # its source admits no more readers: again after a while, under SLOW's condition
    FAILED = "failed"  # it failed: again when its source is found again, and nothing else is left


class PeerLeftError(PeerLostError):
    """Nothing is read from a neighbour any more; it has done nothing wrong."""


#: After these errors the source may still work, and its other paths are tried.
_PATH_ERRORS = (PathError, PeerLostError, PeerProtocolError)


@dataclass(slots=True, eq=False)
class PathEntry:
    """One path, and the state of the connection over it."""

    path: SourcePath
    state: ConnectionState = ConnectionState.CANDIDATE
    rest: Rest | None = None
    retry_at_s: float = 0.0

    @property
    def key(self) -> str:
        return self.path.source.key

    @property
    def in_use(self) -> bool:
        return self.state in (ConnectionState.OPENING, ConnectionState.LIVE)

    def step(self, event: ConnectionEvent) -> None:
        """Change the state. Raises KeyError for an event that the state does not allow."""
        self.state = TRANSITIONS[self.state, event]
        if self.state is not ConnectionState.RESTING:
            self.rest = None


class Connections:
    """One pull's. Not thread-safe; `now_s` are readings of one monotonic clock."""

    def __init__(self, patience_s: float = 0.0, *, local_exempt: bool = True) -> None:
        """
        Args:
            patience_s: How many seconds to wait for busy sources while nothing else is left.
            local_exempt: False coordinates what is read within this host, too.
        """
        self.coordinated = False
        #: False while the sources on this host are slow: others are read from beside them.
        self.supplied = True
        self._local_exempt = local_exempt
        self._patience_s = patience_s
        self._waits_until_s: float | None = None
        self._entries: list[PathEntry] = []  # best first, as they were found
        self._neighbours: set[str] = set()
        self._excluded: set[str] = set()
        self._changed: set[str] = set()  # of these

    # -- questions ------------------------------------------------------------------------------

    @property
    def in_use(self) -> list[PathEntry]:
        return [entry for entry in self._entries if entry.in_use]

    @property
    def idle(self) -> bool:
        """Return True if no path is in use, and none could be without a wait."""
        return not any(
            entry.in_use
            or (entry.state is ConnectionState.CANDIDATE and self._considered(entry))
            or (entry.state is ConnectionState.RESTING and entry.rest is Rest.SLOW)
            for entry in self._entries
        )

    @property
    def network_bytes_per_s(self) -> float:
        """The expected speed of the best path over the network; 0: there is none."""
        paths = [e.path for e in self._entries if e.path.medium is Medium.NETWORK]
        return max((path.gb_per_s * 1e9 for path in paths), default=0.0)

    def excluded(self, key: str) -> bool:
        """Return True for a source that sent wrong bytes, or holds something else by now."""
        return key in self._excluded

    def changed(self, key: str) -> bool:
        """Return True for a source that is excluded since its memory changed: it has not lied."""
        return key in self._changed

    def wants(self, key: str) -> bool:
        """Return True if paths to this source, which holds everything, are of use: it is new, or
        its paths failed and nothing else is left."""
        if key in self._excluded:
            return False
        mine = [entry for entry in self._entries if entry.key == key]
        if any(entry.rest is Rest.BUSY for entry in mine):
            return False
        return not mine or self.idle

    def has_no_path(self, key: str) -> bool:
        """Return True for a neighbour to which no path is left, and for any excluded source."""
        if key in self._excluded:
            return True
        usable = (ConnectionState.CANDIDATE, ConnectionState.OPENING, ConnectionState.LIVE)
        return key in self._neighbours and not any(
            entry.state in usable for entry in self._entries if entry.key == key
        )

    def waits(self, now_s: float) -> bool:
        """Return True while busy sources are worth waiting for. The wait begins with the first call
        of this, and anew with the first call after a connection was opened."""
        if not any(entry.rest is Rest.BUSY for entry in self._entries):
            return False
        if self._waits_until_s is None:
            self._waits_until_s = now_s + self._patience_s
        return now_s < self._waits_until_s

    @property
    def due_s(self) -> float:
        """When `assign` or `waits` may answer otherwise, if nothing happens before."""
        busy = [entry.retry_at_s for entry in self._entries if entry.rest is Rest.BUSY]
        until_s = math.inf if self._waits_until_s is None else self._waits_until_s
        return min([*busy, until_s])

    # -- sources --------------------------------------------------------------------------------

    def add(self, paths: Iterable[SourcePath]) -> None:
        """Add the paths to sources that are wanted (`wants`)."""
        new = [path for path in paths if self.wants(path.source.key)]
        self._forget({path.source.key for path in new})
        self._entries += [PathEntry(path) for path in new]

    def join(self, key: str, paths: Sequence[SourcePath]) -> None:
        """Read from this neighbour beside all others, over those of its paths that go together."""
        if key in self._excluded:
            return
        self._neighbours.add(key)
        if not any(entry.key == key for entry in self.in_use):
            self._forget({key})
            self._entries += [PathEntry(path) for path in paths]

    def leave(self, key: str) -> list[PathEntry]:
        """Read no more from this source. Returns its entries that are in use, for the caller to
        close."""
        self._give_up(key)
        return [entry for entry in self.in_use if entry.key == key]

    def coordinate(self) -> None:
        """Use only neighbours from now on; the sources in use become neighbours."""
        self.coordinated = True
        self._neighbours.update(entry.key for entry in self.in_use)

    def read_freely(self) -> None:
        """Use every source again from now on."""
        self.coordinated = False
        self._neighbours.clear()

    def _give_up(self, key: str) -> None:
        """Let the source's paths that are not in use rest until it is found again."""
        for entry in self._entries:
            unused = entry.state is ConnectionState.CANDIDATE or entry.rest is Rest.SLOW
            if entry.key == key and unused:
                self._lay_to_rest(entry, Rest.FAILED)

    def _forget(self, keys: set[str]) -> None:
        """Remove these sources' paths that are not in use: newer ones take their place."""
        self._entries = [entry for entry in self._entries if entry.in_use or entry.key not in keys]

    def attachable(self) -> list[PathEntry]:
        """Return the candidates whose memory may be mapped, the best first."""
        return [e for e in self._entries if e.path.attach and e.state is ConnectionState.CANDIDATE]

    # -- what became of an entry ----------------------------------------------------------------

    def begin(self, entry: PathEntry) -> None:
        """Record that the caller opens the entry, though `assign` did not return it."""
        entry.step(ConnectionEvent.OPEN)

    def opened(self, entry: PathEntry) -> None:
        """Record that its connection is open."""
        entry.step(ConnectionEvent.OPENED)
        self._waits_until_s = None

    def failed(self, entry: PathEntry, error: MxError | None, now_s: float) -> None:
        """Record that the entry could not be opened; `error` is None if opening was cancelled."""
        if isinstance(error, DigestError | StaleGenerationError) or entry.key in self._excluded:
            self._exclude(entry, error)
        elif isinstance(error, PeerBusyError):
            self._lay_to_rest(entry, Rest.BUSY, now_s + error.retry_after_s)
        else:
            self._lay_to_rest(entry, Rest.FAILED)
            if isinstance(error, PeerVersionError):  # whatever the path
                self._give_up(entry.key)

    def lost(self, entry: PathEntry, error: MxError, now_s: float, *, lease_runs: bool) -> None:
        """Record that the entry's connection was given up. `lease_runs`: its lease still holds, so
        the source did not end it."""
        key = entry.key
        wrong = isinstance(error, DigestError | StaleGenerationError)
        if wrong or key in self._excluded:
            self._exclude(entry, error)
        elif isinstance(error, PathSlowError) and key not in self._neighbours:
            self._lay_to_rest(entry, Rest.SLOW)
        elif isinstance(error, PeerBusyError):
            self._give_up(key)
            self._lay_to_rest(entry, Rest.BUSY, now_s + error.retry_after_s)
        else:
            whole_source = not isinstance(error, (*_PATH_ERRORS, PathSlowError)) or not lease_runs
            self._lay_to_rest(entry, Rest.FAILED)
            if whole_source:
                self._give_up(key)

    def told(self, key: str, error: MxError, now_s: float) -> None:
        """Record what a source says of why it has ended connections that failed before."""
        for entry in self._entries:
            if entry.key == key and entry.rest is Rest.FAILED:
                self.failed(entry, error, now_s)

    def _lay_to_rest(self, entry: PathEntry, rest: Rest, retry_at_s: float = 0.0) -> None:
        entry.step(ConnectionEvent.REST)
        entry.rest, entry.retry_at_s = rest, retry_at_s

    def _exclude(self, gone: PathEntry, error: MxError | None) -> None:
        """Exclude the entry, and its source's others; those in use follow when they are lost."""
        if gone.key not in self._excluded and isinstance(error, StaleGenerationError):
            self._changed.add(gone.key)
        self._excluded.add(gone.key)
        for entry in self._entries:
            if entry is gone or (entry.key == gone.key and not entry.in_use):
                entry.step(ConnectionEvent.EXCLUDE)

    # -- what to open ---------------------------------------------------------------------------

    def assign(self, now_s: float) -> list[PathEntry]:
        """Return the entries to open now, and set them to OPENING.

        Cases, in this order:
        1. Nothing is in use or a candidate: slow paths are candidates again, and in free reading
           busy ones whose time has come. (In coordinated reading a busy source is joined again.)
           Busy ones within this host are, whatever is in use.
        2. A source is excluded, or in coordinated reading no neighbour: its paths stay closed.
        3. A path does not go together with those in use (the same bottleneck, or too little to
           gain): it stays a candidate. A neighbour's path is compared with its own others only, one
           within this host with those within it.
        4. Any other candidate is opened, the best first.
        """
        if not any(e.in_use or self._is_candidate(e) for e in self._entries):  # case 1
            due = not self.coordinated and self.waits(now_s)
            for entry in self._entries:
                busy = entry.rest is Rest.BUSY and due and entry.retry_at_s <= now_s
                if entry.state is ConnectionState.RESTING and (entry.rest is Rest.SLOW or busy):
                    entry.step(ConnectionEvent.RETRY)
        for entry in self._entries:
            if entry.rest is Rest.BUSY and entry.retry_at_s <= now_s and self._exempt(entry):
                entry.step(ConnectionEvent.RETRY)
        opening: list[PathEntry] = []
        in_use = [entry.path for entry in self.in_use]
        for entry in self._entries:
            if not self._is_candidate(entry):  # case 2
                continue
            if why_not(entry.path, self._beside(entry.path, in_use)) is None:  # else case 3
                entry.step(ConnectionEvent.OPEN)  # case 4
                in_use.append(entry.path)
                opening.append(entry)
        return opening

    def _is_candidate(self, entry: PathEntry) -> bool:
        return entry.state is ConnectionState.CANDIDATE and self._considered(entry)

    def _considered(self, entry: PathEntry) -> bool:
        return entry.key not in self._excluded and (
            not self.coordinated or entry.key in self._neighbours or self._exempt(entry)
        )

    def _exempt(self, entry: PathEntry) -> bool:
        """Return True for a path within this host to a source that holds everything."""
        path = entry.path
        return self._local_exempt and path.medium is not Medium.NETWORK and path.source.whole

    def _beside(self, path: SourcePath, in_use: Sequence[SourcePath]) -> list[SourcePath]:
        """Return the paths in use that this one is compared with."""
        key = path.source.key
        if key in self._neighbours:
            return [other for other in in_use if other.source.key == key]
        local = path.medium is not Medium.NETWORK
        if self._local_exempt and (local or not self.supplied):
            return [other for other in in_use if (other.medium is not Medium.NETWORK) is local]
        return [other for other in in_use if other.source.key not in self._neighbours]
