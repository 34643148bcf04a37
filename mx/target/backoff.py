"""Ways to sources that have as many readers as they admit: asked again when nobody else is left."""

from __future__ import annotations

import time
from collections.abc import Callable

from mx.core.planner import SourcePath


class Backoff:
    """One pull's. `patience_s` is for how long nobody but busy sources may be there before the
    pull gives up; it is counted anew once something was read."""

    def __init__(self, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._retry_at_s: dict[SourcePath, float] = {}
        self._until_s: float | None = None

    def put(self, path: SourcePath, retry_after_s: float) -> None:
        """Its source is to be asked again, after this many seconds."""
        self._retry_at_s[path] = self._clock() + retry_after_s

    def of(self, source_id: str) -> bool:
        """Is it one that is waited for?"""
        return any(path.source.source_id == source_id for path in self._retry_at_s)

    def due(self) -> list[SourcePath]:
        """Take out those that may be asked again by now."""
        now_s = self._clock()
        due = [path for path, at_s in self._retry_at_s.items() if at_s <= now_s]
        for path in due:
            del self._retry_at_s[path]
        return due

    def hope(self) -> bool:
        """Nobody else is left: are these waited for? The wait begins when this is first asked."""
        if not self._retry_at_s:
            return False
        now_s = self._clock()
        if self._until_s is None:
            self._until_s = now_s + self._patience_s
        return now_s < self._until_s

    def reading(self) -> None:
        """Somebody is being read from."""
        self._until_s = None
