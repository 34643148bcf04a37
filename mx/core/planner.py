"""Which sources and paths a pull may use, in what order, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mx.core.topology import Place
from mx.core.types import SourceRecord, SourceState


@dataclass(frozen=True, slots=True)
class Way:
    """One path to one source, as a transport offered it."""

    source: SourceRecord
    transport: str
    gb_per_s: float
    attach: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Rejected:
    source: SourceRecord
    transport: str
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """`ways`, best first, and what was left out with the reason."""

    ways: tuple[Way, ...]
    rejected: tuple[Rejected, ...]

    def explain(self) -> list[str]:
        lines = [
            f"{way.source.endpoint} by {way.transport}: about {way.gb_per_s:g} GB/s"
            + (", attach without a copy" if way.attach else "")
            + (f" ({way.detail})" if way.detail else "")
            for way in self.ways
        ]
        return lines + [
            f"{r.source.endpoint} not by {r.transport}: {r.reason}" for r in self.rejected
        ]


#: (transport name, source's place) -> (GB/s, attach, detail), or the reason why not.
Reach = Callable[[str, Place], tuple[float, bool, str] | str]


def plan(
    sources: Iterable[SourceRecord],
    transports: Sequence[str],
    reach: Reach,
    *,
    forced: str | None = None,
    attach: bool = True,
) -> Plan:
    """Rank every (source, transport) that reaches: attach first, then by estimated bandwidth;
    serving sources before draining ones; equal ones by source id, so that the same input gives
    the same plan.
    """
    ways: list[Way] = []
    rejected: list[Rejected] = []
    for source in sources:
        for name in transports:
            if forced is not None and name != forced:
                rejected.append(Rejected(source, name, f"{forced} was asked for"))
                continue
            if name not in source.transports:
                rejected.append(Rejected(source, name, "the source does not offer it"))
                continue
            answer = reach(name, source.place)
            if isinstance(answer, str):
                rejected.append(Rejected(source, name, answer))
                continue
            gb_per_s, can_attach, detail = answer
            ways.append(Way(source, name, gb_per_s, can_attach and attach, detail))
    ways.sort(
        key=lambda way: (
            way.source.state is not SourceState.SERVING,
            not way.attach,
            -way.gb_per_s,
            way.source.source_id,
            way.transport,
        )
    )
    return Plan(tuple(ways), tuple(rejected))
