"""The bandwidths that pulls have measured lately, between two hosts. Pure; `now` is an argument.

What a pull has read in a second is what the way allowed at least: others may have shared it. So the
fastest of the last while counts, not the latest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from mx.records import record

#: A slower measurement takes the place of a faster one that is older than this.
FRESH_S = 60.0
#: A measurement is forgotten after this.
KEPT_S = 600.0
#: The most pairs of hosts; the one that was measured least recently makes room.
MAX_PAIRS = 4096


@record(frozen=True, slots=True)
class Rate:
    """A measured bandwidth: from the host of a source's endpoint to a host by its own name."""

    source_host: str
    host: str
    gb_per_s: float
    age_s: float


class Rates:
    """The fastest recent rate of each pair of hosts."""

    def __init__(self) -> None:
        self._pairs: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()

    def observe(self, now: float, source_host: str, host: str, gb_per_s: float) -> None:
        """Record what a pull on `host` has read from sources on `source_host` alone."""
        if gb_per_s <= 0:
            return
        pair = (source_host, host)
        known, at_s = self._pairs.get(pair, (0.0, now))
        if gb_per_s < known and now - at_s <= FRESH_S:
            return
        self._pairs[pair] = (gb_per_s, now)
        self._pairs.move_to_end(pair)
        if len(self._pairs) > MAX_PAIRS:
            self._pairs.popitem(last=False)

    def listed(self, now: float, source_hosts: Collection[str] = ()) -> list[Rate]:
        """Return what was measured lately, from these hosts or from all."""
        while self._pairs:
            pair, (_, at_s) = next(iter(self._pairs.items()))
            if now - at_s <= KEPT_S:
                break
            del self._pairs[pair]
        return [
            Rate(source, host, gb_per_s, max(0.0, now - at_s))
            for (source, host), (gb_per_s, at_s) in self._pairs.items()
            if not source_hosts or source in source_hosts
        ]
