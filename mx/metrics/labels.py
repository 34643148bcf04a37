"""Values of labels that come from elsewhere: few, short, and without control characters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from mx.text import plain

OTHER = "other"
#: How many names have a label of their own at a time.
MOST_NAMES = 200
#: A name that is not there for so long gives its label up: so names that strangers make up become
#: no more than `MOST_NAMES` new series in that time.
KEEP_S = 3600.0
MOST_CHARACTERS = 128


class Names:
    """Gives labels to the first names that it sees, the most frequent first; all others are
    `OTHER`. Not thread-safe; `now_s` is in seconds on any clock that does not go back."""

    def __init__(self, most: int = MOST_NAMES, keep_s: float = KEEP_S) -> None:
        """
        Args:
            most: How many names have a label of their own at a time.
            keep_s: How long a name that is not there keeps its label.
        """
        self._most = most
        self._keep_s = keep_s
        self._seen_s: dict[str, float] = {}

    def labelled(self, counts: Mapping[str, float], now_s: float) -> dict[str, float]:
        """Return the counts by label.

        Args:
            counts: By name.
            now_s: The time.
        """
        for name, seen_s in list(self._seen_s.items()):
            if name in counts:
                self._seen_s[name] = now_s
            elif now_s - seen_s > self._keep_s:
                del self._seen_s[name]
        found: Counter[str] = Counter()
        for name in sorted(counts, key=lambda name: (-counts[name], name)):
            if name not in self._seen_s and len(self._seen_s) < self._most:
                self._seen_s[name] = now_s
            label = plain(name)[:MOST_CHARACTERS] if name in self._seen_s else OTHER
            found[label] += counts[name]  # type: ignore[assignment]
        return dict(found)
