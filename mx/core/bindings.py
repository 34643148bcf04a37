"""Which weights a name means: (name, revision, variant) -> identity, and who may change that.

A *bundle* is the variants of one (name, revision); its owner registered it first. Each variant
is bound to one identity and one layout. The pair never changes its meaning while it is bound: an
owner's update becomes a new revision (REVISION.2, REVISION.3 …). "main", which is what a name
without a revision means, and its updates are one family: none of them can be bound for the first
time by another than the owner of those that are, and NAME means the newest of them.

A relay binds nothing for itself: what only relays hold (after a coordinator's restart) belongs to
the first origin of the same weights.

A bundle stays bound while it has a source, or a later revision of it is bound, and `grace_s`
longer, so that a crash does not free the name; but it ends at once when the variant's owner
itself takes the last source away, unless it is to give way to an update.
"""

from __future__ import annotations

import hmac
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from mx.core.types import NAME_CHARS, ManifestRef, ModelKey
from mx.errors import BindingError, CapacityError, ConfigError, UnknownModelError

MIN_PIN_DIGITS = 8
MAIN = "main"

_UPDATE_OF_MAIN = re.compile(r"main\.[1-9][0-9]{0,8}", re.ASCII)


def is_main(revision: str) -> bool:
    """Is it "main" or an update of it: what a name without a revision may mean?"""
    return revision == MAIN or _UPDATE_OF_MAIN.fullmatch(revision) is not None


def update_number(revision: str, root: str = MAIN) -> int:
    """Which update of `root` a revision is (ROOT.2 is 2); 0 for `root` itself and for others."""
    number = revision.removeprefix(f"{root}.")
    return int(number) if number != revision and number.isascii() and number.isdigit() else 0


@dataclass(slots=True)
class Binding:
    """What one variant is bound to. `owner` is the digest of its first origin's secret, b"" while
    there was none, `address` where it was bound from; `sources` are the ids of those listed, in
    order (the values mean nothing)."""

    key: ModelKey
    ref: ManifestRef
    owner: bytes = field(repr=False)
    address: str = ""
    sources: dict[str, None] = field(default_factory=dict)


@dataclass(slots=True)
class _Bundle:
    owner: bytes = field(repr=False)
    base: str = ""  # the revision that this one is an update of
    variants: dict[str, Binding] = field(default_factory=dict)
    lapses_at_s: float = math.inf


