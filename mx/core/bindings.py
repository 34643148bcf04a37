"""The binding of names to weights: (name, revision, variant) -> identity and files, and its owner.

A revision has variants; its owner registered the first of them. Each variant is bound to one
identity. A bound (name, revision) never changes its meaning: an owner's update
becomes a new revision (REVISION.2, REVISION.3 …). "main", which is the default revision, and its
updates form one family: only the owner of the family's bound revisions can bind another one of
them, and NAME means the newest.

The first origin with files binds them too; another source of the weights may have other files, or
none. A relay owns no binding, and its files give way to an origin's: a variant that only relays
hold (after a coordinator's restart) belongs to the first origin that registers the same weights.

*Layout and chunk size* do not belong to the weights, but sources that differ in them cannot trade
chunks. So `admit` names those of the oldest group of the same weights, and the source adopts them.
A stranger may have registered them first, and a layout document that does not describe the weights
too: a source that finds this disputes it, and is asked to adopt the next, or else makes a group of
its own. Readers go through the groups in the same order, and so find the same one.

*Contested*: after a coordinator's restart other weights may have taken the name. A source that was
listed before is listed all the same, and readers find it by its pin. When the binding ends, the
name goes to the oldest of those that contest it.

A revision stays bound while it has a source or an update of it is bound, and for `grace_s`
after that, so that a crash does not free the name. It ends at once when the variant's owner
deregisters the last source, unless an update has replaced the revision.

A *bundle* is the ranks of one revision that make a whole (`mx.core.variant`). NAME means the newest
revision of a bundle that has been complete, for all its ranks; before one has been, the oldest. So
an update that not all ranks have registered yet changes nothing, and once they have, the end of a
rank changes nothing either. Each rank may have an owner of its own. A rank that has had no source
for `grace_s` stays bound to its weights with the others, and has no owner: it belongs to the first
origin that registers them.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from mx.core.groups import Binding, Contests, Group, by_age
from mx.core.named import Meant, NamedRevisions
from mx.core.quota import Quota
from mx.core.revisions import MAIN, is_main, update_number
from mx.core.types import NAME_CHARS, ManifestRef, ModelKey
from mx.core.variant import membership
from mx.errors import BindingError


@dataclass(slots=True)
class _Revision:
    owner: bytes = field(repr=False)
    base: str = ""  # the revision that this one is an update of
    variants: dict[str, Binding] = field(default_factory=dict)
    lapses_at_s: float = math.inf
    bundles: set[str] = field(default_factory=set)  # of which a rank is bound here
    completed: set[str] = field(default_factory=set)  # those that have been complete


@dataclass(frozen=True, slots=True)
class Admission:
    """What `admit` decides: the key, and whether the key stands for these weights then. If `adopt`
    is not None the source is not admitted as it is: it should take over that layout and chunk size.
    """

    key: ModelKey
    bound: bool = True
    adopt: ManifestRef | None = None


class Bindings:
    """All bindings of one coordinator. Not thread-safe.

    `now` never goes back. `due_s` is the earliest time at which `lapse` has something to do.
    """

    def __init__(self, *, grace_s: float, quota: Quota) -> None:
        """
        Args:
            grace_s: How long a binding outlives its last source.
            quota: Bounds the groups of sources.
        """
        self.grace_s = grace_s
        self.due_s = math.inf
        self._quota = quota
        self._number = 0  # of the last group that was made
        self._names: dict[str, dict[str, _Revision]] = {}
        self._contests = Contests()
        self._of: dict[str, tuple[Binding, Group]] = {}  # by source
        self._named: list[str] = []
        self._refs: list[tuple[ManifestRef, bool]] = []
        self._meant = NamedRevisions()
        self._left: dict[Binding, float] = {}  # ranks without a source: when they lose their owner

    def __iter__(self) -> Iterator[Binding]:
        for revisions in self._names.values():
            for entry in revisions.values():
                yield from entry.variants.values()
        yield from self._contests

    def of_name(self, name: str) -> list[Binding]:
        """Return the bindings of one name, those that contest another one last."""
        entries = self._names.get(name, {}).values()
        bound = [binding for entry in entries for binding in entry.variants.values()]
        return [*bound, *self._contests.of(name)]

    @property
    def names(self) -> list[str]:
        """The bound names, sorted."""
        return sorted(self._names)

    def get(self, key: ModelKey) -> Binding | None:
        """Return the binding of `key`, or None if it is not bound."""
        entry = self._names.get(key.name, {}).get(key.revision)
        return entry.variants.get(key.variant) if entry else None

    def of_source(self, source_id: str) -> tuple[Binding, Group]:
        """Return the binding and the group of a source that `bind` has added."""
        return self._of[source_id]

    def take_named(self) -> list[str]:
        """Return the sources that contested a name and have got it since the last call."""
        named, self._named = self._named, []
        return named

    def take_refs(self) -> list[tuple[ManifestRef, bool]]:
        """Return the manifests of groups, with True for each that came since the last call and
        False for each that went, in order. Readers get their documents from the coordinator."""
        refs, self._refs = self._refs, []
        return refs

    def of_revision(self, name: str, revision: str) -> Mapping[str, Binding]:
        """Return the bindings of a revision by variant, without those that contest another."""
        entry = self._names.get(name, {}).get(revision)
        return {} if entry is None else entry.variants

    def revisions(self, name: str) -> dict[str, frozenset[str]]:
        """Return the bound revisions of a name, each with its bundles."""
        entries = self._names.get(name, {})
        return {revision: frozenset(entry.bundles) for revision, entry in entries.items()}

    def meant(self, name: str, bundle: str) -> str:
        """Return the revision that NAME means for the ranks of a bundle, "" for none."""
        return self._meant.get(name, bundle)

    def take_meant(self) -> list[Meant]:
        """Return what NAME has come to mean for bundles since the last call, in order."""
        return self._meant.take()

    def has_been_complete(self, name: str, revision: str, bundle: str) -> bool:
        """Return True if `complete` was called for a bundle of a bound revision."""
        entry = self._names.get(name, {}).get(revision)
        return entry is not None and bundle in entry.completed

    def complete(self, name: str, revision: str, bundle: str) -> None:
        """Record that all ranks of a bundle of a bound revision are there."""
        self._names[name][revision].completed.add(bundle)
        self._mean_anew(name, bundle)

    def admit(
        self,
        key: ModelKey,
        ref: ManifestRef,
        owner: bytes,
        *,
        source_id: str = "",
        replaces_revision: bool = False,
        keeps_pin: bool = False,
        keeps_layout: bool = False,
        disputes: Collection[bytes] = (),
        address: str = "",
    ) -> Admission:
        """Return the key that `ref` may be bound to. Changes nothing.

        Args:
            key: What the source registers.
            ref: The source's manifest.
            owner: The digest of the source's secret; b"" for a relay.
            source_id: The source. A rank that registers an update with other source ids makes as
                many updates, even if its own weights stay the same.
            replaces_revision: If `key` is bound to another identity, register an update.
            keeps_pin: If the name stands for other weights, let readers find these by their pin.
            keeps_layout: The source can't adopt another layout or chunk size.
            disputes: Layouts that do not describe the weights, as the source has found.
            address: Where the source registers from.

        Returns:
            The decision. An update has another revision in its key.

        Raises:
            BindingError: The key is bound to another identity or owner.
            CapacityError: The coordinator, or this address, has reached its limit of models.
        """
        binding = self.get(key)
        refusal: BindingError | None = None
        if binding is None:
            refusal = self._family_refusal(key, owner)
        elif binding.identity != ref.identity or not binding.member.alone:
            if replaces_revision and owner and hmac.compare_digest(binding.owner, owner):
                key = self._next_revision(key, ref, source_id)
                binding = self.get(key)
            elif binding.identity != ref.identity or replaces_revision:
                refusal = _bound_to_others(binding, ref, replaces_revision=replaces_revision)
        if refusal is not None:
            binding = self._contests.find(key, ref.identity)
            if binding is None and not keeps_pin:
                raise refusal
        if not keeps_layout:
            for oldest, group in by_age(self._alike(key, ref.identity)):
                if group.ref.same_chunks(ref):
                    break
                if group.ref.layout not in disputes:
                    return Admission(key, refusal is None, oldest.ref_of(group))
        if binding is None or binding.group_of(ref) is None:
            self._quota.check(address)
        return Admission(key, refusal is None)

    def bind(
        self,
        now: float,
        admission: Admission,
        ref: ManifestRef,
        owner: bytes,
        source_id: str,
        *,
        base: str = "",
        address: str = "",
    ) -> Binding:
        """Add a source to a binding, and make the binding or the group if they are new.

        Args:
            now: The time.
            admission: What `admit` returned.
            ref: The source's manifest.
            owner: The digest of the source's secret; b"" for a relay.
            source_id: The source. It leaves the group that it was in.
            base: The revision that the source requested.
            address: Where the source registers from.

        Returns:
            The binding.
        """
        key = admission.key
        if admission.bound:
            binding = self._bound(key, ref, owner, base or key.revision)
        else:
            found = self._contests.find(key, ref.identity)
            binding = found or Binding(key, ref, owner, bound=False)
            if found is None:
                self._contests.add(binding)
        binding.owner = binding.owner or owner
        self._left.pop(binding, None)
        group = binding.group_of(ref) or self._begin_group(binding, ref, address)
        before = [binding.ref_of(each) for each in binding.groups]
        if binding.join(group, source_id, ref, origin=bool(owner)):
            self._refs += [(binding.ref_of(each), True) for each in binding.groups]
            self._refs += [(each, False) for each in before]
        left = self._of.get(source_id)
        self._of[source_id] = binding, group
        if left is not None and left[1] is not group:
            self._leave(now, *left, source_id, owner)
        return binding

    def leave(self, now: float, source_id: str, *, by: bytes = b"") -> None:
        """Remove a source that is gone from its binding.

        Args:
            now: The time.
            source_id: The source.
            by: The digest of its secret if it left by itself; b"" if its lease expired.
        """
        binding, group = self._of.pop(source_id)
        self._leave(now, binding, group, source_id, by)

    def _leave(self, now: float, binding: Binding, group: Group, source_id: str, by: bytes) -> None:
        binding.leave(group, source_id)
        if not group.sources and binding.in_use:
            self._end_group(binding, group)
        if not binding.bound:
            if not binding.in_use:
                self._contests.remove(binding)
                self._end(binding)
            return
        key = binding.key
        entry = self._names[key.name][key.revision]
        if not (binding.in_use or binding.member.alone):
            self._left[binding] = now + self.grace_s
            self.due_s = min(self.due_s, now + self.grace_s)
        if self._in_use(key.name, key.revision):
            return
        own = by and hmac.compare_digest(binding.owner, by)
        if own and not self._superseded(key.name, key.revision):
            self._remove(now, key.name, key.revision)
        else:
            self._let_lapse(now, entry)

    def lapse(self, now: float) -> None:
        """Remove the entries whose grace is over at `now`."""
        if now < self.due_s:
            return
        ended = [
            (name, revision)
            for name, revisions in self._names.items()
            for revision, entry in revisions.items()
            if entry.lapses_at_s <= now
        ]
        for name, revision in ended:
            self._remove(now, name, revision)
        for binding in [each for each, until_s in self._left.items() if until_s <= now]:
            del self._left[binding]
            binding.owner = b""
        lapses = (b.lapses_at_s for revisions in self._names.values() for b in revisions.values())
        self.due_s = min(*lapses, *self._left.values(), math.inf, math.inf)

    # -- inside -----------------------------------------------------------------------------------

    def _alike(self, key: ModelKey, identity: bytes) -> Iterator[Binding]:
        """Yield the bindings of all revisions of this variant with these weights."""
        for binding in self.of_name(key.name):
            if binding.key.variant == key.variant and binding.identity == identity:
                yield binding

    def _bound(self, key: ModelKey, ref: ManifestRef, owner: bytes, base: str) -> Binding:
        """Return the binding of a key, which is made if it is not bound."""
        revisions = self._names.setdefault(key.name, {})
        entry = revisions.get(key.revision)
        if entry is None:
            root = self._root(key.name, base) if base != key.revision else ""
            entry = revisions[key.revision] = _Revision(owner, root)
        entry.owner = entry.owner or owner
        entry.lapses_at_s = math.inf
        if entry.base in revisions:
            revisions[entry.base].lapses_at_s = math.inf
        binding = entry.variants.get(key.variant)
        if binding is None:
            # The owner of the family may bind what another source contests.
            binding = self._contests.find(key, ref.identity)
            if binding is None:
                binding = Binding(key, ref, owner, bound=True)
            else:
                self._contests.remove(binding)
                binding.owner, binding.bound = owner, True
                self._named += binding.sources
            entry.variants[key.variant] = binding
            entry.bundles.add(binding.member.bundle)
            if not binding.member.alone:
                self._mean_anew(key.name, binding.member.bundle)
        return binding

    def _mean_anew(self, name: str, bundle: str) -> None:
        """Decide which revision NAME means for a bundle."""
        entries = self._names.get(name, {}).items()
        bound = {r: bundle in entry.completed for r, entry in entries if bundle in entry.bundles}
        self._meant.decide(name, bundle, bound)

    def _begin_group(self, binding: Binding, ref: ManifestRef, address: str) -> Group:
        for group in list(binding.groups):
            if not group.sources:
                self._end_group(binding, group)
        self._number += 1
        group = Group(ref, self._number, address)
        binding.groups.append(group)
        self._quota.add(address)
        self._refs.append((binding.ref_of(group), True))
        return group

    def _end(self, binding: Binding) -> None:
        for group in list(binding.groups):
            self._end_group(binding, group)

    def _end_group(self, binding: Binding, group: Group) -> None:
        binding.groups.remove(group)
        self._quota.remove(group.address)
        self._refs.append((binding.ref_of(group), False))

    def _family_refusal(self, key: ModelKey, owner: bytes) -> BindingError | None:
        """Return why `owner` may not be the first to bind the key's revision; None if it may."""
        revisions = self._names.get(key.name, {})
        if key.revision in revisions or not is_main(key.revision):
            return None
        for revision, entry in revisions.items():
            own = not entry.owner or hmac.compare_digest(entry.owner, owner)
            if is_main(revision) and not own and not _is_sibling(key, owner, entry):
                return BindingError(
                    f"{replace(key, revision=revision)} belongs to another source, and "
                    f"{key.revision} would count as an update of it",
                    hint="register these weights under another name or `revision`",
                )
        return None

    def _root(self, name: str, revision: str) -> str:
        """Return the revision that this one is an update of, or `revision` if it is no update."""
        entry = self._names.get(name, {}).get(revision)
        if entry is not None and entry.base:
            return entry.base
        return MAIN if is_main(revision) else revision

    def _next_revision(self, key: ModelKey, ref: ManifestRef, source_id: str) -> ModelKey:
        """Return the key for an update: that of the variant's newest revision if `ref` has its
        identity, else the next one. Other variants may have that next revision already. A rank
        whose weights stay the same goes on to the next one with the other ranks."""
        root = self._root(key.name, key.revision)
        revisions = self._names[key.name]
        family = {
            update_number(revision, root): entry.variants[key.variant]
            for revision, entry in revisions.items()
            if self._root(key.name, revision) == root and key.variant in entry.variants
        }
        newest = max(family)
        if family[newest].identity == ref.identity:
            last = family[newest]
            # Else a repeated registration, or one after an attempt that was taken back.
            goes_on = last.in_use and source_id not in last.sources
            if last.member.alone or not goes_on:
                return last.key
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
        if any(binding.in_use for binding in revisions[revision].variants.values()):
            return True
        return any(entry.base == revision for entry in revisions.values())

    def _superseded(self, name: str, revision: str) -> bool:
        """Return True if another revision of its family is bound: a peer that still reads this
        one may yet register it."""
        root = self._root(name, revision)
        return any(
            other != revision and self._root(name, other) == root for other in self._names[name]
        )

    def _let_lapse(self, now: float, entry: _Revision) -> None:
        entry.lapses_at_s = now + self.grace_s
        self.due_s = min(self.due_s, entry.lapses_at_s)

    def _remove(self, now: float, name: str, revision: str) -> None:
        revisions = self._names[name]
        entry = revisions.pop(revision)
        for binding in entry.variants.values():
            self._left.pop(binding, None)
            self._end(binding)
        base = revisions.get(entry.base) if entry.base else None
        if base is not None and not self._in_use(name, entry.base):
            self._let_lapse(now, base)
        if not revisions:
            del self._names[name]
        self._settle_contests(name)
        for bundle in entry.bundles:
            self._mean_anew(name, bundle)

    def _settle_contests(self, name: str) -> None:
        """Bind what contested keys that are free now, the oldest first."""
        for binding in self._contests.of(name):
            key = binding.key
            if self.get(key) is None and self._family_refusal(key, binding.owner) is None:
                self._bound(key, binding.ref, binding.owner, key.revision)


def _is_sibling(key: ModelKey, owner: bytes, entry: _Revision) -> bool:
    """Return True if a revision has other ranks of the key's bundle, and no other owner of its
    variant. Ranks have owners of their own, and register updates one after the other."""
    bundle = membership(key.variant).bundle
    own = entry.variants.get(key.variant)
    if own is not None and own.owner and not hmac.compare_digest(own.owner, owner):
        return False
    return any(
        binding.member.bundle == bundle and not binding.member.alone
        for binding in entry.variants.values()
    )


def _bound_to_others(
    binding: Binding, ref: ManifestRef, *, replaces_revision: bool
) -> BindingError:
    why = "; only its owner may replace it" if replaces_revision else ""
    if binding.identity == ref.identity:
        return BindingError(
            f"{binding.key} belongs to another source; only its owner may update it",
            hint="a source that has ended gives up its name after a minute",
        )
    return BindingError(
        f"{binding.key} is bound to {binding.identity.hex()[:16]}, "
        f"not {ref.identity.hex()[:16]}{why}",
        hint="register other weights under another name or `revision`",
    )
