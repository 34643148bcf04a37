"""Which weights a name means: (name, revision, variant) -> identity, and who may change that.

A *bundle* is the variants of one (name, revision); its owner registered it first. Each variant
is bound to one identity and one layout. The pair never changes its meaning while it is bound: an
owner's update becomes a new revision (REVISION.2, REVISION.3 …).

A bundle stays bound while it has a source, or a later revision of it is bound, and `grace_s`
longer, so that a crash does not free the name; but it ends at once when the variant's owner
itself takes the last source away.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from mx.core.types import ManifestRef, ModelKey
from mx.errors import BindingError, CapacityError, ConfigError, UnknownModelError

MIN_PIN_DIGITS = 8


@dataclass(slots=True)
class Binding:
    """What one variant is bound to. `owner` is the digest of its first registrant's secret;
    `sources` are the ids of those listed, in order (the values mean nothing)."""

    key: ModelKey
    ref: ManifestRef
    owner: bytes = field(repr=False)
    sources: dict[str, None] = field(default_factory=dict)


@dataclass(slots=True)
class _Bundle:
    owner: bytes = field(repr=False)
    base: str = ""  # the revision that this one is an update of
    variants: dict[str, Binding] = field(default_factory=dict)
    lapses_at_s: float = math.inf


class Bindings:
    """Not thread-safe; `now` never goes back. `due_s` is when `lapse` has something to do."""

    def __init__(self, *, grace_s: float, limit: int) -> None:
        self.grace_s = grace_s
        self.limit = limit
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
        self, key: ModelKey, ref: ManifestRef, owner: bytes, *, replaces_revision: bool
    ) -> ModelKey:
        """The key that `ref` may be bound to, which is another revision for an update.

        Changes nothing. Raises BindingError, CapacityError.
        """
        binding = self.get(key)
        if binding is not None and binding.ref.identity != ref.identity:
            if not replaces_revision or not hmac.compare_digest(binding.owner, owner):
                why = "; only who bound it may replace it" if replaces_revision else ""
                raise BindingError(
                    f"{key} is bound to {binding.ref.identity.hex()[:16]}, "
                    f"not {ref.identity.hex()[:16]}{why}",
                    hint="register other weights under another name or --revision",
                )
            key = self._next_revision(key, ref, owner)
            binding = self.get(key)
        if binding is None:
            if self._count >= self.limit:
                raise CapacityError(f"the coordinator knows {self._count} models, its limit")
        elif binding.ref.layout != ref.layout:
            raise BindingError(
                f"{key} has these weights in another layout", hint="name another variant"
            )
        return key

    def bind(
        self, key: ModelKey, ref: ManifestRef, owner: bytes, source_id: str, *, base: str
    ) -> None:
        """Count a source under a key from `admit`; `base` is the revision it asked for."""
        revisions = self._names.setdefault(key.name, {})
        bundle = revisions.get(key.revision)
        if bundle is None:
            bundle = revisions[key.revision] = _Bundle(owner)
            if base != key.revision:
                bundle.base = base
        if key.variant not in bundle.variants:
            bundle.variants[key.variant] = Binding(key, ref, owner)
            self._count += 1
        bundle.variants[key.variant].sources[source_id] = None
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
        if by and hmac.compare_digest(binding.owner, by):
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
        """The bindings that NAME or NAME@IDENTITY means, all of one identity, at least one.

        A pin looks in every revision unless one is named. Raises UnknownModelError, and
        ConfigError for a pin that is none or that fits several identities.
        """
        name, at, pin = name.partition("@")
        pin = pin.lower()
        if at and (not MIN_PIN_DIGITS <= len(pin) <= 64 or pin.strip("0123456789abcdef")):
            raise ConfigError(f"@{pin[:80]} pins nothing: {MIN_PIN_DIGITS} to 64 hex digits")
        variant = variant or "checkpoint"
        if not revision and not at:
            revision = "main"
        named = [b for v in self._names.get(name, {}).values() for b in v.variants.values()]
        fits = [b for b in named if revision in ("", b.key.revision) and b.key.variant == variant]
        pinned = [b for b in fits if b.ref.identity.hex().startswith(pin)]
        if not pinned:
            raise self._unknown(ModelKey(name, revision or "main", variant), named, fits, pin)
        if len({binding.ref.identity for binding in pinned}) > 1:
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

    def _next_revision(self, key: ModelKey, ref: ManifestRef, owner: bytes) -> ModelKey:
        """The first REVISION.n that is free, or the owner's and free for this variant."""
        revisions = self._names[key.name]
        number = 2
        while True:
            revision = f"{key.revision}.{number}"
            bundle = revisions.get(revision)
            if bundle is None:
                return replace(key, revision=revision)
            binding = bundle.variants.get(key.variant)
            if hmac.compare_digest(bundle.owner, owner) and (
                binding is None or binding.ref.identity == ref.identity
            ):
                return replace(key, revision=revision)
            number += 1

    def _in_use(self, name: str, revision: str) -> bool:
        revisions = self._names[name]
        if any(binding.sources for binding in revisions[revision].variants.values()):
            return True
        return any(bundle.base == revision for bundle in revisions.values())

    def _let_lapse(self, now: float, bundle: _Bundle) -> None:
        bundle.lapses_at_s = now + self.grace_s
        self.due_s = min(self.due_s, bundle.lapses_at_s)

    def _remove(self, now: float, name: str, revision: str) -> None:
        revisions = self._names[name]
        bundle = revisions.pop(revision)
        self._count -= len(bundle.variants)
        base = revisions.get(bundle.base) if bundle.base else None
        if base is not None and not self._in_use(name, bundle.base):
            self._let_lapse(now, base)
        if not revisions:
            del self._names[name]
