"""The changes of reported pulls that watchers have not seen yet: the latest state of each. Pure.

A watcher has a number, that of the last change that it has seen, and no copy of any change.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from mx.core.pull_status import PullStatus
from mx.errors import CapacityError
from mx.records import record

#: How many ended pulls are kept for each that is shown at most.
_GONE_PER_PULL = 2


@record(frozen=True, slots=True)
class PullChange:
    """The last change of one pull: what it reports now, or None if it does not report any more."""

    number: int
    pull_id: str
    status: PullStatus | None
    name: str  # the model's, also once it is gone


class PullChanges:
    """The last change of each pull, in order, for any number of watchers."""

    def __init__(self, limit: int) -> None:
        """`limit` is the most pulls that report at a time."""
        self.latest = 0
        #: Changes up to this number may be missing: those of pulls that are gone.
        self.forgotten = 0
        self._max_gone = _GONE_PER_PULL * limit
        self._last: OrderedDict[str, PullChange] = OrderedDict()
        self._gone: OrderedDict[str, None] = OrderedDict()

    def push(self, before: PullStatus | None, status: PullStatus) -> None:
        """Record a report. One that differs from the last by the time alone is no change."""
        same = before is not None and replace(before, seconds=status.seconds) == status
        if not same or status.pull_id not in self._last:
            self._gone.pop(status.pull_id, None)
            self._put(PullChange(self.latest + 1, status.pull_id, status, status.model.name))

    def drop(self, pull_id: str) -> None:
        """Record that a pull reports no more."""
        known = self._last[pull_id]
        self._put(PullChange(self.latest + 1, pull_id, None, known.name))
        self._gone[pull_id] = None
        while len(self._gone) > self._max_gone:
            gone, _ = self._gone.popitem(last=False)
            self.forgotten = max(self.forgotten, self._last.pop(gone).number)

    def _put(self, change: PullChange) -> None:
        self.latest = change.number
        self._last[change.pull_id] = change
        self._last.move_to_end(change.pull_id)

    def after(self, number: int, name: str = "") -> list[PullChange]:
        """Return the pulls that have changed after `number`, the oldest change first.

        Args:
            number: The last change that the watcher has seen; 0 for what is there now.
            name: The model's name; "" for all.

        Raises:
            CapacityError: The watcher has read so slowly that the end of a pull is no longer kept.
        """
        if 0 < number < self.forgotten:
            raise CapacityError("this watch was read too slowly", hint="watch again")
        found = []
        for change in reversed(self._last.values()):
            if change.number <= number:
                break
            if name in ("", change.name) and (number or change.status is not None):
                found.append(change)
        return found[::-1]
