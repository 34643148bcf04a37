"""What the page shows, as rows with numbers: a browser gets those that changed after its number.

Nothing is queued for a browser. A row is kept once, in its latest form, so a slow browser costs as
much as a quick one: when it reads again it gets the latest forms. Pure.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

#: The most rows that are gone and kept for browsers that have not seen their end yet.
MAX_GONE = 8192
#: The most rows of a kind: more than a coordinator lists.
MAX_ROWS = 20_000


@dataclass(frozen=True, slots=True)
class Page:
    """Changes as JSON, `{"put": [[kind, id, row] ...], "gone": [[kind, id] ...]}`, and the number
    up to which they go."""

    text: str
    latest: int


class Board:
    """The rows of all kinds, by kind and id."""

    def __init__(self, max_gone: int = MAX_GONE) -> None:
        self.latest = 0
        #: Ends up to this number may be missing.
        self.forgotten = 0
        self._max_gone = max_gone
        #: The number and the JSON of each row, the oldest change first; None if it is gone.
        self._rows: OrderedDict[tuple[str, str], tuple[int, str | None]] = OrderedDict()
        self._gone: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._ids: dict[str, dict[str, None]] = {}
        self._pages: dict[tuple[int, int], Page] = {}

    def put(self, kind: str, row_id: str, row: Mapping[str, object]) -> bool:
        """Set a row.

        Args:
            kind: Its kind.
            row_id: Its id among its kind.
            row: What JSON can say.

        Returns:
            True if it differs from what it was, and there are not too many of its kind.
        """
        key = kind, row_id
        text = json.dumps([kind, row_id, row], separators=(",", ":"))
        known = self._rows.get(key)
        if known is not None and known[1] == text:
            return False
        ids = self._ids.setdefault(kind, {})
        if row_id not in ids and len(ids) >= MAX_ROWS:
            return False
        self._gone.pop(key, None)
        ids[row_id] = None
        self._set(key, text)
        return True

    def drop(self, kind: str, row_id: str) -> bool:
        """Remove a row. Returns True if there was one."""
        if row_id not in self._ids.get(kind, {}):
            return False
        del self._ids[kind][row_id]
        key = kind, row_id
        self._gone[key] = None
        self._set(key, None)
        while len(self._gone) > self._max_gone:
            oldest, _ = self._gone.popitem(last=False)
            number, _ = self._rows.pop(oldest)
            self.forgotten = max(self.forgotten, number)
        return True

    def ids(self, kind: str) -> list[str]:
        """Return the ids of a kind, the first one first."""
        return list(self._ids.get(kind, ()))

    def has(self, kind: str, row_id: str) -> bool:
        """Return True if there is such a row."""
        return row_id in self._ids.get(kind, ())

    def after(self, number: int, limit: int) -> Page | None:
        """Return the changes after a number, the oldest first.

        Args:
            number: 0 for everything; not less than `forgotten` otherwise.
            limit: The most rows.

        Returns:
            The changes; None if there are none.
        """
        if number >= self.latest:
            return None
        page = self._pages.get((number, limit))  # most browsers are at the same number
        if page is None:
            page = self._pages[number, limit] = self._page(number, limit)
        return page

    def _page(self, number: int, limit: int) -> Page:
        found = list(self._newer(number))[-limit:]
        found.reverse()
        put = ",".join(text for _, _, text in found if text is not None)
        # What is gone means nothing to a browser that begins.
        gone = [key for _, key, text in found if text is None and number]
        latest = found[-1][0] if found else self.latest
        return Page(f'{{"put":[{put}],"gone":{json.dumps(gone)}}}', latest)

    def _newer(self, number: int) -> Iterator[tuple[int, tuple[str, str], str | None]]:
        """Yield the changes after a number, the newest first."""
        for key, (changed, text) in reversed(self._rows.items()):
            if changed <= number:
                return
            yield changed, key, text

    def _set(self, key: tuple[str, str], text: str | None) -> None:
        self.latest += 1
        self._rows[key] = self.latest, text
        self._rows.move_to_end(key)
        self._pages.clear()
