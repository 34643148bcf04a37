"""The grants of a source: which connection holds each, what it has moved, and which ones end when
a new one needs their place. Pure: `now_s` is an argument.

A grant is held by a connection, and a connection is of a principal: of the one that its certificate
names, else of the address that it comes from. A connection counts as one
reader: a pull opens all of its grants at a source over one connection, while any process could
claim the reader id of another. The caller reports what each grant has moved. A grant that moves
nothing yields its place to a new one soon, and ends by itself after a longer while.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from mx.units import KIB

#: A pull has one grant for each transport that it uses to read from one source.
MOST_PER_CONNECTION = 16
#: Fewer bytes than this are not progress: else one byte a second would hold a place for ever.
LEAST_PROGRESS_BYTES = 64 * KIB
#: At a bound, a grant that has moved nothing for this long ends in favour of a new one.
YIELD_S = 3.0
#: A grant that has moved nothing for this long ends in any case.
IDLE_S = 60.0
#: The same two limits for pulls that trade chunks with this source: they wait for their turn, or
#: for chunks to arrive here.
TRADING_YIELD_S = 30.0
TRADING_IDLE_S = 300.0


@dataclass(frozen=True, slots=True)
class Principal:
    """The reader that requests a grant. `reader_id` is the pull's own id, "" if it gives none;
    `name` is the principal that its certificate names, "" without one."""

    connection: str
    address: str
    reader_id: str = ""
    name: str = ""

    @property
    def payer(self) -> str:
        """Whom its grants are counted for: its principal, else its address."""
        return self.name or self.address


@dataclass(frozen=True, slots=True)
class GrantBounds:
    """The most grants that the process, one principal and one connection may have."""

    total: int = 1024
    per_principal: int = 512
    per_connection: int = MOST_PER_CONNECTION


@dataclass(slots=True)
class _GrantEntry:
    grant_id: str
    principal: Principal
    moved_nbytes: int
    moved_at_s: float


class GrantBook:
    """The grants of one process."""

    def __init__(self, bounds: GrantBounds, max_readers: int = 0) -> None:
        """
        Args:
            bounds: The most grants there may be.
            max_readers: The most connections that may hold grants; 0: any number.
        """
        self._bounds = bounds
        self._max_readers = max_readers
        self._held: dict[str, _GrantEntry] = {}
        self._grants: Counter[str] = Counter()  # by connection
        self._trading: Counter[tuple[str, str]] = Counter()  # (address, reader id)

    @property
    def readers(self) -> int:
        """The number of connections that hold grants."""
        return len(self._grants)

    def open(self, grant_id: str, principal: Principal, now_s: float) -> None:
        """Add a grant. The caller has ended the grants that `admit` named."""
        self._held[grant_id] = _GrantEntry(grant_id, principal, 0, now_s)
        self._grants[principal.connection] += 1

    def close(self, grant_id: str) -> None:
        """Remove a grant. Idempotent."""
        held = self._held.pop(grant_id, None)
        if held is not None:
            connection = held.principal.connection
            self._grants[connection] -= 1
            if not self._grants[connection]:
                del self._grants[connection]

    def grants_of(self, connection: str) -> int:
        """Return the number of grants that a connection holds."""
        return self._grants[connection]

    def moved(self, grant_id: str, nbytes: int, now_s: float) -> None:
        """Record the bytes that a grant has moved since it was opened."""
        held = self._held.get(grant_id)
        if held is not None and nbytes >= held.moved_nbytes + LEAST_PROGRESS_BYTES:
            held.moved_nbytes, held.moved_at_s = nbytes, now_s

    def trades(self, principal: Principal, change: int) -> None:
        """Record that a pull begins (+1) or ends (-1) to trade chunks with this source.

        A pull that this process dialled has no address: the address that it reads from is unknown.
        """
        key = (principal.address, principal.reader_id)
        self._trading[key] += change
        if self._trading[key] <= 0:
            del self._trading[key]

    def full_for(self, principal: Principal) -> bool:
        """Return True if this pull holds no grant here and there is no place for another reader."""
        names = {(h.principal.address, h.principal.reader_id) for h in self._held.values()}
        full = 0 < self._max_readers <= self.readers
        return full and (principal.address, principal.reader_id) not in names

    def admit(self, principal: Principal, now_s: float) -> list[str] | None:
        """Decide whether this reader may open a grant, and which grants end for it.

        Returns:
            The ids of the grants that have to end first, mostly none; None if the reader is
            refused, because a bound is reached and no grant has been idle for long enough.
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
            (bounds.per_principal, lambda held: held.principal.payer == principal.payer),
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
        """Return the grants that have moved nothing for too long, wanted places or not."""
        return [
            held.grant_id
            for held in self._held.values()
            if self._over_s(held, now_s, IDLE_S, TRADING_IDLE_S) >= 0
        ]

    def _over_s(self, held: _GrantEntry, now_s: float, limit_s: float, trading_s: float) -> float:
        """Return by how many seconds a grant's time without progress exceeds its limit."""
        name = held.principal.reader_id
        keys = ((held.principal.address, name), ("", name))
        trades = bool(name) and any(key in self._trading for key in keys)
        return now_s - held.moved_at_s - (trading_s if trades else limit_s)

    def _yields_s(self, held: _GrantEntry, now_s: float) -> float:
        return self._over_s(held, now_s, YIELD_S, TRADING_YIELD_S)

    def _idlest_reader(self, now_s: float) -> str | None:
        """Return the connection whose grants are all past `YIELD_S`, and have been for longest."""
        over_s: dict[str, float] = {}
        for held in self._held.values():
            one_s = self._yields_s(held, now_s)
            connection = held.principal.connection
            over_s[connection] = min(over_s.get(connection, one_s), one_s)
        late = [connection for connection, seconds in over_s.items() if seconds >= 0]
        return max(late, key=lambda connection: over_s[connection], default=None)

    def _idlest(self, held: Iterable[_GrantEntry], now_s: float) -> str | None:
        """Return a grant past `YIELD_S`, of the connection that holds the most grants."""
        over_s = {each.grant_id: self._yields_s(each, now_s) for each in held}
        late = [i for i, seconds in over_s.items() if seconds >= 0]
        return max(
            late,
            key=lambda i: (self._grants[self._held[i].principal.connection], over_s[i]),
            default=None,
        )
