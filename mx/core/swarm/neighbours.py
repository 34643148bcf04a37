"""The neighbours of a peer in a swarm: at most 16 of all peers that the coordinator lists. Events
in, greetings out; no IO, no clock.

If there are more peers than that, each greets a few, in its own order that a hash gives, and
accepts peers that greet it while it has places. The result is a random graph, which stays
connected when peers fail. A full peer drops neighbours that it greeted itself, down to `PICKS`, in
favour of peers that greet it, so that on average a quarter of all places is or becomes free for a
new peer. (Otherwise the first 17 peers, all connected to one another, would be a separate swarm.)

While a fleet starts, a list may have few of its peers, which all greet: those are full, and refuse
most. So a peer gives up after a few refusals, and goes on with others when it has the next list.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import xxhash

#: The most neighbours of a peer, and how many of them it chooses itself if there are many peers.
MOST = 16
PICKS = 6
#: The refusals by list after which a peer greets no more.
REFUSALS = 16


class GreetingAnswer(NamedTuple):
    """The answer to a greeting. `drop` is a neighbour to disconnect from."""

    welcome: bool
    drop: str | None = None


class Neighbours:
    """The neighbours of one peer. Peers are known by names that all agree on (source ids)."""

    def __init__(self, own: str, *, seed: int = 0, most: int = MOST, picks: int = PICKS) -> None:
        """
        Args:
            own: The name of this peer.
            seed: Changes the order in which it greets.
            most: The most neighbours.
            picks: How many it chooses itself if there are many peers; 0: it never greets.
        """
        self._own = own
        self._seed = seed
        self._most = most
        self._picks = picks
        self._ranks: dict[str, int] = {}  # of all listed peers
        self._refused: set[str] = set()  # not to be greeted before all others were
        self._refusals = 0  # since the last list
        self._greeted: set[str] = set()  # peers without an answer so far
        self._linked: dict[str, bool] = {}  # neighbour -> True if this peer greeted it

    @property
    def linked(self) -> tuple[str, ...]:
        """The neighbours."""
        return tuple(self._linked)

    def listed(self, names: Iterable[str]) -> list[str]:
        """Set the list of peers. Earlier refusals are forgotten once all of them have refused.

        Neighbours that are not listed stay: their streams show when they are gone.

        Returns:
            The peers to greet.
        """
        ranks = {name: self._ranks.get(name, -1) for name in names if name != self._own}
        for name, rank in ranks.items():
            if rank < 0:
                text = f"{self._seed}/{self._own}/{name}"
                ranks[name] = xxhash.xxh3_64_intdigest(text.encode())
        self._ranks = ranks
        self._refusals = 0
        self._refused &= ranks.keys()
        if not ranks.keys() - self._refused - self._greeted - self._linked.keys():
            self._refused.clear()
        return self._greet()

    def greeting(self, peer: str) -> GreetingAnswer:
        """Answer another peer's greeting.

        A full peer that chose more than `PICKS` neighbours itself drops one of those for it.
        """
        if peer in self._linked:
            return GreetingAnswer(True)
        drop = None
        if peer not in self._greeted and len(self._linked) + len(self._greeted) >= self._most:
            mine = [name for name, own in self._linked.items() if own]
            if len(mine) + len(self._greeted) <= self._picks or not mine:
                return GreetingAnswer(False)
            drop = max(mine, key=lambda name: (self._ranks.get(name, 1 << 64), name))
            del self._linked[drop]
        self._greeted.discard(peer)
        self._linked[peer] = False
        return GreetingAnswer(True, drop)

    def answered(self, peer: str, welcome: bool) -> list[str]:
        """Record the answer to a greeting. Return the peers to greet next."""
        if peer in self._greeted:
            self._greeted.remove(peer)
            if welcome:
                self._linked[peer] = True
        if not welcome:
            self._linked.pop(peer, None)
            self._refused.add(peer)
            self._refusals += 1
        return self._greet()

    def gone(self, peer: str) -> list[str]:
        """Record that a peer has left or is lost. Return the peers to greet instead."""
        self._linked.pop(peer, None)
        self._greeted.discard(peer)
        self._refused.add(peer)
        return self._greet()

    def _greet(self) -> list[str]:
        few = len(self._ranks) <= self._most
        picks = self._most if few and self._picks else self._picks
        mine = len(self._greeted) + sum(self._linked.values())
        free = self._most - len(self._linked) - len(self._greeted)
        count = min(picks - mine, free) if self._refusals < REFUSALS else 0
        if count <= 0:
            return []
        candidates = [
            (rank, name)
            for name, rank in self._ranks.items()
            if name not in self._linked and name not in self._greeted and name not in self._refused
        ]
        chosen = [name for _, name in sorted(candidates)[:count]]
        self._greeted.update(chosen)
        return chosen
