"""The bandwidths that pulls have measured lately, between two hosts. Pure; `now` is an argument.

Each belongs to the model that was pulled: who may not see that is not told. What a pull has read in
a second is what the way allowed at least: others may have shared it. So the fastest of the last
while counts, not the latest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from mx.core.types import SourceRecord

#: A slower measurement takes the place of a faster one that is older than this.
FRESH_S = 60.0
#: A measurement is forgotten after this.
KEPT_S = 600.0
#: The most pairs of hosts; the one that was measured least recently makes room.
MAX_PAIRS = 4096
#: No link is faster: of several interfaces of 400 Gbit/s, or the memory of one host.
MOST_GB_PER_S, MOST_IN_HOST_GB_PER_S = 400.0, 1000.0


class Rate(NamedTuple):
    """A measured bandwidth: from the host of a source's endpoint to a host by its own name."""

    source_host: str
    host: str
    gb_per_s: float
    age_s: float


class Rates:
    """The fastest recent rate of each model and pair of hosts."""

    def __init__(self) -> None:
        self._pairs: OrderedDict[tuple[str, str, str], tuple[float, float]] = OrderedDict()

    def observe(self, now: float, model: str, source_host: str, host: str, gb_per_s: float) -> None:
        """Record what a pull of a model on `host` has read from sources on `source_host` alone."""
        if gb_per_s <= 0:
            return
        pair = (model, source_host, host)
        known, at_s = self._pairs.get(pair, (0.0, now))
        if gb_per_s < known and now - at_s <= FRESH_S:
            return
        self._pairs[pair] = (gb_per_s, now)
        self._pairs.move_to_end(pair)
        if len(self._pairs) > MAX_PAIRS:
            self._pairs.popitem(last=False)

    def listed(
        self,
        now: float,
        source_hosts: Collection[str] = (),
        sees: Callable[[str], bool] | None = None,
    ) -> list[Rate]:
        """Return the recent measurements, the fastest of each two hosts.

        Args:
            now: The time.
            source_hosts: From these hosts; none: from all.
            sees: Says of which models they may be; None: of all.
        """
        while self._pairs:
            pair, (_, at_s) = next(iter(self._pairs.items()))
            if now - at_s <= KEPT_S:
                break
            del self._pairs[pair]
        found: dict[tuple[str, str], Rate] = {}
        for (model, source, host), (gb_per_s, at_s) in self._pairs.items():
            if (source_hosts and source not in source_hosts) or not (sees is None or sees(model)):
                continue
            known = found.get((source, host))
            if known is None or known.gb_per_s < gb_per_s:
                found[source, host] = Rate(source, host, gb_per_s, max(0.0, now - at_s))
        return list(found.values())


def fastest_link(sources: Iterable[SourceRecord], source_host: str, host: str) -> float:
    """Return how many GB/s a host may read from another one at most, as far as that is known.

    Args:
        sources: The sources of which it may read.
        source_host: The host of the endpoint of some of them.
        host: The reader's host.

    Returns:
        What the interfaces there declare together, or what any link carries; 0.0 if no source is
        there.
    """
    most = 0.0
    for source in sources:
        if source.endpoint.rpartition(":")[0] != source_host:
            continue
        place = source.place
        if host in (source_host, place.hostname, *place.addresses):
            return MOST_IN_HOST_GB_PER_S
        declared = sum(nic.speed_mbit_per_s for nic in place.nics if nic.state == "up") / 8000
        most = max(most, min(declared or MOST_GB_PER_S, MOST_GB_PER_S))
    return most
