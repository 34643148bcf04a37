"""Which source a chunk may be read from. Events in, answers out; no IO, no clock.

A chunk is read only from a source that allows it: each source allows everything by default, and
nothing by default once reading is coordinated, unless it is exempt from that: it is read over a
link that no other pull reads over. A chunk that came wrong is not read from the same
source again while another may serve it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


class ReadRights:
    """One pull's. Sets of chunks are bit sets."""

    def __init__(self, chunk_count: int) -> None:
        self._default = self._all = (1 << chunk_count) - 1
        self._allowed: dict[str, int] = {}  # source -> chunks, where it is not the default
        self._refused: dict[int, set[str]] = {}  # chunk -> sources that sent it wrong
        #: Sources that allow everything even then.
        self.exempt: frozenset[str] = frozenset()
        #: True while sources allow nothing by default.
        self.coordinated = False

    def coordinate(self) -> None:
        """Have sources allow nothing by default from now on."""
        if not self.coordinated:
            self.coordinated, self._default = True, 0
            self._allowed.clear()

    def read_freely(self) -> None:
        """Have every source allow everything from now on."""
        self.coordinated, self._default = False, self._all
        self._allowed.clear()

    def allow(self, source: str, chunk: int) -> None:
        """Let the chunk be read from this source."""
        if source not in self.exempt:
            self._allowed[source] = self.allowed(source) | 1 << chunk

    def withdraw(self, source: str, chunk: int) -> None:
        """In coordinated reading, let the chunk not be read from this source any more."""
        if self.coordinated and source not in self.exempt:
            self._allowed[source] = self.allowed(source) & ~(1 << chunk)

    def verified(self, chunk: int) -> None:
        """Let the chunk be read from no source that allows it by name: it is here."""
        for source in self._allowed:
            self._allowed[source] &= ~(1 << chunk)

    def refuse(self, source: str, chunk: int) -> None:
        """Record that the source sent the chunk wrong."""
        self._refused.setdefault(chunk, set()).add(source)

    def allowed(self, source: str) -> int:
        """Return the chunks that the source allows."""
        return self._all if source in self.exempt else self._allowed.get(source, self._default)

    def may_read(self, source: str, chunk: int, sources: Callable[[], Iterable[str]]) -> bool:
        """Return True if the chunk may be read from this source now; `sources` returns those of all
        open connections."""
        if not (self.coordinated or self._refused):
            return True
        if not self.allowed(source) >> chunk & 1:
            return False
        refused = self._refused.get(chunk)
        if not refused or source not in refused:
            return True
        return all(each in refused for each in sources() if self.allowed(each) >> chunk & 1)
