"""Which memory of this process mx fills or lends: nothing is filled that is in use already."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable
from itertools import islice, starmap
from operator import itemgetter, le, lt

from mx.errors import ConfigError

#: Half-open ranges of addresses.
Ranges = list[tuple[int, int]]


class Claim:
    """Ranges of memory that one pull fills, or one source lends, until `release`."""

    def __init__(self, ranges: Ranges, what: str, *, fills: bool) -> None:
        self.ranges, self.what, self.fills = ranges, what, fills

    def release(self) -> None:
        """Give the ranges up. Idempotent."""
        with _lock:
            if self in _claims:
                _claims.remove(self)


_lock = threading.Lock()
_claims: list[Claim] = []


def claim(ranges: Ranges, what: str, *, fills: bool, beside: Claim | None = None) -> Claim:
    """Claim memory, to fill it or to lend it. Any number of sources may lend the same memory.

    Args:
        ranges: Half-open ranges of addresses, as `merged` returns them.
        what: Who claims it, for the error that another one gets.
        fills: Whether it is to be filled.
        beside: A claim of the same claimant's, which may have some of it.

    Raises:
        ConfigError: Some of it is filled by another pull, or is to be filled and is lent.
    """
    new = Claim(ranges, what, fills=fills)
    with _lock:
        for other in _claims:
            if other is not beside and (fills or other.fills) and overlap(new.ranges, other.ranges):
                raise ConfigError(
                    f"some of these tensors' memory is in use: {other.what}",
                    hint="close that one first, or give other tensors",
                )
        _claims.append(new)
    return new


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return ranges ascending, without empty ones and without overlaps."""
    found: Ranges = []
    ascending = sorted(ranges)
    if all(starmap(lt, ascending)) and are_apart(ascending):  # as those of many tensors are
        return ascending
    for begin, end in ascending:
        if begin == end:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def are_apart(ascending: Ranges) -> bool:
    """Return True if no range overlaps the next one. They ascend by where they begin."""
    begins = islice(map(itemgetter(0), ascending), 1, None)
    return all(map(le, map(itemgetter(1), ascending), begins))


def overlap(some: Ranges, others: Ranges) -> bool:
    """Return True if any two ranges share a byte. Both are ascending, without overlaps."""
    if len(some) > len(others):
        some, others = others, some
    for begin, end in some:
        at = bisect_right(others, begin, key=lambda each: each[0])
        if (at and others[at - 1][1] > begin) or (at < len(others) and others[at][0] < end):
            return True
    return False
