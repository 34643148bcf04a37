"""Decides when a receiver reads freely, without requests: readers that hold all slots of a source
and do not read can delay a pull, but not stop it. Pure: time is an argument."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

#: A receiver begins to read freely when no chunk has landed for this long ...
FREE_S = 6.0
#: ... and for the time that a chunk takes at this rate, since a link may be slow.
LEAST_BYTES_PER_S = 1e6


def free_after_s(chunk_nbytes: int) -> float:
    """Return how long a receiver waits for a chunk of this size before it reads freely."""
    return FREE_S + chunk_nbytes / LEAST_BYTES_PER_S


class FreeReading:
    """The free reading of one receiver.

    It begins when no chunk has landed for `after_s`. It ends when a chunk has landed for which a
    whole source gave a slot.
    """

    def __init__(self, after_s: float = FREE_S) -> None:
        self.after_s = after_s
        self.on = False
        self._quiet_since_s: float | None = None
        self._chosen: Counter[int] = Counter()

    def landed(self, now_s: float) -> None:
        """Record that a chunk has landed, from any source."""
        self._quiet_since_s = now_s

    def slot_given(self) -> None:
        """Record that a chunk has landed for which a whole source gave a slot."""
        self.on = False

    def due(self, now_s: float) -> bool:
        """Return True if a chunk is to be read freely now. Call this a few times a second."""
        if self._quiet_since_s is None:
            self._quiet_since_s = now_s
        if now_s - self._quiet_since_s > self.after_s:
            self.on = True
        return self.on

    def choose(self, sources: Mapping[int, bool]) -> int:
        """Return the source to read from: origins in turn, before other sources that are whole.

        Args:
            sources: The numbers of the whole sources; True for an origin.
        """
        source = min(
            sources, key=lambda number: (not sources[number], self._chosen[number], number)
        )
        self._chosen[source] += 1
        return source
