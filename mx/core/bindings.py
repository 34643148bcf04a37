"""The binding of names to weights: (name, revision, variant) -> identity and files, and its owner.

A name belongs to the commitment of who bound it (`mx.core.bound_name`), for as long as anything is
bound under it, and for `grace_s` after that: its owner may start anew. Each of its revisions has
variants, and each variant is bound to one identity. A bound (name, revision) never changes its
meaning: an owner's update becomes a new revision (REVISION.2, REVISION.3 …). "main", which is the
default revision, and its updates form one family, and NAME means the newest. Registering never
updates: an update names the revision that it replaces, and is refused if another one has come after
that.

*Receipts*: after a coordinator's restart a source brings the receipt of its binding
(`mx.core.ownership`). It is bound again as it was, by any source's receipt; one that was listed
before and brings none is found by its pin only, unless its weights are bound. Within the first
grace a receipt of an earlier life also wins against what was bound without one.

The first origin with files binds them too, if it is the owner's or there is no owner; another
source of the weights may have other files, or none. A relay owns no binding, and its files give way
to an origin's.

*Contested*: other weights may have taken the name. A source that was listed before is listed all
the same, and readers find it by its pin. When the binding ends and the name is free of its owner,
it goes to the oldest of those that contest it with a commitment. A source with another key than the
owner's contests it, too.

A revision stays bound while it has a source or an update of it is bound, and for `grace_s`
after that, so that a crash does not free the name. It ends at once when the owner deregisters the
last source, unless an update has replaced the revision.

A *bundle* is the ranks of one revision that make a whole (`mx.core.variant`). NAME means the newest
revision of a bundle that has been complete, for all its ranks; before one has been, the oldest. So
an update that not all ranks have registered yet changes nothing, and once they have, the end of a
rank changes nothing either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mx.core.binding import Binding, Contests
from mx.core.bound_name import BoundName, Revision
from mx.core.named import Meant, NamedRevisions
from mx.core.ownership import Receipt
from mx.core.quota import Quota
from mx.core.reserved import Reserved
from mx.core.types import ManifestRef, ModelKey


@dataclass(frozen=True, slots=True)
class Admission:
    """What `mx.core.admission` decides: the key, and whether it stands for these weights then.
    `receipt` is the one that counts, and `base` the revision that an update is one of.
    """

    key: ModelKey
    bound: bool = True
    receipt: Receipt | None = None
    base: str = ""


class Bindings:
    """All bindings of one coordinator. Not thread-safe.

    `now` never goes back. `due_s` is the earliest time at which `lapse` has something to do.
    """

    def __init__(self, *, grace_s: float, quota: Quota) -> None:
        """
        Args:
            grace_s: How long a binding outlives its last source.
            quota: Bounds the bindings.
        """
        self.grace_s = grace_s
        self.due_s = math.inf
        self.quota = quota
        self._number = 0  # of the last binding that was made
        self._names: dict[str, BoundName] = {}
        self._reserved = Reserved(grace_s=grace_s, limit=quota.limit)
        self._contests = Contests()
        self._of: dict[str, Binding] = {}  # by source
        self._renamed: list[str] = []
        self._refs: list[tuple[ManifestRef, bool]] = []
        self._meant = NamedRevisions()

    def __iter__(self) -> Iterator[Binding]:
        for name in self._names.values():
            for entry in name.revisions.values():
                yield from entry.variants.values()
        yield from self._contests

    def of_name(self, name: str) -> list[Binding]:
        """Return the bindings of one name, those that contest another one last."""
        entries = self._entries(name).values()
        bound = [binding for entry in entries for binding in entry.variants.values()]
        return [*bound, *self._contests.of(name)]

    def _entries(self, name: str) -> Mapping[str, Revision]:
        found = self._names.get(name)
        return {} if found is None else found.revisions

    @property
    def names(self) -> list[str]:
        """The bound names, sorted."""
        return sorted(self._names)

    def get(self, key: ModelKey) -> Binding | None:
        """Return the binding of `key`, or None if it is not bound."""
        name = self._names.get(key.name)
        return None if name is None else name.get(key)

    def owned_by(self, name: str, commitment: bytes) -> bool:
        """Return True if a commitment is that of a bound name's owner."""
        found = self._names.get(name)
        return found is not None and found.owned_by(commitment)

    def receipt_of(self, source_id: str) -> Receipt | None:
        """Return what the receipt of a source's binding says, without a time; None if there is none
        to give: the name does not stand for it, or has no owner."""
        binding = self._of[source_id]
        if not binding.bound:
            return None
        key, name = binding.key, self._names[binding.key.name]
        base = name.revisions[key.revision].base
        found = Receipt(key, binding.identity, name.owner, base, name.newest(key))
        return found if name.owner else None

    def name(self, name: str) -> BoundName | None:
        """Return a bound name, or one that is kept for its last owner and has no revisions; None
        for a free one."""
        return self._names.get(name) or self._reserved.get(name)

    def contests_of(self, key: ModelKey, ref: ManifestRef) -> Binding | None:
        """Return the binding of these weights that contests a key, or None."""
        return self._contests.find(key, ref)

    def of_source(self, source_id: str) -> Binding:
        """Return the binding of a source that `bind` has added."""
        return self._of[source_id]

    def take_renamed(self) -> list[str]:
        """Return the sources that have got or lost their name since the last call."""
        renamed, self._renamed = self._renamed, []
        return [source_id for source_id in renamed if source_id in self._of]

    def take_refs(self) -> list[tuple[ManifestRef, bool]]:
        """Return the manifests of bindings, with True for each that came since the last call and
        False for each that went, in order. Readers get their documents from the coordinator."""
        refs, self._refs = self._refs, []
        return refs

    def of_revision(self, name: str, revision: str) -> Mapping[str, Binding]:
        """Return the bindings of a revision by variant, without those that contest another."""
        entry = self._entries(name).get(revision)
        return {} if entry is None else entry.variants

    def revisions(self, name: str) -> dict[str, frozenset[str]]:
        """Return the bound revisions of a name, each with its bundles."""
        entries = self._entries(name)
        return {revision: frozenset(entry.bundles) for revision, entry in entries.items()}

    def meant(self, name: str, bundle: str) -> str:
        """Return the revision that NAME means for the ranks of a bundle, "" for none."""
        return self._meant.get(name, bundle)

    def take_meant(self) -> list[Meant]:
        """Return what NAME has come to mean for bundles since the last call, in order."""
        return self._meant.take()

    def has_been_complete(self, name: str, revision: str, bundle: str) -> bool:
        """Return True if `complete` was called for a bundle of a bound revision."""
        entry = self._entries(name).get(revision)
        return entry is not None and bundle in entry.completed

    def complete(self, name: str, revision: str, bundle: str) -> None:
        """Record that all ranks of a bundle of a bound revision are there."""
        self._names[name].revisions[revision].completed.add(bundle)
        self._mean_anew(name, bundle)

    def bind(
        self,
        now: float,
        admission: Admission,
        ref: ManifestRef,
        commitment: bytes,
        source_id: str,
        *,
        origin: bool = True,
        address: str = "",
    ) -> Binding:
        """Add a source to a binding, and make the binding if it is new.

        Args:
            now: The time.
            admission: What `mx.core.admission.admit` returned.
            ref: The source's manifest.
            commitment: The one that it has proved to hold the key of, b"" if none.
            source_id: The source. It leaves the binding that it was in.
            origin: False for a relay.
            address: Where the source registers from.

        Returns:
            The binding.
        """
        key = admission.key
        if admission.bound:
            binding = self._bound(admission, ref, commitment, address)
            owner = self._names[key.name].owner
            origin = origin and owner in (b"", commitment)
        else:
            found = self._contests.find(key, ref)
            binding = found or self._begin(key, ref, address, bound=False)
            if found is None:
                self._contests.add(binding)
        binding.commitment = binding.commitment or commitment
        before = binding.ref
        if binding.join(source_id, ref, origin=origin):
            self._refs += [(binding.ref, True), (before, False)]
        left = self._of.get(source_id)
        self._of[source_id] = binding
        if left is not None and left is not binding:
            self._leave(now, left, source_id, commitment)
        return binding

    def leave(self, now: float, source_id: str, *, by: bytes = b"") -> None:
        """Remove a source that is gone from its binding.

        Args:
            now: The time.
            source_id: The source.
            by: Its commitment if it left by itself; b"" if its lease expired.
        """
        self._leave(now, self._of.pop(source_id), source_id, by)

    def _leave(self, now: float, binding: Binding, source_id: str, by: bytes) -> None:
        binding.leave(source_id)
        if not binding.bound:
            if not binding.sources:
                self._contests.remove(binding)
                self._end(binding)
            return
        key = binding.key
        name = self._names[key.name]
        if name.in_use(key.revision):
            return
        if name.owned_by(by) and not name.superseded(key.revision):
            self._remove(now, key.name, key.revision)
        else:
            self._let_lapse(now, name.revisions[key.revision])

    def lapse(self, now: float) -> None:
        """Remove the entries whose grace is over at `now`, and free names that were kept."""
        if now < self.due_s:
            return
        ended = [
            (name, revision)
            for name, found in self._names.items()
            for revision, entry in found.revisions.items()
            if entry.lapses_at_s <= now
        ]
        for name, revision in ended:
            if revision in self._entries(name):
                self._remove(now, name, revision)
        for name in self._reserved.lapse(now):
            self._settle_contests(name)
        names = self._names.values()
        lapses = (entry.lapses_at_s for name in names for entry in name.revisions.values())
        self.due_s = min(lapses, default=math.inf)
        self.due_s = min(self.due_s, self._reserved.due_s)

    # -- inside -----------------------------------------------------------------------------------

    def _bound(
        self, admission: Admission, ref: ManifestRef, commitment: bytes, address: str
    ) -> Binding:
        """Return the binding of an admitted key, which is made if it is not bound."""
        key, receipt = admission.key, admission.receipt
        if receipt is not None:
            self._evict(receipt, ref.layout if key == receipt.key else b"")
        name = self._names.get(key.name)
        if name is None:
            name = BoundName(commitment if receipt is None else receipt.commitment)
            self._names[key.name] = name
            self._reserved.end(key.name)
        if receipt is not None:
            name.issued_s = max(name.issued_s, receipt.issued_s)
            name.remember(receipt)
        revisions = name.revisions
        entry = revisions.get(key.revision)
        if entry is None:
            entry = revisions[key.revision] = Revision(admission.base)
        entry.lapses_at_s = math.inf
        if entry.base in revisions:
            revisions[entry.base].lapses_at_s = math.inf
        binding = entry.variants.get(key.variant)
        if binding is None:
            # The owner of the name may bind what another source contests; in another layout it
            # binds its own, since one binding has one layout.
            binding = self._contests.find(key, ref)
            if binding is None or binding.ref.layout != ref.layout:
                binding = self._begin(key, ref, address, bound=True)
            else:
                self._contests.remove(binding)
                binding.bound = True
                self._renamed += binding.sources
            entry.variants[key.variant] = binding
            entry.bundles.add(binding.member.bundle)
            if not binding.member.alone:
                self._mean_anew(key.name, binding.member.bundle)
        if receipt is not None and receipt.key == key:
            binding.issued_s = max(binding.issued_s, receipt.issued_s)
            binding.restored |= not receipt.this_life
        return binding

    def _evict(self, receipt: Receipt, layout: bytes) -> None:
        """Let what stands against a receipt contest the name, also the same weights in another
        layout than this one; b"": in any."""
        name = self._names.get(receipt.key.name)
        if name is None:
            return
        own = name.owned_by(receipt.commitment)
        bundles: set[str] = set()
        for revision, entry in list(name.revisions.items()):
            for binding in list(entry.variants.values()):
                stands = binding.identity == receipt.identity
                stands &= layout in (b"", binding.ref.layout)
                if own and (binding.key != receipt.key or stands):
                    continue
                del entry.variants[binding.key.variant]
                binding.bound = False
                self._renamed += binding.sources
                if binding.sources:
                    self._contests.add(binding)
                else:
                    self._end(binding)
            bundles |= entry.bundles
            entry.bundles = {each.member.bundle for each in entry.variants.values()}
            entry.completed &= entry.bundles
            if not entry.variants:
                del name.revisions[revision]
        if not name.revisions:
            del self._names[receipt.key.name]
        for bundle in bundles:
            self._mean_anew(receipt.key.name, bundle)

    def _mean_anew(self, name: str, bundle: str) -> None:
        """Decide which revision NAME means for a bundle."""
        entries = self._entries(name).items()
        bound = {r: bundle in entry.completed for r, entry in entries if bundle in entry.bundles}
        self._meant.decide(name, bundle, bound)

    def _begin(self, key: ModelKey, ref: ManifestRef, address: str, *, bound: bool) -> Binding:
        self._number += 1
        self.quota.add(address)
        self._refs.append((ref, True))
        return Binding(key, ref, self._number, address, bound=bound)

    def _end(self, binding: Binding) -> None:
        self.quota.remove(binding.address)
        self._refs.append((binding.ref, False))

    def _let_lapse(self, now: float, entry: Revision) -> None:
        entry.lapses_at_s = now + self.grace_s
        self.due_s = min(self.due_s, entry.lapses_at_s)

    def _remove(self, now: float, name: str, revision: str) -> None:
        found = self._names[name]
        entry = found.revisions.pop(revision)
        addresses = [binding.address for binding in entry.variants.values()]
        for binding in entry.variants.values():
            self._end(binding)
        base = found.revisions.get(entry.base) if entry.base else None
        if base is not None and not found.in_use(entry.base):
            self._let_lapse(now, base)
        if not found.revisions:
            del self._names[name]
            if found.owner:
                for freed in self._reserved.add(now, name, found, addresses[0]):
                    self._settle_contests(freed)
                self.due_s = min(self.due_s, self._reserved.due_s)
        self._settle_contests(name)
        for bundle in entry.bundles:
            self._mean_anew(name, bundle)

    def _settle_contests(self, name: str) -> None:
        """Bind what contests keys that are free for it now, the oldest first."""
        for binding in self._contests.of(name):
            found = self.name(name)
            free = found is None or (
                found.get(binding.key) is None
                and found.refusal(binding.key, binding.commitment) is None
            )
            if free and binding.commitment:
                self._bound(
                    Admission(binding.key), binding.ref, binding.commitment, binding.address
                )
