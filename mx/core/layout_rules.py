"""What a layout version decides. Pure.

The layout of a model follows from its identity document and a layout version. Each release plans
the current version and the one before it: then two releases that follow each other agree on one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from mx.core.grid import chunk_nbytes_of
from mx.core.naming import layers_in_execution_order


class LayoutRules(NamedTuple):
    """The rules of one layout version.

    `layers` groups names into layers in execution order, as
    `mx.core.naming.layers_in_execution_order`. `chunk_nbytes` returns the chunk size of a model
    with so many bytes, a multiple of the block size.
    """

    layers: Callable[[Iterable[str], Mapping[str, int]], list[tuple[str, list[str]]]]
    chunk_nbytes: Callable[[int], int]


#: By layout version. A change of what is planned adds the next version, and drops the one before
#: the last.
RULES: dict[int, LayoutRules] = {2: LayoutRules(layers_in_execution_order, chunk_nbytes_of)}


def newest() -> int:
    """Return the current layout version, for weights that no other process has laid out."""
    return max(RULES)


def oldest() -> int:
    """Return the lowest layout version that this process plans."""
    return min(RULES)


#: How long a process counts as one that is used, after its last call.
IN_USE_S = 3600.0


class InUse:
    """Which layout versions the processes plan that call here. A machine: time is an argument.

    Only those that do not plan the newest version of this process are of interest. One that has
    just begun does not know who called in an earlier life, and what those hold who have yet to
    register again: it names the oldest version at first, as if a process that plans no other one
    had called.
    """

    def __init__(self, now: float) -> None:
        self._calls: Counter[int] = Counter()  # running ones, by the newest version of the caller
        self._ended_s = {oldest(): now}  # when the last one ended

    def began(self, version: int) -> None:
        """Record a call of a process whose newest version is this one."""
        self._calls[version] += 1

    def ended(self, version: int, now: float) -> None:
        """Record the end of such a call."""
        self._calls[version] -= 1
        self._ended_s[version] = now

    def named(self, now: float) -> int:
        """Return the version for weights that are not listed: the newest that all processes plan
        which call here, or have done so within `IN_USE_S`; this process is one of them."""
        used = [version for version, calls in self._calls.items() if calls]
        used += [each for each, ended_s in self._ended_s.items() if now - ended_s <= IN_USE_S]
        return min(used, default=newest())
