"""What the registry answers: listed sources, what a name means, models. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mx.core.types import ManifestRef, ModelKey, SourceRecord, SourceRole


@dataclass(slots=True)
class Listed:
    """A listed source. Callers only read it; it changes with the registry's next event."""

    record: SourceRecord
    secret_digest: bytes = field(repr=False)
    lease_until_s: float
    row_count: int = 0
    address: str = ""
    readers: int = 0
    gb_per_s: float = 0.0
    group: int = 0  # the number of its group in `mx.core.groups`


@dataclass(frozen=True, slots=True)
class Resolved:
    """The answer to `resolve`: the manifest to pull, and the sources that serve these weights now.

    Sources in another layout or chunk size than the manifest's are among them. Origins come first,
    and addresses take turns: whoever registers many sources does not fill an answer that has to be
    cut off. `in_order` sorts what is left.
    """

    model: ModelKey
    ref: ManifestRef
    sources: tuple[Listed, ...]


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """One variant. `nbytes` and `layers` come from the origins' tables; 0 without origins.

    With `pin_only` the name stands for other weights.
    """

    model: ModelKey
    ref: ManifestRef
    nbytes: int
    layers: int
    sources: int
    pin_only: bool = False


def in_turn(groups: Iterable[Sequence[Listed]]) -> list[Listed]:
    """Return the sources of all groups, origins first. Addresses take turns, and at each address
    its groups do."""
    turns: dict[tuple[bool, str], int] = {}
    ranked: list[tuple[bool, int, int, Listed]] = []
    for group in groups:
        within: dict[tuple[bool, str], int] = {}
        for listed in group:
            who = (listed.record.role is not SourceRole.ORIGIN, listed.address)
            within[who] = within.get(who, -1) + 1
            ranked.append((who[0], within[who], listed.group, listed))
    ranked.sort(key=lambda each: each[:3])
    found: list[tuple[bool, int, Listed]] = []
    for relay, _, _, listed in ranked:
        who = (relay, listed.address)
        turns[who] = turns.get(who, -1) + 1
        found.append((relay, turns[who], listed))
    found.sort(key=lambda each: each[:2])
    return [listed for _, _, listed in found]


def in_order(sources: Iterable[Listed]) -> list[Listed]:
    """Return sources by group, the oldest first, as readers should try them; each group's origins
    first."""
    return sorted(sources, key=lambda s: (s.group, s.record.role is not SourceRole.ORIGIN))
