"""The coordinator's state machine: which sources hold which models. Events in, changes out; `now`
is an argument.

The state is a store's (`mx.core.store`): the registry decides, and the store has what follows, for
watchers too. Every event first lets time pass (`tick`), also one that is refused then.
`mx.core.bindings` binds names; a source is listed while its lease lasts. A source id belongs to the
secret that registered it, and its generation never decreases; both hold for `binding_grace_s` after
the source is gone. Other weights, or another layout of them, under the same source id need a higher
generation.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from blake3 import blake3

from mx.core.admission import RegistrationClaim, admit
from mx.core.answers import BundleStatus, ListedSource, ModelStatus, ResolveAnswer, in_order
from mx.core.binding import Binding
from mx.core.bindings import Bindings
from mx.core.budget import Limits, StoredBudget
from mx.core.bundles import summaries
from mx.core.changes import Change, ChangeKind
from mx.core.meanings import meaning
from mx.core.name_state import NameState
from mx.core.ownership import TENTATIVE, Receipt
from mx.core.store import CountedKind, FormerSource, Store
from mx.core.types import (
    ManifestRef,
    ModelKey,
    Registration,
    SourceRecord,
    SourceRole,
    SourceState,
    cover,
)
from mx.core.variant import membership
from mx.core.vouching import MOST, family
from mx.errors import (
    NotAllowedError,
    StaleGenerationError,
    UnknownModelError,
    UnknownSourceError,
)

#: Why a source is gone that will be back.
_FOR_NOW = "withdrawn for now"
_LEFT, _EXPIRED = "deregistered", "lease expired"
#: Why sources are not listed any more; the last: with the state.
GONE = (_LEFT, _FOR_NOW, _EXPIRED, "lost")


@dataclass(frozen=True, slots=True)
class RegisteredSource:
    """The answer to `register`: the record as listed. `receipt` is what the coordinator gives to
    the source, None for nothing; it has no time yet. `owner` is the commitment that the name
    belongs to, b"" for none. `published_s` is when the source's owner has published its weights, in
    seconds since 1970; 0.0 if the source does not hold the owner's key."""

    record: SourceRecord
    receipt: Receipt | None = None
    owner: bytes = b""
    published_s: float = 0.0


