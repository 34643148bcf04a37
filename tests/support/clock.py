"""Time that stands still until a test moves it."""

from __future__ import annotations


class ManualClock:
    """A monotonic clock in seconds. Call it for `now`, as one calls `time.monotonic`."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> float:
        """Move the time forward and return it. Raises ValueError for a step back."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock does not go back ({seconds:g} s)")
        self._now_s += seconds
        return self._now_s
