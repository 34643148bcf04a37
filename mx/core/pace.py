"""How fast a connection is: an estimate at first, then a moving average of what came over it."""

from __future__ import annotations

#: The weight of the past when a part completes: the last eight or so make the average, more than
#: complete at once over the streams of a connection.
_KEPT = 0.88
#: A part that completes within this fraction of a part's usual time belongs to the same burst as
#: the one before, as with parallel streams. A burst has at most so many parts.
_TOGETHER, _MOST_TOGETHER = 0.25, 8
#: The estimate where nothing is known: 1 GB/s.
_UNKNOWN_BYTES_PER_S = 1e9


class Pace:
    """The pace of one connection. `now_s` are readings of one monotonic clock.

    The average is of decayed bytes over decayed busy time, so that parts which complete in
    bursts, as those of parallel streams do, do not look like fast ones and slow ones. Bytes and
    time decay between bursts, never within one: a burst's time is counted with its first part, and
    when it decayed while the other parts completed, four streams looked 22% faster than one.
    """

    __slots__ = ("_nbytes", "_seconds", "_since_s", "_together", "bytes_per_s", "measured_nbytes")

    def __init__(self, estimate_bytes_per_s: float, weight_nbytes: int) -> None:
        """The estimate counts as much as `weight_nbytes` of measured transfer."""
        rate = estimate_bytes_per_s if estimate_bytes_per_s > 0 else _UNKNOWN_BYTES_PER_S
        self._nbytes = float(weight_nbytes)
        self._seconds = weight_nbytes / rate
        self._since_s = 0.0
        self._together = 1  # parts of the present burst
        self.measured_nbytes = 0
        #: The average over the parts that have completed.
        self.bytes_per_s = self._nbytes / self._seconds

    def busy_from(self, now_s: float) -> None:
        """Start the clock: the connection was idle, and has a read from now on."""
        self._since_s = now_s

    def completed(self, nbytes: int, now_s: float) -> None:
        """Count a part of `nbytes` that has landed."""
        elapsed_s = max(now_s - self._since_s, 0.0)
        together = elapsed_s * self.bytes_per_s < nbytes * _TOGETHER
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
        self.bytes_per_s = self._nbytes / max(self._seconds, 1e-9)

    def doubt(self, asked_nbytes: int, now_s: float) -> None:
        """Lower the estimate if by it all of `asked_nbytes`, the reads in flight, would have landed
        by now. Does nothing once a part has completed."""
        elapsed_s = now_s - self._since_s
        if not self.measured_nbytes and asked_nbytes > 0:
            self._seconds = max(self._seconds, self._nbytes * elapsed_s / asked_nbytes)
            self.bytes_per_s = self._nbytes / max(self._seconds, 1e-9)

    def now_bytes_per_s(self, now_s: float, landed_nbytes: int) -> float:
        """Return the pace of a busy connection: the average, with the bytes of incomplete parts
        that have landed since. It falls as long as nothing lands."""
        seconds = self._seconds * _KEPT + max(now_s - self._since_s, 0.0)
        return min(self.bytes_per_s, (self._nbytes * _KEPT + landed_nbytes) / max(seconds, 1e-9))
