"""How fast a path is: an estimate at first, then a moving average of what came over it."""

from __future__ import annotations

#: How much of the past each completed part leaves: the last eight or so make the average, more
#: than come at once over the streams of a path.
_KEPT = 0.88
#: A part that completes within this fraction of what a part takes came together with the one
#: before, as those of parallel streams do. Not more than so many in a row.
_TOGETHER, _MOST_TOGETHER = 0.25, 8
#: What is believed of a path of which nothing is known: 1 GB/s.
_UNKNOWN_BYTES_PER_S = 1e9


class Pace:
    """One path's. `now_s` is any monotonic clock's.

    The average is of decayed bytes over decayed busy time, so that parts which complete in
    bursts, as those of parallel streams do, do not look like fast ones and slow ones. Bytes and
    time decay between bursts, never within one: the time that a burst took comes with its first
    part, and fading beneath the others' bytes made four streams look 22% faster than one.
    """

    __slots__ = ("_nbytes", "_seconds", "_since_s", "_together", "measured_nbytes")

    def __init__(self, estimate_bytes_per_s: float, weight_nbytes: int) -> None:
        """The estimate counts as much as `weight_nbytes` of measured transfer."""
        rate = estimate_bytes_per_s if estimate_bytes_per_s > 0 else _UNKNOWN_BYTES_PER_S
        self._nbytes = float(weight_nbytes)
        self._seconds = weight_nbytes / rate
        self._since_s = 0.0
        self._together = 1  # parts of the present burst
        self.measured_nbytes = 0

    def busy_from(self, now_s: float) -> None:
        """The path had nothing to do, and has from now on."""
        self._since_s = now_s

    def completed(self, nbytes: int, now_s: float) -> None:
        elapsed_s = max(now_s - self._since_s, 0.0)
        together = elapsed_s * self.bytes_per_s() < nbytes * _TOGETHER
        if together and self._together < _MOST_TOGETHER:
            self._together += 1
        else:
            kept = _KEPT**self._together
            self._nbytes *= kept
            self._seconds *= kept
            self._together = 1
        self._nbytes += nbytes
        self._seconds += elapsed_s
        self._since_s = now_s
        self.measured_nbytes += nbytes

    def doubt(self, asked_nbytes: int, now_s: float) -> None:
        """So much was asked for, and nothing has come yet: an estimate by which all would have is
        too high. Does nothing once something was measured."""
        elapsed_s = now_s - self._since_s
        if not self.measured_nbytes and asked_nbytes > 0:
            self._seconds = max(self._seconds, self._nbytes * elapsed_s / asked_nbytes)

    def bytes_per_s(self) -> float:
        """The average over what has completed."""
        return self._nbytes / max(self._seconds, 1e-9)

    def now_bytes_per_s(self, now_s: float, landed_nbytes: int) -> float:
        """Of a busy path: the average, with what has landed since without having completed. A
        path that has stopped is believed less and less."""
        seconds = self._seconds * _KEPT + max(now_s - self._since_s, 0.0)
        return min(self.bytes_per_s(), (self._nbytes * _KEPT + landed_nbytes) / max(seconds, 1e-9))
