"""What the registry answers: listed sources, what a name means, models. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from mx.core.reference import pinned_name
from mx.core.types import ManifestRef, ModelKey, SourceRecord, SourceRole
from mx.core.variant import members_of
from mx.units import count, format_bytes

if TYPE_CHECKING:
    import random

    from mx.core.ownership import Receipt


#: The most revisions that an error names.
_MOST_NAMED = 5


@dataclass(slots=True)
class ListedSource:
    """A listed source. Callers only read it; it changes with the registry's next event."""

    record: SourceRecord
    secret_digest: bytes = field(repr=False)
    lease_until_s: float
    address: str = ""
    readers: int = 0
    gb_per_s: float = 0.0
    binding: int = 0  # the number of its binding


class ResolveAnswer(NamedTuple):
    """The answer to `resolve`: the manifest to pull, and the sources that serve these weights now.

    They are in the order in which readers should try them: by binding, the oldest first, each
    one's origins first. `in_turn` says which to keep of too many.

    `newest` is what the name means; of a question with a pin only if that is another revision, and
    can be obtained whole, and None with a revision. `older` are older revisions that can be, if the
    newest cannot. `seen` is what the asker knows of the name then, None for nothing. `vouch` is
    what the name's owner says of the weights, b"" if that is not known.
    """

    model: ModelKey
    ref: ManifestRef
    sources: tuple[ListedSource, ...]
    newest: ModelKey | None = None
    older: tuple[ModelKey, ...] = ()
    seen: Receipt | None = None
    vouch: bytes = b""


class ModelStatus(NamedTuple):
    """A variant as the coordinator lists it. `nbytes` and `layers` are an origin's; 0 without one.

    With `pin_only` the name stands for other weights: readers find these by their pin. `restored`:
    a receipt has bound them again since the coordinator started.
    """

    model: ModelKey
    ref: ManifestRef
    nbytes: int
    layers: int
    sources: int
    pin_only: bool = False
    restored: bool = False

    @property
    def pinned(self) -> str:
        """NAME@PIN with all digits: these weights, and their files if there are any."""
        return pinned_name(self.model, self.ref)

    def __repr__(self) -> str:
        """Return one line: its name, the beginning of its pin, its size."""
        return (
            f"<ModelStatus {self.model}@{self.ref.pin.hex()[:16]}: "
            f"{format_bytes(self.nbytes)} in {count(self.layers, 'layer')}, "
            f"{count(self.sources, 'source')}>"
        )


@dataclass(frozen=True, slots=True)
class BundleStatus:
    """A bundle: the ranks of one revision that make a whole, and which of them no whole source
    serves.

    `variant` is the ranks' processing key with `*` in place of each rank. A variant that is not a
    rank of several is a bundle of one. `missing` has the first of `missing_count` variants. `named`
    is True for the revision that NAME means.
    """

    name: str
    revision: str
    variant: str
    ranks: int
    missing: tuple[str, ...]
    missing_count: int
    named: bool

    @property
    def complete(self) -> bool:
        """True if every rank is served by a whole source: a replica can have all of it."""
        return not self.missing_count

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants of all ranks, in order."""
        return tuple(members_of(self.variant))

    def __str__(self) -> str:
        return str(ModelKey(self.name, self.revision, self.variant))


def away(meant: ModelKey, older: Sequence[ModelKey]) -> tuple[str, str]:
    """Return the message and the hint of the error for a name without a pin or a revision whose
    newest revision no sources have whole.

    Args:
        meant: What the name means.
        older: Older revisions that can be obtained.
    """
    # With the revision, also where that is "main": the name alone means the newest.
    named = [f"{key.name}:{key.revision}" for key in older[:_MOST_NAMED]]
    listed = ", ".join(named) + (" …" if len(older) > _MOST_NAMED else "")
    return (
        f"{meant.name} means {meant.name}:{meant.revision}, its newest revision, which no source "
        "has whole now: it is being changed, or its sources are away",
        f"wait for it (`wait_s`), name an older one ({listed}), or take it with `allow_older`"
        if older
        else "wait for it (`wait_s`), or start its source again",
    )


def in_order(sources: Iterable[ListedSource]) -> list[ListedSource]:
    """Return sources by binding, the oldest first, each one's origins first."""
    return sorted(sources, key=lambda s: (s.binding, s.record.role is not SourceRole.ORIGIN))


def in_turn(sources: Iterable[ListedSource], rng: random.Random) -> Iterator[ListedSource]:
    """Yield sources so that the first ones are a fair choice: origins come first, addresses take
    turns, and at each address its bindings do. So an answer that has to be cut off still has
    sources of others than who registers many. Which address begins, and which source of a binding
    comes next, is drawn: else all who ask would know the same few, and those would be full.

    Args:
        sources: The sources.
        rng: Draws.
    """
    places: dict[bool, dict[str, dict[int, list[ListedSource]]]] = {False: {}, True: {}}
    for listed in sources:
        at_address = places[listed.record.role is not SourceRole.ORIGIN]
        bindings = at_address.setdefault(listed.address, {})
        bindings.setdefault(listed.binding, []).append(listed)
    for addresses in places.values():
        turns = [deque(bindings.values()) for bindings in addresses.values()]
        first = rng.randrange(len(turns)) if turns else 0
        turns = turns[first:] + turns[:first]
        while turns:
            for waiting in turns:
                alike = waiting.popleft()
                drawn = rng.randrange(len(alike))
                alike[drawn], alike[-1] = alike[-1], alike[drawn]
                yield alike.pop()
                if alike:
                    waiting.append(alike)
            turns = [waiting for waiting in turns if waiting]