class Bindings:
    """Not thread-safe; `now` never goes back. `due_s` is when `lapse` has something to do."""

    def __init__(self, *, grace_s: float, limit: int, limit_per_address: int) -> None:
        self.grace_s = grace_s
        self.limit = limit
        self.limit_per_address = limit_per_address
        self._from: Counter[str] = Counter()  # variants by address
        self.due_s = math.inf
        self._count = 0
        self._names: dict[str, dict[str, _Bundle]] = {}

    def __iter__(self) -> Iterator[Binding]:
        for revisions in self._names.values():
            for bundle in revisions.values():
                yield from bundle.variants.values()

    def get(self, key: ModelKey) -> Binding | None:
        bundle = self._names.get(key.name, {}).get(key.revision)
        return bundle.variants.get(key.variant) if bundle else None

    def admit(
        self,
        key: ModelKey,
        ref: ManifestRef,
        owner: bytes,
        *,
        replaces_revision: bool,
        address: str = "",
    ) -> ModelKey:
        """The key that `ref` may be bound to, which is another revision for an update.

        Changes nothing. Raises BindingError, CapacityError.
        """
        binding = self.get(key)
        if binding is None:
            self._check_family(key, owner)
        elif binding.ref.identity != ref.identity:
            if not replaces_revision or not hmac.compare_digest(binding.owner, owner):
                why = "; only who bound it may replace it" if replaces_revision else ""
                raise BindingError(
                    f"{key} is bound to {binding.ref.identity.hex()[:16]}, "
                    f"not {ref.identity.hex()[:16]}{why}",
                    hint="register other weights under another name or `revision`",
                )
            key = self._next_revision(key, ref)
            binding = self.get(key)
        if binding is None:
            if self._count >= self.limit:
                raise CapacityError(f"the coordinator knows {self._count} models, its limit")
            if self._from[address] >= self.limit_per_address:
                raise CapacityError(
                    f"the coordinator knows {self._from[address]} models from {address}, its "
                    "limit for one address"
                )
        elif binding.ref.layout != ref.layout:
            raise BindingError(
                f"{key} has these weights in another layout", hint="name another variant"
            )
        return key

    def bind(
        self,
        key: ModelKey,
        ref: ManifestRef,
        owner: bytes,
        source_id: str,
        *,
        base: str,
        address: str = "",
    ) -> None:
        """Count a source under a key from `admit`; `base` is the revision it asked for. A relay's
        `owner` is b""."""
        revisions = self._names.setdefault(key.name, {})
        bundle = revisions.get(key.revision)
        if bundle is None:
            root = self._root(key.name, base) if base != key.revision else ""
            bundle = revisions[key.revision] = _Bundle(owner, root)
        bundle.owner = bundle.owner or owner
        if key.variant not in bundle.variants:
            bundle.variants[key.variant] = Binding(key, ref, owner, address)
            self._count += 1
            self._from[address] += 1
        binding = bundle.variants[key.variant]
        binding.owner = binding.owner or owner
        binding.sources[source_id] = None
        bundle.lapses_at_s = math.inf
        if bundle.base in revisions:
            revisions[bundle.base].lapses_at_s = math.inf

    def leave(self, now: float, key: ModelKey, source_id: str, *, by: bytes = b"") -> None:
        """A source has gone. `by` is the digest of its secret where it went by its own will."""
        bundle = self._names[key.name][key.revision]
        binding = bundle.variants[key.variant]
        binding.sources.pop(source_id, None)
        if self._in_use(key.name, key.revision):
            return
        own = by and hmac.compare_digest(binding.owner, by)
        if own and not self._superseded(key.name, key.revision):
            self._remove(now, key.name, key.revision)
        else:
            self._let_lapse(now, bundle)

    def lapse(self, now: float) -> None:
        """End the bundles whose time has come."""
        if now < self.due_s:
            return
        ended = [
            (name, revision)
            for name, revisions in self._names.items()
            for revision, bundle in revisions.items()
            if bundle.lapses_at_s <= now
        ]
        for name, revision in ended:
            self._remove(now, name, revision)
        self.due_s = min(
            (b.lapses_at_s for revisions in self._names.values() for b in revisions.values()),
            default=math.inf,
        )

    def find(self, name: str, revision: str = "", variant: str = "") -> list[Binding]:
        """The bindings that NAME or NAME@IDENTITY means, at least one. With a revision or a pin
        they are all of one identity; without either they are "main" and its updates, the newest
        first.

        A pin looks in every revision unless one is named. Raises UnknownModelError, and
        ConfigError for a pin that is none or that fits several identities.
        """
        name, at, pin = name.partition("@")
        pin = pin.lower()
        if at and (not MIN_PIN_DIGITS <= len(pin) <= 64 or pin.strip("0123456789abcdef")):
            raise ConfigError(f"@{pin[:80]} pins nothing: {MIN_PIN_DIGITS} to 64 hex digits")
        variant = variant or "checkpoint"
        named = [b for v in self._names.get(name, {}).values() for b in v.variants.values()]
        fits = [b for b in named if revision in ("", b.key.revision) and b.key.variant == variant]
        if not revision and not at:
            fits = [b for b in fits if is_main(b.key.revision)]
            fits.sort(key=lambda b: update_number(b.key.revision), reverse=True)
        pinned = [b for b in fits if b.ref.identity.hex().startswith(pin)]
        if not pinned:
            raise self._unknown(ModelKey(name, revision or MAIN, variant), named, fits, pin)
        if at and len({binding.ref.identity for binding in pinned}) > 1:
            raise ConfigError(f"{name}@{pin} fits several identities", hint="give more digits")
        return pinned

    def _unknown(
        self, key: ModelKey, named: Sequence[Binding], fits: Sequence[Binding], pin: str
    ) -> UnknownModelError:
        if fits:
            held = ", ".join(binding.ref.identity.hex()[:16] for binding in fits[:5])
            return UnknownModelError(
                f"{key.name} is not {pin} here, but {held}", hint="pull it without the pin?"
            )
        if named:
            others = ", ".join(str(binding.key) for binding in named[:5])
            return UnknownModelError(f"no {key} here", hint=f"there is {others}")
        names = sorted(self._names)
        there = ", ".join(names[:5]) + (" …" if len(names) > 5 else "")
        hint = f"there is {there}" if names else "nothing is registered here yet"
        return UnknownModelError(f"no model {key.name!r} here", hint=hint)

    def _check_family(self, key: ModelKey, owner: bytes) -> None:
        """May this owner be the first to bind the key's revision?"""
        revisions = self._names.get(key.name, {})
        if key.revision in revisions or not is_main(key.revision):
            return
        for revision, bundle in revisions.items():
            if is_main(revision) and bundle.owner and not hmac.compare_digest(bundle.owner, owner):
                raise BindingError(
                    f"{replace(key, revision=revision)} is another's, and {key.revision} would "
                    "be taken for an update of it",
                    hint="register these weights under another name or `revision`",
                )

    def _root(self, name: str, revision: str) -> str:
        """The revision that this one is an update of; itself if it is none."""
        bundle = self._names.get(name, {}).get(revision)
        if bundle is not None and bundle.base:
            return bundle.base
        return MAIN if is_main(revision) else revision

    def _next_revision(self, key: ModelKey, ref: ManifestRef) -> ModelKey:
        """Where an update of this variant goes: after its newest one, or there if that is the
        same. Other variants may have been updated to there already."""
        root = self._root(key.name, key.revision)
        revisions = self._names[key.name]
        family = {
            update_number(revision, root): bundle.variants[key.variant]
            for revision, bundle in revisions.items()
            if self._root(key.name, revision) == root and key.variant in bundle.variants
        }
        newest = max(family)
        if family[newest].ref.identity == ref.identity:
            return family[newest].key
        number = max(newest + 1, 2)
        while (revision := f"{root}.{number}") in revisions and (
            self._root(key.name, revision) != root or key.variant in revisions[revision].variants
        ):
            number += 1
        if len(revision) > NAME_CHARS:
            raise BindingError(
                f"an update of {key.revision[:40]}… would be a revision of {len(revision)} "
                f"characters, more than {NAME_CHARS}",
                hint="register these weights under a shorter `revision`",
            )
        return replace(key, revision=revision)

    def _in_use(self, name: str, revision: str) -> bool:
        revisions = self._names[name]
        if any(binding.sources for binding in revisions[revision].variants.values()):
            return True
        return any(bundle.base == revision for bundle in revisions.values())

    def _superseded(self, name: str, revision: str) -> bool:
        """Is another revision of its family bound? Then whoever still reads this one may yet want
        to be listed with it."""
        root = self._root(name, revision)
        return any(
            other != revision and self._root(name, other) == root for other in self._names[name]
        )

    def _let_lapse(self, now: float, bundle: _Bundle) -> None:
        bundle.lapses_at_s = now + self.grace_s
        self.due_s = min(self.due_s, bundle.lapses_at_s)

    def _remove(self, now: float, name: str, revision: str) -> None:
        revisions = self._names[name]
        bundle = revisions.pop(revision)
        self._count -= len(bundle.variants)
        for binding in bundle.variants.values():
            self._from[binding.address] -= 1
            if not self._from[binding.address]:
                del self._from[binding.address]
        base = revisions.get(bundle.base) if bundle.base else None
        if base is not None and not self._in_use(name, bundle.base):
            self._let_lapse(now, base)
        if not revisions:
            del self._names[name]
