"""When a receiver reads without asking, so that a source whose slots are all held by readers that
do not read can delay a pull, not stop it. Pure: time is an argument."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

#: A receiver that nothing has come to for so long begins to read without asking, ...
FREE_S = 6.0
#: ... or for the time that a chunk takes at this rate beside it: on a slow link that is no wonder.
LEAST_BYTES_PER_S = 1e6


def free_after_s(chunk_nbytes: int) -> float:
    """How long a receiver of such chunks waits for one."""
    return FREE_S + chunk_nbytes / LEAST_BYTES_PER_S


class FreeReading:
    """One receiver's. It begins when nothing has come for long, and ends when a whole source has
    given a slot again, and its chunk has come."""

    def __init__(self, after_s: float = FREE_S) -> None:
        self.after_s = after_s
        self.on = False
        self._quiet_since_s: float | None = None
        self._chosen: Counter[int] = Counter()

    def landed(self, now_s: float) -> None:
        """A chunk has come, from wherever."""
        self._quiet_since_s = now_s

    def slot_given(self) -> None:
        """A chunk has come that a whole source gave a slot for."""
        self.on = False

    def due(self, now_s: float) -> bool:
        """Is a chunk to be read without asking? To be called a few times a second."""
        if self._quiet_since_s is None:
            self._quiet_since_s = now_s
        if now_s - self._quiet_since_s > self.after_s:
            self.on = True
        return self.on

    def choose(self, sources: Mapping[int, bool]) -> int:
        """The source to read from: origins (true) in turn, before others that hold everything."""
        source = min(
            sources, key=lambda number: (not sources[number], self._chosen[number], number)
        )
        self._chosen[source] += 1
        return source
