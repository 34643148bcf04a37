"""Sends no faster than the limiter of an exposure's options allows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from mx.transport import Limiter, Span
from mx.units import KIB

Some = TypeVar("Some", memoryview, Span)

#: Shorter slices cost more in calls than they gain in fairness.
LEAST_SLICE = 16 * KIB
#: How often a pause looks whether it is still of use.
_LOOK_S = 0.1


def pause(seconds: float, ended: Callable[[], bool]) -> None:
    """Sleep for `seconds`, or until shortly after `ended` returns True."""
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0 and not ended():
        time.sleep(min(left_s, _LOOK_S))


def paced(
    views: Sequence[Some],
    limiter: Limiter,
    grant_id: str,
    streams: Callable[[], int],
    ended: Callable[[], bool],
) -> Iterator[list[Some]]:
    """Yield views slice by slice, each when it may be sent.

    Args:
        views: The views to send, in order.
        limiter: The limiter of the exposure's options.
        grant_id: The grant that it is sent to.
        streams: How many connections the grant has: they share its slice, so that a reader gains
            nothing by having many.
        ended: Returns True once pauses are of no use any more.
    """
    left_nbytes = sum(map(len, views))
    parts: list[Some] = []
    size = room = 0
    for view in views:
        done = 0
        while done < len(view):
            if not parts:
                size = max(LEAST_SLICE, limiter.slice_nbytes(grant_id) // max(1, streams()))
                size = room = min(size, left_nbytes)
            part = view[done : done + room]
            parts.append(part)
            done += len(part)
            room -= len(part)
            if not room:
                pause(limiter.delay_s(size), ended)
                yield parts
                left_nbytes -= size
                parts = []
