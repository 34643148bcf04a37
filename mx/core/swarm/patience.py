"""How long a pull waits for its peers. Events in, answers out; no IO, and time is an argument."""

from __future__ import annotations

#: A pull that has had no readable peer for this long reads freely.
ALONE_S = 2.0
#: How long a pull waits for peers that hold nothing that it lacks, counted from the last chunk that
#: arrived here or that one of them announced.
HOPE_S = 5.0
#: The same where a peer holds something that is missing.
PATIENCE_S = 30.0


class Patience:
    """One pull's, in coordinated reading. `now_s` are readings of one monotonic clock."""

    def __init__(self, now_s: float) -> None:
        self._news_at_s = now_s
        self._alone_since_s: float | None = None
        self._lost: set[str] = set()  # sources that were lost since the last chunk arrived

    def coordinate(self) -> None:
        """Begin: peers have as long as ever to appear."""
        self._alone_since_s = None

    def landed(self, now_s: float) -> None:
        """Record that a chunk has arrived."""
        self._news_at_s = now_s
        self._lost.clear()

    def announced(self, now_s: float) -> None:
        """Record that a peer has announced chunks."""
        self._news_at_s = now_s

    def joined(self, key: str, now_s: float) -> None:
        """Record a new peer that can be read from."""
        self._alone_since_s = None
        # A source that comes and goes must not keep the pull waiting for ever.
        if key not in self._lost:
            self._news_at_s = now_s

    def lost(self, key: str) -> None:
        """Record that no path to the source is left."""
        self._lost.add(key)

    def until_s(self, *, given: bool) -> float:
        """Return until when peers are worth waiting for; `given`: one holds what is missing."""
        return self._news_at_s + (PATIENCE_S if given else HOPE_S)

    def alone(self, now_s: float, *, readable: bool) -> bool:
        """Return True if there has been no `readable` peer for too long. To be called a few times
        a second."""
        if readable:
            return False
        if self._alone_since_s is None:
            self._alone_since_s = now_s
        return now_s - self._alone_since_s > ALONE_S