class Registry:
    """The state machine. Not thread-safe. A `now` that goes back counts as the latest one seen."""

    def __init__(
        self,
        store: Store,
        *,
        lease_s: float = 5.0,
        first_lease_s: float | None = None,
        binding_grace_s: float = 60.0,
        limits: Limits | None = None,
    ) -> None:
        """
        Args:
            store: The state.
            lease_s: How long a source stays listed after a heartbeat.
            first_lease_s: How long it stays listed after it registers, at least `lease_s`, which
                is the default.
            binding_grace_s: How long bindings and source ids outlive their last source.
            limits: The most models and sources.
        """
        self.lease_s = lease_s
        self.first_lease_s = max(lease_s, first_lease_s or lease_s)
        self.binding_grace_s = binding_grace_s
        self.limits = limits or Limits()
        self._store = store
        self._now = self._began_s = -math.inf
        self._restores_s = -math.inf  # since when receipts of an earlier life count
        self._settled_s = -math.inf  # the end of the last doubt after which names were settled
        self._budget = StoredBudget(
            self.limits.sources, "the coordinator lists {} sources", store, CountedKind.SOURCES
        )
        models = StoredBudget(
            self.limits.models, "the coordinator knows {} models", store, CountedKind.MODELS
        )
        self._bindings = Bindings(store, grace_s=binding_grace_s, budget=models)

    # -- events ---------------------------------------------------------------------------------

    def register(
        self,
        now: float,
        registration: Registration,
        *,
        receipt: Receipt | None = None,
        address: str = "",
        wall_s: float = 0.0,
    ) -> RegisteredSource:
        """List a source, or renew a listed one.

        Args:
            now: The time.
            registration: The source, whose commitment has been proved, and what it asks for.
            receipt: What the receipt of its intent says, if its MAC is this coordinator's.
            address: Where it registers from.
            wall_s: The time since 1970.

        Returns:
            The record as listed. An update has a new revision.

        Raises:
            BindingError: The name is bound to other weights or belongs to another owner, or another
                source has updated it.
            NotAllowedError: The source id belongs to another secret.
            StaleGenerationError: The generation is past, or not higher though weights or layout
                differ.
            CapacityError: A limit is reached.
        """
        self.tick(now)
        record, intent = registration.record, registration.intent
        digest = _digest(registration.secret)
        known = self._store.source(record.source_id)
        self._check_owner(record, digest, known)
        if known is None:
            self._budget.check(address)
        origin = record.role is SourceRole.ORIGIN
        commitment = record.own_commitment
        lends = record.commitment if origin and record.certificate else b""
        claim = RegistrationClaim(
            commitment,
            intent,
            receipt,
            self._now < self._restores_until_s(record.model.name),
            self._bindings.in_doubt,
            lends,
        )
        admission = admit(self._bindings, record.model, record.ref, claim, address=address)
        # From here on nothing fails.
        before = None if known is None else known.record
        readers, gb_per_s = (known.readers, known.gb_per_s) if known else (0, 0.0)
        published_s = intent.published_s
        if receipt is not None and receipt.is_of_newest(admission.key, commitment):
            published_s = published_s or receipt.newest_s
        if not published_s and (intent.publishes or intent.replaces):
            published_s = self._bindings.published_now(
                admission.key, admission.base, wall_s or self._now
            )
        binding = self._bindings.bind(
            self._now,
            admission,
            record.ref,
            commitment,
            record.source_id,
            lends=lends,
            was=known,
            origin=origin,
            published_s=published_s,
            address=address,
            vouch=record.vouch,
        )
        certificate = record.certificate if lends else b""
        commitment = commitment or lends
        record = replace(
            record,
            model=admission.key,
            commitment=commitment,
            certificate=certificate,
            vouch=b"",
        )
        record = self._as_named(record, binding.number)
        if known is not None:
            self._budget.take(known.address, -1)
        self._budget.take(address)
        if not record.pin_only:
            self._store.distrusted.discard(record.model.name)
        listed = ListedSource(record, digest, self._now, address, binding=binding.number)
        self._store.put_source(listed)
        self._renew(listed, readers, gb_per_s, first=True)
        self._store.forget(self._now, record.source_id)
        if before is None:
            self._store.append(Change(ChangeKind.UP, record, address=address))
        elif before != record:
            self._store.append(Change(ChangeKind.CHANGED, record, before))
        self._complete(record)
        self._name()
        listed = self.source(record.source_id)
        speaks = commitment and binding.commitment == commitment and not lends
        return RegisteredSource(
            listed.record,
            self.receipt_of(listed),
            self.owner(record.model.name),
            binding.published_s if speaks else 0.0,
        )

    def heartbeat(
        self,
        now: float,
        source_id: str,
        secret: bytes,
        state: SourceState,
        *,
        readers: int = 0,
        gb_per_s: float = 0.0,
        requests_port: int = 0,
    ) -> SourceRecord:
        """Renew a source's lease, and record its state, its readers, its rate and where its process
        takes requests.

        Returns:
            Its record.

        Raises:
            UnknownSourceError: The source is not listed.
            NotAllowedError: The secret is wrong.
        """
        self.tick(now)
        listed = self._owned(source_id, secret)
        self._renew(listed, readers, gb_per_s)
        record = listed.record
        if (state, requests_port) != (record.state, record.requests_port):
            record = replace(record, state=state, requests_port=requests_port)
            self._update(listed, record)
        return record

    def recall(self, now: float, seen: Receipt, *, address: str = "") -> None:
        """Take note of what a reader of an earlier life has seen of a name, while receipts of that
        count: it means nothing older, and waits for its owner while who came before him brings no
        receipt.

        Args:
            now: The time.
            seen: What the reader has seen.
            address: Where the reader asks from.
        """
        self.tick(now)
        until_s = self._restores_until_s(seen.key.name)
        if self._now < until_s:
            self._bindings.recall(seen, until_s, address)

    def advertise(
        self,
        now: float,
        source_id: str,
        secret: bytes,
        generation: int,
        held: Sequence[tuple[int, int]],
    ) -> None:
        """Record that a source now holds exactly these layers. Does not renew its lease.

        Raises:
            UnknownSourceError: The source is not listed.
            NotAllowedError: The secret is wrong.
            StaleGenerationError: The source has a newer generation by now.
        """
        self.tick(now)
        listed = self._owned(source_id, secret)
        self._check_generation(generation, listed.record.generation)
        table = replace(listed.record.table, held=tuple(held))
        self._update(listed, replace(listed.record, generation=generation, table=table))

    def deregister(
        self, now: float, source_id: str, secret: bytes, *, keeps_name: bool = False
    ) -> None:
        """Remove a source from the list. Does nothing if it is not listed.

        With `keeps_name` its binding outlives it by `binding_grace_s`, as after a crash.

        Raises:
            NotAllowedError: The secret is wrong.
        """
        self.tick(now)
        if self._store.source(source_id) is not None:
            self._owned(source_id, secret)
            self._drop(source_id, _FOR_NOW if keeps_name else _LEFT)

    def tick(self, now: float) -> None:
        """Advance the clock: leases, bindings and tombstones end. Costs in proportion to what
        ends."""
        self._now = now = max(self._now, now)
        if self._began_s == -math.inf:
            self._began_s = now
            if not self._store.outlives or not any(True for _ in self._store.names()):
                self._restores_s = now
            self._store.resume(now + self.first_lease_s)
        self._bindings.in_doubt = now < self._store.doubt_until_s
        self._bindings.restores_until_s = (
            max(self._restores_s, self._store.doubt_until_s) + self.binding_grace_s
        )
        for source_id in self._store.due_sources(now):
            self._drop(source_id, _EXPIRED)
        self._store.forget(now)
        self._bindings.lapse(now)
        self._end_doubt()
        self._name()

    def _restores_until_s(self, name: str) -> float:
        """Return until when receipts of an earlier life count for a name."""
        bound, until_s = self._bindings.of(name).bound, self._bindings.restores_until_s
        return until_s if bound is None else max(until_s, bound.restores_until_s)

    def _end_doubt(self) -> None:
        """Let what was found by its pin in a doubt have its name, if it is free."""
        until_s = self._store.doubt_until_s
        # Again until nothing is left: these steps may have no effect.
        if self._settled_s < until_s <= self._now and not self._bindings.settle():
            self._settled_s = until_s

    # -- questions (call `tick` first) ------------------------------------------------------------

    def layout_version(self, key: ModelKey, unlisted: int) -> int:
        """Return the layout version by which the next source of a key has to plan.

        Args:
            key: The key.
            unlisted: The version for what is not listed.

        Returns:
            That of the weights that the key stands for, else that of an update of it; else
            `unlisted`, or a lower one in which the key's weights are listed by their pin.
        """
        state = self._bindings.of(key.name)
        if (name := state.claimed) is not None:
            family = name.family(name.root(key.revision), key.variant)
            found = name.get(key) or family.get(max(family, default=0))
            if found is not None:
                return found.ref.layout_version
        contests = [each for each in state.contests if each.key == key]
        return min([unlisted, *(each.ref.layout_version for each in contests)])

    def source(self, source_id: str) -> ListedSource:
        """Return a listed source.

        Raises:
            UnknownSourceError: It is not listed.
        """
        listed = self._store.source(source_id)
        if listed is None:
            raise UnknownSourceError(f"source {source_id} is not registered here")
        return listed

    def receipt_of(self, listed: ListedSource) -> Receipt | None:
        """Return what the receipt of a listed source says now, without a time; None for none."""
        state = self._bindings.of(listed.record.model.name)
        return self._receipt(state, state.numbered(listed.record.model, listed.binding))

    def outdated_by(self, listed: ListedSource) -> str:
        """Return the revision that a source has to update, so that its name means what it has
        published; "" for none."""
        state = self._bindings.of(listed.record.model.name)
        return state.outdated_by(state.numbered(listed.record.model, listed.binding))

    def owner(self, name: str) -> bytes:
        """Return the commitment that a name belongs to, b"" for none."""
        claimed = self._bindings.of(name).claimed
        return b"" if claimed is None else claimed.owner

    def vouches(self, key: ModelKey) -> list[bytes]:
        """Return what owners have said of a variant in a family of revisions, the newest first."""
        found = (b for b in self._bindings.of(key.name).bindings() if b.bound and b.vouch)
        root, variant = family(key.revision), key.variant
        said = (
            b.vouch for b in found if (family(b.key.revision), b.key.variant) == (root, variant)
        )
        return sorted(said, reverse=True)[:MOST]

    def sources(self, name: str = "") -> list[ListedSource]:
        """Return all sources, or those of one model name, in order of registration."""
        return [s for s in self._store.sources() if name in ("", s.record.model.name)]

    def of_name(self, name: str) -> list[SourceRecord]:
        """Return the records of one model name's listed sources."""
        bindings = self._bindings.of(name).bindings()
        found = (self._store.source(each) for binding in bindings for each in binding.sources)
        return [listed.record for listed in found if listed is not None]

    def models(self) -> list[ModelStatus]:
        """Return every variant that is bound or contested, with or without sources."""
        found = []
        for binding in self._bindings:
            listed = [self.source(source_id) for source_id in binding.sources]
            origins = [s.record for s in listed if s.record.role is SourceRole.ORIGIN]
            found.append(
                ModelStatus(
                    binding.key,
                    binding.ref,
                    max((o.table.nbytes for o in origins), default=0),
                    max((o.table.held[-1][1] for o in origins if o.table.held), default=0),
                    len(listed),
                    pin_only=not binding.bound,
                    restored=binding.restored,
                )
            )
        return found

    def bound(self) -> Iterator[tuple[str, ManifestRef]]:
        """Yield the name and the manifest of every variant that is bound or contested."""
        return ((binding.key.name, binding.ref) for binding in self._bindings)

    def bundles(self, name: str = "") -> list[BundleStatus]:
        """Return all bundles, or those of one model name, and which of their ranks are missing: no
        whole source serves them."""
        names = [name] if name else self._bindings.names
        states = map(self._bindings.of, names)
        return [each for state in states for each in summaries(state, self._is_served)]

    def resolve(
        self,
        name: str,
        revision: str = "",
        variant: str = "",
        sees: Callable[[str], bool] | None = None,
        *,
        allow_older: bool = False,
    ) -> ResolveAnswer:
        """Return the manifest that NAME or NAME@PIN means, and the sources that serve it now.

        Args:
            name: NAME or NAME@PIN.
            revision: "" for the newest one that its owner has published; for a rank the one that
                NAME means for all ranks of its bundle.
            variant: "" for "checkpoint", or the only one that is listed.
            allow_older: Without a pin or a revision, answer with an older revision that can be
                obtained whole if the newest cannot.
            sees: Says of which names the caller may learn that they are bound; None: of all.

        Returns:
            The answer; it may have no sources, since draining ones are left out.

        Raises:
            UnknownModelError: No binding fits.
            ConfigError: The pin is malformed or ambiguous.
        """
        try:
            meant = meaning(self._bindings, name, revision, variant, sees)
        except UnknownModelError:
            self._check_trusted(name.partition("@")[0])
            raise
        if meant.pinned:
            answer = self._answer(meant.bindings, meant.files)
            newest = self._superseding(answer.model)
            return answer._replace(newest=newest, seen=self._seen(answer.model))
        first, *rest = meant.bindings
        older = [b for b in rest if self._is_available(b)] if not self._is_available(first) else []
        answer = self._answer([older[0] if allow_older and older else first])
        return answer._replace(
            newest=None if revision else first.key,
            older=tuple(binding.key for binding in older),
            seen=self._seen(answer.model),
        )

    # -- inside -----------------------------------------------------------------------------------

    def _seen(self, key: ModelKey) -> Receipt | None:
        state = self._bindings.of(key.name)
        binding = state.get(key)
        return None if binding is None else self._receipt(state, binding)

    def _receipt(self, state: NameState, binding: Binding) -> Receipt | None:
        said = state.receipt_of(binding)
        if said is None or state.bound is None or self._now >= self._restores_until_s(state.name):
            return said
        rank = state.bound.issued_s
        tentative = rank < TENTATIVE
        return said._replace(tentative=tentative, rank=rank if tentative else 0.0)

    def _check_trusted(self, name: str) -> None:
        if name in self._store.distrusted:
            raise UnknownModelError(
                f"what was kept of {name!r} was not written by a coordinator, and is not used",
                hint="it is back when its owner's source has registered again, which a running one "
                "does by itself",
            )

    def _superseding(self, key: ModelKey) -> ModelKey | None:
        """Return what NAME means for a variant, if it is another revision that can be obtained
        whole; else None."""
        state = self._bindings.of(key.name)
        meant = key._replace(revision=state.means(membership(key.variant).bundle))
        binding = state.get(meant)
        return meant if binding and meant != key and self._is_available(binding) else None

    def _is_available(self, binding: Binding) -> bool:
        """Return True if the sources that grant reads hold all of a variant, and all of each other
        rank of its bundle."""
        if binding.member.alone:
            return cover(listed.record for listed in self._serving(binding))
        entry = self._bindings.of(binding.key.name).entries[binding.key.revision]
        ranks = [b for b in entry.variants.values() if b.member.bundle == binding.member.bundle]
        return len(ranks) == binding.member.ranks and all(
            cover(listed.record for listed in self._serving(each)) for each in ranks
        )

    def _answer(
        self, bindings: Sequence[Binding], files: ManifestRef | None = None
    ) -> ResolveAnswer:
        """Answer with the oldest binding that is served; of a pin's with one in the lowest layout
        version, which more readers plan, but not with a stranger's before that of the name."""

        def order(binding: Binding) -> tuple[bool, int, int]:
            return not binding.bound, binding.ref.layout_version, binding.number

        bindings = sorted(bindings, key=order)
        serving = {binding.number: self._serving(binding) for binding in bindings}
        first = max(bindings, key=lambda binding: bool(serving[binding.number]))
        ref = first.ref if files is None else first.ref.with_files_of(files)
        everyone = [listed for each in serving.values() for listed in each]
        return ResolveAnswer(first.key, ref, tuple(in_order(everyone)), vouch=first.vouch)

    def _serving(self, binding: Binding) -> list[ListedSource]:
        listed = map(self._store.source, binding.sources)
        return [s for s in listed if s and s.record.state is SourceState.SERVING]

    def _check_owner(self, record: SourceRecord, digest: bytes, known: ListedSource | None) -> None:
        if known is not None:
            owner, generation = known.secret_digest, known.record.generation
        elif (gone := self._store.gone(record.source_id)) is not None:
            owner, generation = gone.secret_digest, gone.generation
        else:
            return
        if not hmac.compare_digest(owner, digest):
            raise NotAllowedError(
                f"source id {record.source_id} belongs to another source", hint="choose a new UUID"
            )
        self._check_generation(record.generation, generation)
        changed = known is not None and not known.record.ref.same_weights(record.ref)
        if changed and record.generation == generation:
            raise StaleGenerationError(
                f"source {record.source_id} has other weights, or another layout of them, under "
                "the same generation",
                hint="raise the generation whenever memory or layout changes",
            )

    @staticmethod
    def _check_generation(generation: int, current: int) -> None:
        if generation < current:
            raise StaleGenerationError(f"generation {generation} is past: {current} is current")

    def _owned(self, source_id: str, secret: bytes) -> ListedSource:
        listed = self.source(source_id)
        if not hmac.compare_digest(listed.secret_digest, _digest(secret)):
            raise NotAllowedError(f"source id {source_id} belongs to another source")
        return listed

    def _update(self, listed: ListedSource, record: SourceRecord) -> None:
        before = listed.record
        if record == before:
            return
        listed.record = record
        self._store.put_source(listed)
        only_layers = replace(record, table=before.table) == before
        kind = ChangeKind.LAYERS if only_layers else ChangeKind.CHANGED
        self._store.append(Change(kind, record, before))
        self._complete(record)

    def _complete(self, record: SourceRecord) -> None:
        """Record that all ranks of a source's bundle are there, if it is the last one to come."""
        key = record.model
        member = membership(key.variant)
        if member.alone or record.pin_only or not _serves(record):
            return
        entry = self._bindings.of(key.name).entries[key.revision]
        bound = entry.variants
        if member.bundle in entry.completed or len(bound) < member.ranks:
            return
        ranks = [each for each in bound.values() if each.member.bundle == member.bundle]
        if len(ranks) == member.ranks and all(map(self._is_served, ranks)):
            self._bindings.complete(key.name, key.revision, member.bundle)

    def _is_served(self, binding: Binding) -> bool:
        """Return True if a whole source of the binding grants reads."""
        return any(_serves(self.source(source_id).record) for source_id in binding.sources)

    def _renew(
        self, listed: ListedSource, readers: int, gb_per_s: float, *, first: bool = False
    ) -> None:
        until_s = self._now + (self.first_lease_s if first else self.lease_s)
        source_id = listed.record.source_id
        self._store.renew(source_id, until_s, readers, gb_per_s, first=first)

    def _name(self) -> None:
        """Record for which sources names have begun or ceased to stand."""
        for source_id in self._bindings.take_renamed():
            listed = self._store.source(source_id)
            if listed is not None:
                self._update(listed, self._as_named(listed.record, listed.binding))

    def _as_named(self, record: SourceRecord, number: int) -> SourceRecord:
        """Return a record that says whether its name stands for it, and is its owner's.

        Args:
            record: The record.
            number: That of its binding.
        """
        state = self._bindings.of(record.model.name)
        binding = state.numbered(record.model, number)
        own = binding.bound and state.owned_by(record.commitment)
        return replace(record, pin_only=not binding.bound, by_owner=own)

    def _drop(self, source_id: str, reason: str) -> None:
        listed = self.source(source_id)
        self._store.drop(source_id)
        self._budget.take(listed.address, -1)
        record = listed.record
        by = record.own_commitment if reason == _LEFT else b""
        keeps_place = reason == _FOR_NOW
        self._bindings.leave(self._now, listed, by=by, keeps_place=keeps_place)
        until_s = self._now + self.binding_grace_s
        gone = FormerSource(listed.secret_digest, record.generation, until_s)
        self._store.bury(source_id, gone, most=self.limits.sources)
        self._store.append(Change(ChangeKind.GONE, record, record, reason))
        self._name()


def _serves(record: SourceRecord) -> bool:
    return record.state is SourceState.SERVING and record.whole


def _digest(secret: bytes) -> bytes:
    return blake3(secret).digest()
