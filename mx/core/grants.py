"""Who holds a source's grants, what they do with them, and which of them make room. Pure: `now_s`
is given.

A grant is held by a connection, and a connection comes from an address. A connection is one
reader: a pull opens all of its grants at a source over one, and an identity that a request names
could be anybody's. What a grant has moved is told from outside; one that moves nothing has to give
its place to a newcomer soon, and ends by itself after a longer while.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from mx.units import KIB

#: A pull has a grant for each transport that it reads one source by.
MOST_PER_CONNECTION = 16
#: Less than this is not progress: one byte a second would hold a place for ever.
LEAST_PROGRESS_BYTES = 64 * KIB
#: Whoever moves nothing for so long makes room for a newcomer where there is none.
YIELD_S = 3.0
#: A grant that moves nothing ends after this in any case.
IDLE_S = 60.0
#: Pulls that trade chunks with this source wait for their turn, or for chunks to arrive here: the
#: same two limits for them.
TRADING_YIELD_S = 30.0
TRADING_IDLE_S = 300.0


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks for a grant. `reader_id` is what the pull calls itself; "" if it has no name."""

    connection: str
    address: str
    reader_id: str = ""


@dataclass(frozen=True, slots=True)
class GrantBounds:
    """How many grants there may be: of the whole process, of one address, of one connection."""

    total: int = 1024
    per_address: int = 512
    per_connection: int = MOST_PER_CONNECTION


@dataclass(slots=True)
class _Held:
    grant_id: str
    principal: Principal
    moved_nbytes: int
    moved_at_s: float


class GrantBook:
    """One process's grants. `max_readers` is how many connections may hold some; 0: any number."""

    def __init__(self, bounds: GrantBounds, max_readers: int = 0) -> None:
        self._bounds = bounds
        self._max_readers = max_readers
        self._held: dict[str, _Held] = {}
        self._grants: Counter[str] = Counter()  # by connection
        self._trading: Counter[tuple[str, str]] = Counter()  # (address, reader id)

    @property
    def readers(self) -> int:
        """How many connections hold grants."""
        return len(self._grants)

    def open(self, grant_id: str, principal: Principal, now_s: float) -> None:
        self._held[grant_id] = _Held(grant_id, principal, 0, now_s)
        self._grants[principal.connection] += 1

    def close(self, grant_id: str) -> None:
        """Idempotent."""
        held = self._held.pop(grant_id, None)
        if held is not None:
            connection = held.principal.connection
            self._grants[connection] -= 1
            if not self._grants[connection]:
                del self._grants[connection]

    def grants_of(self, connection: str) -> int:
        """How many grants a connection holds."""
        return self._grants[connection]

    def moved(self, grant_id: str, nbytes: int, now_s: float) -> None:
        """What a grant has moved since it was opened."""
        held = self._held.get(grant_id)
        if held is not None and nbytes >= held.moved_nbytes + LEAST_PROGRESS_BYTES:
            held.moved_nbytes, held.moved_at_s = nbytes, now_s

    def trades(self, principal: Principal, change: int) -> None:
        """A pull begins (+1) or ends (-1) to trade chunks with this source. One that was dialled
        from here has no address: it is not known where it reads from."""
        key = (principal.address, principal.reader_id)
        self._trading[key] += change
        if self._trading[key] <= 0:
            del self._trading[key]

    def full_for(self, principal: Principal) -> bool:
        """Return True if a pull of this name and address reads nothing here and may not begin."""
        names = {(h.principal.address, h.principal.reader_id) for h in self._held.values()}
        full = 0 < self._max_readers <= self.readers
        return full and (principal.address, principal.reader_id) not in names

    def make_room(self, principal: Principal, now_s: float) -> list[str] | None:
        """Which grants end so that this one may be opened.

        Args:
            principal: Who asks.
            now_s: The time.

        Returns:
            Their ids, mostly none; None where there is no room and nobody has to make any.
        """
        bounds, ending = self._bounds, set[str]()
        if self._grants[principal.connection] >= bounds.per_connection:
            return None
        if not self._grants[principal.connection] and 0 < self._max_readers <= self.readers:
            reader = self._idlest_reader(now_s)
            if reader is None:
                return None
            ending |= {i for i, h in self._held.items() if h.principal.connection == reader}
        for bound, counts in (
            (bounds.per_address, lambda held: held.principal.address == principal.address),
            (bounds.total, lambda held: True),
        ):
            staying = [h for i, h in self._held.items() if i not in ending and counts(h)]
            if len(staying) >= bound:
                grant_id = self._idlest(staying, now_s)
                if grant_id is None:
                    return None
                ending.add(grant_id)
        return sorted(ending)

    def idle(self, now_s: float) -> list[str]:
        """The grants that have moved nothing for too long, whether their place is wanted or not."""
        return [
            held.grant_id
            for held in self._held.values()
            if self._over_s(held, now_s, IDLE_S, TRADING_IDLE_S) >= 0
        ]

    def _over_s(self, held: _Held, now_s: float, limit_s: float, trading_s: float) -> float:
        """By how much a grant's time without progress exceeds what it may be."""
        name = held.principal.reader_id
        keys = ((held.principal.address, name), ("", name))
        trades = bool(name) and any(key in self._trading for key in keys)
        return now_s - held.moved_at_s - (trading_s if trades else limit_s)

    def _yields_s(self, held: _Held, now_s: float) -> float:
        return self._over_s(held, now_s, YIELD_S, TRADING_YIELD_S)

    def _idlest_reader(self, now_s: float) -> str | None:
        """The connection all of whose grants have to make room, and have had to for longest."""
        over_s: dict[str, float] = {}
        for held in self._held.values():
            one_s = self._yields_s(held, now_s)
            connection = held.principal.connection
            over_s[connection] = min(over_s.get(connection, one_s), one_s)
        late = [connection for connection, seconds in over_s.items() if seconds >= 0]
        return max(late, key=lambda connection: over_s[connection], default=None)

    def _idlest(self, held: Iterable[_Held], now_s: float) -> str | None:
        """A grant that has to make room; of a connection that holds many before others."""
        over_s = {each.grant_id: self._yields_s(each, now_s) for each in held}
        late = [i for i, seconds in over_s.items() if seconds >= 0]
        return max(
            late,
            key=lambda i: (self._grants[self._held[i].principal.connection], over_s[i]),
            default=None,
        )
