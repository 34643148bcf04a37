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

NAME means the newest revision that its owner has published, whether or not it has a source now
(`mx.core.name_state.NameState.means`). A *bundle* is the ranks of one revision that make a whole
(`mx.core.variant`): it is published once all ranks have been there. So an update that not all
ranks have registered yet changes nothing, and once they have, the end of a rank changes nothing
either. A number of an update is never used again while the name is bound.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mx.core.answers import ListedSource
from mx.core.binding import Binding
from mx.core.bound_name import BoundName, Revision
from mx.core.budget import Budget
from mx.core.changes import AnswerChange, NameMeaning
from mx.core.name_state import NameState, ReservedName
from mx.core.ownership import Receipt
from mx.core.store import CountedKind, Store
from mx.core.types import ManifestRef, ModelKey
from mx.core.variant import membership
from mx.core.vouching import preferred


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
    """All bindings in a store. Not thread-safe. `now` never goes back."""

    def __init__(self, store: Store, *, grace_s: float, budget: Budget) -> None:
        """
        Args:
            store: Where they are.
            grace_s: How long a binding outlives its last source.
            budget: Bounds the bindings.
        """
        self.grace_s = grace_s
        self.budget = budget
        #: While the state is in doubt nothing that contests a name gets it.
        self.in_doubt = False
        #: Until when receipts of an earlier life count.
        self.restores_until_s = -math.inf
        self._store = store
        self._renamed: list[str] = []

    def __iter__(self) -> Iterator[Binding]:
        states = [*self._store.names()]
        for state in states:
            for entry in state.entries.values():
                yield from entry.variants.values()
        for state in states:
            yield from state.contests

    def of(self, name: str) -> NameState:
        """Return the state of a name."""
        return self._store.name(name) or NameState(name)

    @property
    def names(self) -> list[str]:
        """The bound names, sorted."""
        return sorted(state.name for state in self._store.names() if state.bound is not None)

    def take_renamed(self) -> list[str]:
        """Return the sources that may have got or lost their name since the last call."""
        renamed, self._renamed = self._renamed, []
        return renamed

    def recall(self, seen: Receipt, until_s: float, address: str) -> None:
        """Record which updates of a name there were, and whose it was: that owner has it until
        `until_s`, unless a later receipt says whose it is. It counts for an address."""
        found = self.of(seen.key.name)
        name = found.claimed
        own = name is not None and name.owned_by(seen.commitment)
        if found.bound is not None and own and found.bound.missed(seen):
            with self._changing(seen.key.name) as state:
                assert state.bound is not None
                state.bound.remember(seen)
                self._outdate(state, seen.base, seen.key)
                self._mean_anew(state, membership(seen.key.variant).bundle)
        elif not own and (name is None or seen.weight > name.issued_s):
            with self._changing(seen.key.name) as state:
                self._evict(state, seen, b"")
                self._end_kept(state)
                state.kept = ReservedName(seen.commitment, seen.weight, until_s, address)
                self._store.count(CountedKind.KEPT_NAMES, address, 1)
            self._keep_few()

    def published_now(self, key: ModelKey, base: str, wall_s: float) -> float:
        """Return when weights count as published that their owner publishes now: later than what
        the name means, whatever the clocks of coordinators say.

        Args:
            key: What they will be.
            base: The revision that this is an update of, "" for none.
            wall_s: The time since 1970.
        """
        name = self.of(key.name).bound
        if name is None:
            return wall_s
        known_s = name.published_s(base or name.root(key.revision), membership(key.variant).bundle)
        return max(wall_s, known_s + 1e-6)

    def complete(self, name: str, revision: str, bundle: str) -> None:
        """Record that all ranks of a bundle of a bound revision are there."""
        with self._changing(name) as state:
            state.entries[revision].completed.add(bundle)
            self._mean_anew(state, bundle)

    def bind(
        self,
        now: float,
        admission: Admission,
        ref: ManifestRef,
        commitment: bytes,
        source_id: str,
        *,
        lends: bytes = b"",
        was: ListedSource | None = None,
        origin: bool = True,
        published_s: float = 0.0,
        address: str = "",
        vouch: bytes = b"",
    ) -> Binding:
        """Add a source to a binding, and make the binding if it is new.

        Args:
            now: The time.
            admission: What `mx.core.admission.admit` returned.
            ref: The source's manifest.
            commitment: The one that it has proved to hold the key of, b"" if none.
            source_id: The source.
            lends: The commitment that has certified its lender key, b"" if it has none.
            was: As what it is listed already. It leaves the binding that it was in.
            origin: False for a relay.
            published_s: When its owner has published it, 0.0 if that is not known.
            address: Where the source registers from.
            vouch: What an owner says of the weights, verified; b"" for nothing.

        Returns:
            The binding.
        """
        key = admission.key
        before = None if was is None else (was.record.model.name, was.binding)
        with self._changing(key.name) as state:
            if admission.bound:
                binding = self._bound(state, admission, ref, commitment, address, lends)
                assert state.bound is not None
                origin = origin and state.bound.owner in (b"", commitment)
            else:
                found = state.contest(key, ref)
                binding = found or self._begin(state, key, ref, address, bound=False)
                if found is None:
                    binding.lent = bool(lends)
                    self._contest(state, binding, commitment)
            if commitment and binding.lent:
                binding.lent, binding.commitment = False, commitment
            binding.commitment = binding.commitment or commitment or lends
            if commitment and binding.commitment == commitment:
                binding.published_s = max(binding.published_s, published_s)
                self._outdate(state, admission.base, key)
            had = binding.ref
            if binding.join(source_id, ref, origin=origin):
                self._store.append(AnswerChange(binding.ref, held=True))
                self._store.append(AnswerChange(had, held=False))
            owner = state.bound.owner if binding.bound and state.bound else binding.commitment
            binding.vouch = preferred(binding.vouch, vouch, owner, binding.ref)
            if was is not None and before == (key.name, binding.number):
                was = None
            if was is not None and was.record.model.name == key.name:
                self._leave(now, state, was, commitment)
                was = None
        if was is not None:
            with self._changing(was.record.model.name) as state:
                self._leave(now, state, was, commitment)
        self._keep_few()
        return binding

    def leave(
        self, now: float, listed: ListedSource, *, by: bytes = b"", keeps_place: bool = False
    ) -> None:
        """Remove a source that is gone from its binding.

        Args:
            now: The time.
            listed: The source.
            by: Its commitment if it left by itself; b"" if its lease expired.
            keeps_place: It will be back: what contests a name keeps its place for `grace_s`.
        """
        with self._changing(listed.record.model.name) as state:
            self._leave(now, state, listed, by, keeps_place=keeps_place)
        self._keep_few()

    def lapse(self, now: float) -> None:
        """Remove the entries whose grace is over at `now`, and free names that were kept."""
        due = self._store.due_names(now)
        for name in due:
            with self._changing(name) as state:
                entries = state.entries
                for revision in [r for r, entry in entries.items() if entry.lapses_at_s <= now]:
                    # What was removed before it may have let another source bind it anew.
                    entry = state.entries.get(revision)
                    if entry is not None and entry.lapses_at_s <= now:
                        self._remove(now, state, revision)
                for binding in [b for b in state.contests if b.lapses_at_s <= now]:
                    state.contests.remove(binding)
                    self._end(binding)
                if state.kept is not None and state.kept.until_s <= now:
                    self._free(state)
        if due:
            self._keep_few()

    def settle(self) -> bool:
        """Bind what contests names that are free for it, as after a doubt. Return True if anything
        was bound."""
        found = [s.name for s in self._store.names() if any(_is_free(s, b) for b in s.contests)]
        for name in found:
            with self._changing(name) as state:
                self._settle_contests(state)
        return bool(found)

    # -- inside -----------------------------------------------------------------------------------

    @contextmanager
    def _changing(self, name: str) -> Iterator[NameState]:
        """Read what is kept of a name, and have the store decide what it becomes."""
        state = self.of(name)
        yield state
        self._store.decide(state)

    def _contest(self, state: NameState, binding: Binding, commitment: bytes) -> None:
        """Add what contests a name: in the place of what the same holder has contested it with
        before, if that has no source any more."""
        for at, each in enumerate(state.contests):
            same = each.key == binding.key and each.commitment == commitment != b""
            if same and not each.sources:
                state.contests[at] = binding
                self._end(each)
                return
        state.contests.append(binding)

    def _bound(
        self,
        state: NameState,
        admission: Admission,
        ref: ManifestRef,
        commitment: bytes,
        address: str,
        lends: bytes = b"",
    ) -> Binding:
        """Return the binding of an admitted key, which is made if it is not bound."""
        key, receipt = admission.key, admission.receipt
        if receipt is not None:
            self._evict(state, receipt, ref.layout if key == receipt.key else b"")
        name = state.bound
        if name is None:
            owner = commitment if receipt is None else receipt.commitment
            name = state.bound = BoundName(owner, restores_until_s=self.restores_until_s)
            self._end_kept(state)
        if receipt is not None:
            name.issued_s = max(name.issued_s, receipt.weight)
            name.remember(receipt)
        revisions = name.revisions
        entry = revisions.get(key.revision)
        if entry is None:
            entry = revisions[key.revision] = Revision(admission.base)
        entry.lapses_at_s = math.inf
        if entry.base in revisions:
            revisions[entry.base].lapses_at_s = math.inf
        binding = entry.variants.get(key.variant)
        if binding is not None and binding.identity != ref.identity:  # its owner replaces it
            self._unbind(state, entry, binding)
            binding = None
        if binding is None:
            # The owner of the name may bind what another source contests; in another layout it
            # binds its own, since one binding has one layout.
            binding = state.contest(key, ref)
            if binding is None or binding.ref.layout != ref.layout:
                binding = self._begin(state, key, ref, address, bound=True)
                binding.lent = bool(lends) if receipt is None else receipt.lent
            else:
                state.contests.remove(binding)
                binding.bound, binding.lent = True, binding.lent or bool(lends)
                self._renamed += binding.sources
            entry.variants[key.variant] = binding
            entry.bundles.add(binding.member.bundle)
            if not binding.member.alone:
                self._mean_anew(state, binding.member.bundle)
        if receipt is not None and receipt.key == key:
            binding.issued_s = max(binding.issued_s, receipt.issued_s)
            binding.restored |= not receipt.this_life
        if receipt is not None and not receipt.this_life:
            self._outdate(state, receipt.base, receipt.key)
        return binding

    def _outdate(self, state: NameState, base: str, key: ModelKey) -> None:
        """Have what its owner has published later than what the name means, and what has a lower
        number or lost its place to a receipt, be registered as an update. So long the name waits.

        Args:
            state: The name's.
            base: The revision that the key's is an update of, "" for none or if that is not known.
            key: Of the weights of which something has come to light.
        """
        name, bundle = state.bound, membership(key.variant).bundle
        if name is None:
            return
        root = base or name.root(key.revision)
        known_s = name.published_s(root, bundle)
        awaited_s = 0.0
        for each in state.bindings():
            ours = each.member.bundle == bundle and name.root(each.key.revision) == root
            if ours and name.owned_by(each.commitment):
                late = not each.bound or name.behind(each.key) or name.unlike(each)
                each.outdated = late and each.published_s > known_s
                if each.outdated:
                    awaited_s = max(awaited_s, each.published_s)
        name.await_update(root, bundle, awaited_s)

    def _evict(self, state: NameState, receipt: Receipt, layout: bytes) -> None:
        """Let what stands against a receipt contest the name, also the same weights in another
        layout than this one; b"": in any."""
        name = state.bound
        if name is None:
            return
        own = name.owned_by(receipt.commitment)
        bundles = set(state.meant)
        for revision, entry in list(name.revisions.items()):
            for binding in list(entry.variants.values()):
                stands = binding.identity == receipt.identity
                stands &= layout in (b"", binding.ref.layout)
                if own and (binding.key != receipt.key or stands):
                    continue
                self._unbind(state, entry, binding)
            bundles |= entry.bundles
            entry.bundles = {each.member.bundle for each in entry.variants.values()}
            entry.completed &= entry.bundles
            if not entry.variants:
                del name.revisions[revision]
        if not name.revisions and not own:  # else its numbers stay taken
            state.bound = None
        for bundle in bundles:
            self._mean_anew(state, bundle)

    def _unbind(self, state: NameState, entry: Revision, binding: Binding) -> None:
        """Let a binding contest its name, if it has sources."""
        del entry.variants[binding.key.variant]
        binding.bound = False
        self._renamed += binding.sources
        if binding.sources:
            state.contests.append(binding)
        else:
            self._end(binding)

    def _mean_anew(self, state: NameState, bundle: str) -> None:
        """Decide which revision NAME means for a bundle, and append a change of it."""
        if membership(bundle).alone:
            return
        meant = state.means(bundle)
        if meant == state.meant.get(bundle, ""):
            return
        if meant:
            state.meant[bundle] = meant
        else:
            del state.meant[bundle]
        self._store.append(NameMeaning(state.name, bundle, meant))

    def _begin(
        self, state: NameState, key: ModelKey, ref: ManifestRef, address: str, *, bound: bool
    ) -> Binding:
        state.numbers += 1
        self.budget.take(address)
        self._store.append(AnswerChange(ref, held=True))
        return Binding(key, ref, state.numbers, address, bound)

    def _end(self, binding: Binding) -> None:
        self.budget.take(binding.address, -1)
        self._store.append(AnswerChange(binding.ref, held=False))

    def _leave(
        self,
        now: float,
        state: NameState,
        listed: ListedSource,
        by: bytes,
        *,
        keeps_place: bool = False,
    ) -> None:
        key = listed.record.model
        binding = state.numbered(key, listed.binding)
        binding.leave(listed.record.source_id)
        if not binding.bound:
            if not binding.sources and binding.commitment and (keeps_place or self.in_doubt):
                binding.lapses_at_s = now + self.grace_s
            elif not binding.sources:
                state.contests.remove(binding)
                self._end(binding)
            return
        name = state.bound
        assert name is not None
        if name.in_use(key.revision):
            return
        if name.owned_by(by) and not name.superseded(key.revision):
            self._remove(now, state, key.revision)
        else:
            name.revisions[key.revision].lapses_at_s = now + self.grace_s

    def _remove(self, now: float, state: NameState, revision: str) -> None:
        found = state.bound
        assert found is not None
        entry = found.forget_revision(revision)
        addresses = [binding.address for binding in entry.variants.values()]
        for binding in entry.variants.values():
            self._end(binding)
        base = found.revisions.get(entry.base) if entry.base else None
        if base is not None and not found.in_use(entry.base):
            base.lapses_at_s = now + self.grace_s
        if not found.revisions:
            state.bound = None
            if found.owner:
                until_s = now + self.grace_s
                state.kept = ReservedName(found.owner, found.issued_s, until_s, addresses[0])
                self._store.count(CountedKind.KEPT_NAMES, addresses[0], 1)
        self._settle_contests(state)
        for bundle in {*entry.bundles, *state.meant}:
            self._mean_anew(state, bundle)

    def _end_kept(self, state: NameState) -> None:
        """Keep a name no longer for its last owner."""
        if state.kept is not None:
            self._store.count(CountedKind.KEPT_NAMES, state.kept.address, -1)
            state.kept = None

    def _free(self, state: NameState) -> None:
        self._end_kept(state)
        self._settle_contests(state)

    def _keep_few(self) -> None:
        """Free names that are kept, if they are more than models may be: of the address that has
        the most the one that would be free first."""
        while self._store.counted(CountedKind.KEPT_NAMES, "")[0] > self.budget.shares.units:
            kept = [(s.name, s.kept) for s in self._store.names() if s.kept is not None]
            counts = Counter(each.address for _, each in kept)
            most = max(counts, key=counts.__getitem__)
            theirs = ((each.until_s, name) for name, each in kept if each.address == most)
            with self._changing(min(theirs)[1]) as state:
                self._free(state)

    def _settle_contests(self, state: NameState) -> None:
        """Bind what contests keys that are free for it now, the oldest first."""
        for binding in () if self.in_doubt else list(state.contests):
            if _is_free(state, binding):
                self._bound(
                    state,
                    Admission(binding.key),
                    binding.ref,
                    binding.commitment,
                    binding.address,
                )
                assert state.bound is not None
                if not state.bound.in_use(binding.key.revision):
                    # Its source is away for a while: so long it is bound.
                    state.entries[binding.key.revision].lapses_at_s = binding.lapses_at_s


def _is_free(state: NameState, binding: Binding) -> bool:
    """Return True if the name may stand for what contests it."""
    found, by = state.claimed, binding.commitment
    if found is None:
        return bool(by) and not binding.lent
    own, lends = (b"", by) if binding.lent else (by, b"")
    refusal = found.refusal(binding.key, own, lends=lends)
    return bool(by) and found.get(binding.key) is None and refusal is None
