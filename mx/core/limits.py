"""What a source gives at most: readers at a time, and bytes per second. Pure: `now_s` is given.

A source sends through one token bucket for all of its readers; where readers fetch for themselves
(one-sided transports) each has a bucket of its own, filled at its share of the rate.
"""

from __future__ import annotations

from dataclasses import dataclass

from mx.units import KIB, MIB

#: What a bucket holds, in seconds of its rate: enough for a sleep that takes longer than asked.
BURST_S = 0.05
#: A reader's share is never less: below it, its slices would come so rarely that it took the
#: source for stalled.
LEAST_BYTES_PER_S = 64 * KIB
#: Who is refused is to ask again after this at the soonest,
RETRY_S = 0.5
#: one after the other at this distance, so that a crowd costs the source no more than that,
RETRY_SPACING_S = 0.05
#: and none of them after more than this.
RETRY_MOST_S = 10.0
_LEAST_SLICE = 64 * KIB
_MOST_SLICE = 4 * MIB
_SLICE_S = 0.01


@dataclass(frozen=True, slots=True)
class Bounds:
    """What was asked for; 0 is no bound."""

    max_readers: int = 0
    max_bytes_per_s: int = 0


def slice_nbytes(bytes_per_s: float) -> int:
    """How much is sent in one go at that rate: a hundredth of a second's worth, so that readers
    take turns quickly, within 64 KiB and 4 MiB."""
    return int(min(max(bytes_per_s * _SLICE_S, _LEAST_SLICE), _MOST_SLICE))


class TokenBucket:
    """Holds at most `BURST_S` of its rate. Bytes may be taken that are not there yet: then whoever
    takes waits until they would be, so that those who take in turn are served in turn."""

    def __init__(self, bytes_per_s: float, now_s: float) -> None:
        """Begins full. `bytes_per_s` is positive."""
        self._rate = bytes_per_s
        self._tokens = bytes_per_s * BURST_S
        self._at_s = now_s

    @property
    def bytes_per_s(self) -> float:
        return self._rate

    def set_rate(self, bytes_per_s: float, now_s: float) -> None:
        """From now on at this rate. Who waits already, waits as long as it was told."""
        self._fill(now_s)
        self._rate = bytes_per_s

    def take(self, nbytes: int, now_s: float) -> float:
        """Take bytes; returns how many seconds to wait before they are sent."""
        self._fill(now_s)
        self._tokens -= nbytes
        return max(0.0, -self._tokens / self._rate)

    def _fill(self, now_s: float) -> None:
        passed_s, self._at_s = max(0.0, now_s - self._at_s), max(now_s, self._at_s)
        self._tokens = min(self._rate * BURST_S, self._tokens + passed_s * self._rate)


class Retries:
    """Says when those that were refused may ask again, one after the other."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def after_s(self, now_s: float) -> float:
        """The seconds after which the one that is refused now may ask again."""
        at_s = max(self._next_s, now_s + RETRY_S)
        self._next_s = min(at_s + RETRY_SPACING_S, now_s + RETRY_MOST_S)
        return min(at_s - now_s, RETRY_MOST_S)


def grant_share(bytes_per_s: float, readers: int, grants: int) -> float:
    """What one grant gets of a rate that is split evenly among `readers`, of a reader that has
    `grants` of them; without any, those of the first one to come."""
    return max(bytes_per_s / max(1, readers) / max(1, grants), LEAST_BYTES_PER_S)
