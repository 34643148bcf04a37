"""Who talks to whom in a swarm: at most 16 neighbours each, out of all peers that the coordinator
lists. Events in, greetings out; no IO, no clock.

Where there are more peers than that, each greets a few, in an order of its own that a hash gives,
and takes in those that greet it while it has places: a random graph, which holds together when
any of its members die. Nobody keeps more than `PICKS` of its own greetings where others want in,
so that on average a quarter of all places is free or is made free: a newcomer finds one. (Without
that the first 17, who all know each other, would be a swarm of their own.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import xxhash

#: Neighbours that a peer has at most, and greetings of its own that lead to them.
MOST = 16
PICKS = 6


class Answer(NamedTuple):
    """To a greeting. `drop` is a neighbour that is one no more: close its streams, tell it."""

    welcome: bool
    drop: str | None = None


class Neighbours:
    """One peer's. Peers are known by names that all agree on (source ids)."""

    def __init__(self, own: str, *, seed: int = 0, most: int = MOST, picks: int = PICKS) -> None:
        """`picks=0`: never greets, as an origin."""
        self._own = own
        self._seed = seed
        self._most = most
        self._picks = picks
        self._ranks: dict[str, int] = {}  # of all that are listed
        self._refused: set[str] = set()  # by whom, since the last list
        self._greeted: set[str] = set()  # without an answer so far
        self._linked: dict[str, bool] = {}  # neighbour -> was it we who greeted

    @property
    def linked(self) -> tuple[str, ...]:
        return tuple(self._linked)

    def listed(self, names: Iterable[str]) -> list[str]:
        """All peers there are now. Returns whom to greet; refusals of the past are forgotten.
        Neighbours that are not listed stay: their streams say when they are gone."""
        ranks = {name: self._ranks.get(name, -1) for name in names if name != self._own}
        for name, rank in ranks.items():
            if rank < 0:
                text = f"{self._seed}/{self._own}/{name}"
                ranks[name] = xxhash.xxh3_64_intdigest(text.encode())
        self._ranks = ranks
        self._refused.clear()
        return self._greet()

    def greeting(self, peer: str) -> Answer:
        """Another greets us: is it a neighbour from now on? Whoever greeted more than `PICKS`
        when there were few makes place."""
        if peer in self._linked:
            return Answer(True)
        drop = None
        if peer not in self._greeted and len(self._linked) + len(self._greeted) >= self._most:
            mine = [name for name, own in self._linked.items() if own]
            if len(mine) + len(self._greeted) <= self._picks or not mine:
                return Answer(False)
            drop = max(mine, key=lambda name: (self._ranks.get(name, 1 << 64), name))
            del self._linked[drop]
        self._greeted.discard(peer)
        self._linked[peer] = False
        return Answer(True, drop)

    def answered(self, peer: str, welcome: bool) -> list[str]:
        """What became of our greeting. Returns whom to greet instead."""
        if peer in self._greeted:
            self._greeted.remove(peer)
            if welcome:
                self._linked[peer] = True
        if not welcome:
            self._linked.pop(peer, None)
            self._refused.add(peer)
        return self._greet()

    def gone(self, peer: str) -> list[str]:
        """The peer is dead or has left us. Returns whom to greet instead."""
        self._linked.pop(peer, None)
        self._greeted.discard(peer)
        self._refused.add(peer)
        return self._greet()

    def _greet(self) -> list[str]:
        few = len(self._ranks) <= self._most
        picks = self._most if few and self._picks else self._picks
        mine = len(self._greeted) + sum(self._linked.values())
        free = self._most - len(self._linked) - len(self._greeted)
        count = min(picks - mine, free)
        if count <= 0:
            return []
        able = [
            (rank, name)
            for name, rank in self._ranks.items()
            if name not in self._linked and name not in self._greeted and name not in self._refused
        ]
        chosen = [name for _, name in sorted(able)[:count]]
        self._greeted.update(chosen)
        return chosen
