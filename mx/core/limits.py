"""The bounds of a source: readers at a time, and bytes per second. Pure: `now_s` is an argument.

A source sends through one token bucket for all of its readers. Readers of one-sided transports
fetch for themselves; each of them has its own bucket, filled at its share of the rate.
"""

from __future__ import annotations

from typing import NamedTuple

from mx.units import KIB, MIB

#: The capacity of a bucket, in seconds of its rate: covers a sleep that lasts longer than asked.
BURST_S = 0.05
#: The least share of a reader: below it, slices would come so rarely that the reader would take
#: the source for stalled.
LEAST_BYTES_PER_S = 64 * KIB
#: The shortest time after which a refused reader may retry.
RETRY_S = 0.5
#: The time between the retries of two refused readers, which bounds what a crowd costs the source.
RETRY_SPACING_S = 0.05
#: The longest time after which a refused reader may retry.
RETRY_MOST_S = 10.0
_LEAST_SLICE = 64 * KIB
_MOST_SLICE = 4 * MIB
_SLICE_S = 0.01


class Bounds(NamedTuple):
    """The bounds that the user sets; 0 is no bound."""

    max_readers: int = 0
    max_bytes_per_s: int = 0


def slice_nbytes(bytes_per_s: float) -> int:
    """Return how many bytes to send in one go at a rate: those of a hundredth of a second, within
    64 KiB and 4 MiB, so that readers take turns quickly."""
    return int(min(max(bytes_per_s * _SLICE_S, _LEAST_SLICE), _MOST_SLICE))


class TokenBucket:
    """A token bucket that holds at most `BURST_S` of its rate.

    A caller may take bytes that are not there yet, and then waits until they would be. So callers
    are served in the order in which they take.
    """

    def __init__(self, bytes_per_s: float, now_s: float) -> None:
        """Begin full. `bytes_per_s` is positive."""
        self._rate = bytes_per_s
        self._tokens = bytes_per_s * BURST_S
        self._at_s = now_s

    @property
    def bytes_per_s(self) -> float:
        return self._rate

    def set_rate(self, bytes_per_s: float, now_s: float) -> None:
        """Change the rate. Delays that `take` has returned stay as they are."""
        self._fill(now_s)
        self._rate = bytes_per_s

    def take(self, nbytes: int, now_s: float) -> float:
        """Take bytes. Return how many seconds to wait before sending them."""
        self._fill(now_s)
        self._tokens -= nbytes
        return max(0.0, -self._tokens / self._rate)

    def _fill(self, now_s: float) -> None:
        passed_s, self._at_s = max(0.0, now_s - self._at_s), max(now_s, self._at_s)
        self._tokens = min(self._rate * BURST_S, self._tokens + passed_s * self._rate)


class Retries:
    """Spreads the retries of refused readers over time."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def after_s(self, now_s: float) -> float:
        """Return the seconds after which a reader that is refused now may retry."""
        at_s = max(self._next_s, now_s + RETRY_S)
        self._next_s = min(at_s + RETRY_SPACING_S, now_s + RETRY_MOST_S)
        return min(at_s - now_s, RETRY_MOST_S)


def grant_share(bytes_per_s: float, readers: int, grants: int) -> float:
    """Return one grant's share, in bytes per second, of a rate that readers share evenly.

    Args:
        bytes_per_s: The rate of the source.
        readers: The number of readers; 0 counts as the first one to come.
        grants: The number of grants of this reader, which share its part; 0 counts as one.
    """
    return max(bytes_per_s / max(1, readers) / max(1, grants), LEAST_BYTES_PER_S)
