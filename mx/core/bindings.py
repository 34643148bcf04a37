"""The binding of names to weights: (name, revision, variant) -> identity, and its owner.

A *bundle* is the variants of one (name, revision); its owner registered it first. Each variant
is bound to one identity and one layout. A bound (name, revision) never changes its meaning: an
owner's update becomes a new revision (REVISION.2, REVISION.3 …). "main", which is the default
revision, and its updates form one family: only the owner of the family's bound revisions can
bind another one of them, and NAME means the newest.

A relay owns no binding: a variant that only relays hold (after a coordinator's restart) belongs to
the first origin that registers the same weights.

A bundle stays bound while it has a source or a later revision of it is bound, and for `grace_s`
after that, so that a crash does not free the name. It ends at once when the variant's owner
deregisters the last source, unless an update has replaced the revision.
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
    """Return True if a name without a revision may mean this one: "main" or an update of it."""
    return revision == MAIN or _UPDATE_OF_MAIN.fullmatch(revision) is not None


def update_number(revision: str, root: str = MAIN) -> int:
    """Return N for the revision ROOT.N, and 0 for `root` itself and for other revisions."""
    number = revision.removeprefix(f"{root}.")
    return int(number) if number != revision and number.isascii() and number.isdigit() else 0


@dataclass(slots=True)
class Binding:
    """The binding of one variant.

    `owner` is the digest of its first origin's secret, b"" before an origin has registered.
    `address` is where the variant was first registered from. `sources` are the ids of its listed
    sources, in order of registration (the values mean nothing).
    """

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
    """All bindings of one coordinator. Not thread-safe.

    `now` never goes back. `due_s` is the earliest time at which `lapse` has something to do.
    """

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
        """Return the binding of `key`, or None if it is not bound."""
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
        """Return the key that `ref` may be bound to. Changes nothing.

        Args:
            key: What the source registers.
            ref: The source's manifest.
            owner: The digest of the source's secret; b"" for a relay.
            replaces_revision: If `key` is bound to another identity, register an update.
            address: Where the source registers from.

        Returns:
            `key`, or for an update the key with the update's revision.

        Raises:
            BindingError: The key is bound to another identity, layout or owner.
            CapacityError: The coordinator, or this address, has reached its limit of models.
        """
        binding = self.get(key)
        if binding is None:
            self._check_family(key, owner)
        elif binding.ref.identity != ref.identity:
            if not replaces_revision or not hmac.compare_digest(binding.owner, owner):
                why = "; only its owner may replace it" if replaces_revision else ""
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
        """Add a source to the binding of a key, and create the binding if it is new.

        Args:
            key: What `admit` returned.
            ref: The source's manifest.
            owner: The digest of the source's secret; b"" for a relay.
            source_id: The source.
            base: The revision that the source requested.
            address: Where the source registers from.
        """
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
        """Remove a source that is gone from its binding.

        Args:
            now: The time.
            key: What the source was listed under.
            source_id: The source.
            by: The digest of its secret if it left by itself; b"" if its lease expired.
        """
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
        """Remove the bundles whose grace is over at `now`."""
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
        """Return the bindings that NAME or NAME@PIN means.

        Args:
            name: NAME or NAME@PIN.
            revision: "" for any revision if there is a pin, else for "main" and its updates.
            variant: "" for "checkpoint".

        Returns:
            At least one binding. With a revision or a pin they all have one identity; without
            either they are "main" and its updates, the newest first.

        Raises:
            UnknownModelError: No binding fits.
            ConfigError: The pin is malformed, or fits several identities.
        """
        name, at, pin = name.partition("@")
        pin = pin.lower()
        if at and (not MIN_PIN_DIGITS <= len(pin) <= 64 or pin.strip("0123456789abcdef")):
            raise ConfigError(
                f"@{pin[:80]} is not a pin", hint=f"write {MIN_PIN_DIGITS} to 64 hex digits"
            )
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
                f"{key.name} is not {pin} here, but {held}",
                hint="check the pin, or ask a coordinator that has those weights",
            )
        if named:
            others = ", ".join(str(binding.key) for binding in named[:5])
            return UnknownModelError(f"no {key} here", hint=f"there is {others}")
        names = sorted(self._names)
        there = ", ".join(names[:5]) + (" …" if len(names) > 5 else "")
        hint = f"there is {there}" if names else "nothing is registered here yet"
        return UnknownModelError(f"no model {key.name!r} here", hint=hint)

    def _check_family(self, key: ModelKey, owner: bytes) -> None:
        """Raise BindingError if `owner` may not be the first to bind the key's revision."""
        revisions = self._names.get(key.name, {})
        if key.revision in revisions or not is_main(key.revision):
            return
        for revision, bundle in revisions.items():
            if is_main(revision) and bundle.owner and not hmac.compare_digest(bundle.owner, owner):
                raise BindingError(
                    f"{replace(key, revision=revision)} belongs to another source, and "
                    f"{key.revision} would count as an update of it",
                    hint="register these weights under another name or `revision`",
                )

    def _root(self, name: str, revision: str) -> str:
        """Return the revision that this one is an update of, or `revision` if it is no update."""
        bundle = self._names.get(name, {}).get(revision)
        if bundle is not None and bundle.base:
            return bundle.base
        return MAIN if is_main(revision) else revision

    def _next_revision(self, key: ModelKey, ref: ManifestRef) -> ModelKey:
        """Return the key for an update: that of the variant's newest revision if `ref` has its
        identity, else the next one. Other variants may have that next revision already."""
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
        """Return True if the revision has a source, or an update of it is bound."""
        revisions = self._names[name]
        if any(binding.sources for binding in revisions[revision].variants.values()):
            return True
        return any(bundle.base == revision for bundle in revisions.values())

    def _superseded(self, name: str, revision: str) -> bool:
        """Return True if another revision of its family is bound: a peer that still reads this
        one may yet register it."""
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
