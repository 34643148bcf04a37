"""How many connections a pull reads each source through. Pure: time, bytes and the processor's time
are arguments.

It begins with two. Half as many more are opened (one more of two or three) for as long as the last
ones have made the pull faster by more than a tenth, in one of two measurements, and a core is free
for another one. One at a time would end at ten, where even the best one more adds a tenth. None is
ever closed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mx.core.paths import FIRST_STREAMS
from mx.units import MIB

#: Where the number follows the rate: how many at most, to all sources.
MOST_STREAMS = 16
#: What more connections have to multiply the rate by.
FASTER = 1.1
#: A rate is measured over so long, and so many bytes: steps that land at once are few of these.
WINDOW_S, WINDOW_NBYTES = 0.1, 128 * MIB
#: The pause between two looks.
LOOK_S = WINDOW_S


@dataclass(slots=True, eq=False)
class StreamGrowth:
    """The growth of one pull. `now_s` are readings of one monotonic clock."""

    streams: int  # that each source is to be read through
    most: int  # to all sources
    cores: int  # that this process may use
    due_s: float  # when to look next
    _bytes_per_s: float = 0.0  # with fewer connections
    _missed: bool = False  # it was not faster, which may have been other work on the machine
    #: When the window began, and with how many bytes and seconds of the processor.
    _began: tuple[float, int, float] | None = None

    @classmethod
    def of(cls, streams: int | str, cores: int, now_s: float) -> StreamGrowth:
        """Return the growth for the setting `streams`: none, if that is a number and not "auto"."""
        if isinstance(streams, int):
            return cls(streams, streams, cores, math.inf)
        return cls(FIRST_STREAMS, MOST_STREAMS, cores, now_s + LOOK_S)

    def look(self, now_s: float, nbytes: int, busy_s: float, streams: Sequence[int]) -> None:
        """Raise `streams`, if that is likely to make the pull faster. To be called when `due_s` has
        come.

        Args:
            now_s: The time.
            nbytes: The bytes that have landed so far.
            busy_s: The processor time that this process has taken so far.
            streams: How many connections are open to each source to which more can be.
        """
        self.due_s = now_s + LOOK_S
        before, self._began = self._began, (now_s, nbytes, busy_s)
        if before is None or min(streams, default=0) < self.streams:  # as some were refused
            return
        passed_s, came = now_s - before[0], nbytes - before[1]
        if passed_s < WINDOW_S or came < WINDOW_NBYTES:
            self._began = before
            return
        more = min(self.streams + max(1, self.streams // 2), self.most // len(streams))
        faster = came > FASTER * self._bytes_per_s * passed_s
        if more <= self.streams or (self._missed and not faster):
            self.due_s = math.inf
        elif not faster:
            self._missed = True
        elif busy_s - before[2] <= (self.cores - 1) * passed_s:
            self.streams, self._bytes_per_s, self._began = more, came / passed_s, None
            self._missed = False
