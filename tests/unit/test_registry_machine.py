"""The registry against a simple model: events in any order, with loss, repeats and time."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mx.core.answers import in_turn
from mx.core.budget import BudgetShares, Limits
from mx.core.changes import ChangeKind
from mx.core.registry import RegisteredSource
from mx.core.types import ModelKey, SourceRecord, SourceRole, SourceState
from mx.errors import (
    BindingError,
    CapacityError,
    MxError,
    NotAllowedError,
    StaleGenerationError,
    UnknownModelError,
    UnknownSourceError,
)
from tests.support.owners import commitment_of, owned, plain
from tests.support.records import make_documents, make_record, register_source
from tests.support.redis_server import needs_redis
from tests.support.stores import FollowedRegistry, OverStores

LEASE_S = 5.0
GRACE_S = 20.0
ALICE, BOB = b"a" * 16, b"b" * 16
IDS = [f"00000000-0000-4000-8000-00000000000{i}" for i in range(5)]
WEIGHTS = {text: make_documents(text) for text in "ABC"}
LIMITS = Limits(models=9, sources=7)
#: All come from one address.
MOST_MODELS, MOST_SOURCES = BudgetShares(LIMITS.models).most, BudgetShares(LIMITS.sources).most

ids = st.sampled_from(IDS)
owns = st.sampled_from([True, True, True, True, False])
held = st.sampled_from([(), ((0, 1),), ((0, 4),), ((0, 1), (2, 4))])
generations = st.sampled_from([1, 2, 2, 3])


def secret_of(source_id: str, own: bool) -> bytes:
    """Return the secret that a source registers with, mostly."""
    return ALICE if (source_id in IDS[:2]) is own else BOB


def machine() -> FollowedRegistry:
    return FollowedRegistry(lease_s=LEASE_S, binding_grace_s=GRACE_S, limits=LIMITS)


@dataclass
class Bundle:
    base: str
    lapses_at: float | None = None


@dataclass
class Bound:
    """What a key stands for, or what contests it."""

    key: ModelKey
    identity: bytes
    owner: bytes  # of its first source that has one; it counts while it contests the key
    contests: bool
    files: bytes
    fixed: bool = False
    number: int = 0
    sources: list[str] = field(default_factory=list)

    @property
    def used(self) -> bool:
        return bool(self.sources)


@dataclass
class Source:
    record: SourceRecord
    owner: bytes
    until: float
    renewed: tuple[bool, int]  # True after the first heartbeat; when, in order


def number_of(revision: str) -> int:
    return int(revision.partition(".")[2] or "1")


class Model:
    """The same rules, written to be read."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sources: dict[str, Source] = {}
        self.bundles: dict[tuple[str, str], Bundle] = {}
        self.owners: dict[str, bytes] = {}  # of bound names
        self.reserved: dict[str, tuple[bytes, float]] = {}  # and of those that were, until when
        self.all: list[Bound] = []
        self.buried: dict[str, tuple[bytes, int, float]] = {}
        self.numbers = 0
        self.renewals = 0
        self.published: dict[tuple[str, str], int] = {}  # by name and variant, while it is bound

    def bound(self, key: ModelKey) -> Bound | None:
        return next((b for b in self.all if b.key == key and not b.contests), None)

    def contests(self, key: ModelKey, identity: bytes) -> Bound | None:
        found = (b for b in self.all if b.contests and (b.key, b.identity) == (key, identity))
        return next(found, None)

    def used(self, name: str, revision: str) -> bool:
        return any(
            b.used and not b.contests and (b.key.name, b.key.revision) == (name, revision)
            for b in self.all
        ) or any(key[0] == name and bundle.base == revision for key, bundle in self.bundles.items())

    def unbind(self, name: str, revision: str) -> None:
        base = self.bundles.pop((name, revision)).base
        gone = [b for b in self.all if (b.key.name, b.key.revision) == (name, revision)]
        self.all = [b for b in self.all if b.contests or b not in gone]
        if base and (name, base) in self.bundles and not self.used(name, base):
            self.bundles[name, base].lapses_at = self.now + GRACE_S
        owner = None if any(key[0] == name for key in self.bundles) else self.owners.pop(name)
        if owner is not None:
            self.published = {at: n for at, n in self.published.items() if at[0] != name}
        if owner:
            self.reserved[name] = owner, self.now + GRACE_S
        self.settle(name)

    def settle(self, name: str) -> None:
        for contester in [b for b in self.all if b.contests and b.key.name == name]:
            free = not self.bound(contester.key) and not self.taken(contester.key, contester.owner)
            if free and contester.owner:
                contester.contests = False
                self.open(contester.key, contester.owner)

    def taken(self, key: ModelKey, owner: bytes) -> bool:
        """True if a source of this owner may not be the first to bind a key."""
        theirs = self.owner_of(key.name)
        if theirs is None:
            return False
        variants = [b for b in self.all if not b.contests and b.key.name == key.name]
        update = any(b.key.variant == key.variant for b in variants)
        older = number_of(key.revision) < self.published.get((key.name, key.variant), 0)
        return theirs != owner or update or older

    def owner_of(self, name: str) -> bytes | None:
        """Whose the name is, or for a while was; None if it is free."""
        return self.owners.get(name, self.reserved.get(name, (None, 0.0))[0])

    def open(self, key: ModelKey, owner: bytes, base: str = "") -> None:
        self.owners.setdefault(key.name, owner)
        self.reserved.pop(key.name, None)
        at = key.name, key.variant
        self.published[at] = max(self.published.get(at, 0), number_of(key.revision))
        bundle = self.bundles.setdefault((key.name, key.revision), Bundle(base))
        bundle.lapses_at = None
        if bundle.base and (key.name, bundle.base) in self.bundles:
            self.bundles[key.name, bundle.base].lapses_at = None

    def lose(self, source_id: str, *, willingly: bool) -> None:
        source = self.sources.pop(source_id)
        until = self.now + GRACE_S
        if len(self.buried) >= LIMITS.sources:
            del self.buried[next(iter(self.buried))]
        self.buried[source_id] = (source.owner, source.record.generation, until)
        relay = source.record.role is SourceRole.RELAY
        by = source.owner if willingly and not relay else b""
        self.leave(self.place_of(source_id), source_id, by=by)

    def place_of(self, source_id: str) -> Bound:
        (found,) = [b for b in self.all if source_id in b.sources]
        return found

    def leave(self, b: Bound, source_id: str, *, by: bytes) -> None:
        b.sources.remove(source_id)
        key = b.key
        if b.contests and not b.used:
            self.all.remove(b)
        if b.contests or self.used(key.name, key.revision):
            return
        superseded = any(
            name == key.name and revision != key.revision for name, revision in self.bundles
        )
        if by and self.owners[key.name] == by and not superseded:
            self.unbind(key.name, key.revision)
        else:
            self.bundles[key.name, key.revision].lapses_at = self.now + GRACE_S

    def pass_time(self) -> None:
        # In this order, which decides which of two bindings is left.
        for source_id, source in sorted(self.sources.items(), key=lambda each: each[1].renewed):
            if source.until <= self.now:
                self.lose(source_id, willingly=False)
        lapsed = [
            key
            for key, bundle in self.bundles.items()
            if bundle.lapses_at is not None and bundle.lapses_at <= self.now
        ]
        for key in lapsed:
            self.unbind(*key)
        for name in [n for n, (_, until) in self.reserved.items() if until <= self.now]:
            del self.reserved[name]
            self.settle(name)
        self.buried = {i: b for i, b in self.buried.items() if b[2] > self.now}

    def refusal(self, record: SourceRecord, secret: bytes) -> type[MxError] | None:
        known = self.sources.get(record.source_id)
        if known:
            owner, generation = known.owner, known.record.generation
        elif record.source_id in self.buried:
            owner, generation, _ = self.buried[record.source_id]
        else:
            return CapacityError if len(self.sources) >= MOST_SOURCES else None
        if owner != secret:
            return NotAllowedError
        if record.generation < generation:
            return StaleGenerationError
        if known and not known.record.ref.same_weights(record.ref):
            return StaleGenerationError if record.generation == generation else None
        return None if known or len(self.sources) < MOST_SOURCES else CapacityError

    def place(
        self, record: SourceRecord, secret: bytes, flags: Flags
    ) -> tuple[str, bool] | type[MxError]:
        """Return the revision that it is listed under and whether it contests it, or the error that
        refuses it."""
        key, ref = record.model, record.ref
        owner = b"" if record.role is SourceRole.RELAY else secret
        theirs = self.owner_of(key.name)
        bound, refused = self.bound(key), False
        if flags.replaces:
            replaced = key._replace(revision=flags.replaces)
            revision = self.update_of(replaced, ref.identity)
            refused = not owner or theirs not in (None, owner) or not revision
            if not refused:
                key = key._replace(revision=revision)
                bound = self.bound(key)
        elif bound is None:
            refused = flags.keeps_pin or self.taken(key, owner)
        elif bound.identity != ref.identity:
            refused = True
        if refused:
            if flags.replaces:
                return BindingError
            bound = self.contests(key, ref.identity)
            strange = owner and theirs not in (None, owner)
            if bound is None and not flags.keeps_pin and not strange:
                return BindingError
        if bound is None and len(self.all) >= MOST_MODELS:
            return CapacityError
        return key.revision, refused

    def update_of(self, replaced: ModelKey, identity: bytes) -> str:
        """The revision of an update; "" if another one has come after what it replaces."""
        numbers = {
            number_of(b.key.revision): b
            for b in self.all
            if (b.key.name, b.key.variant) == (replaced.name, replaced.variant) and not b.contests
        }
        at = number_of(replaced.revision)
        if numbers and numbers[max(numbers)].identity == identity:
            return numbers[max(numbers)].key.revision
        if any(b.used for number, b in numbers.items() if number > at):
            return ""
        last = self.published.get((replaced.name, replaced.variant), 0)
        return f"main.{max([at, last, *numbers]) + 1}"

    def register(
        self, record: SourceRecord, secret: bytes, flags: Flags, revision: str, contests: bool
    ) -> SourceRecord:
        ref, source_id = record.ref, record.source_id
        owner = b"" if record.role is SourceRole.RELAY else secret
        key = record.model._replace(revision=revision)
        record = replace(record, model=key, pin_only=contests)
        was = self.place_of(source_id) if source_id in self.sources else None
        b = self.contests(key, ref.identity)
        if not contests:
            self.open(key, owner, "main" if flags.replaces and revision != "main" else "")
            if b is not None and self.bound(key) is None:
                b.contests = False
            b = self.bound(key)
        if b is None:
            self.numbers += 1
            b = Bound(key, ref.identity, owner, contests, ref.packaging, number=self.numbers)
            self.all.append(b)
        b.owner = b.owner or owner
        theirs = b"" if b.contests else self.owners[key.name]
        may_bind = record.role is SourceRole.ORIGIN and theirs in (b"", owner)
        if may_bind and ref.packaging and not b.fixed:
            b.files, b.fixed = ref.packaging, True
        if source_id not in b.sources:
            b.sources.append(source_id)
        self.buried.pop(source_id, None)
        self.renewals += 1
        until, renewed = self.now + LEASE_S, (False, self.renewals)
        self.sources[source_id] = Source(record, secret, until, renewed)
        if was is not None and was is not b:
            self.leave(was, source_id, by=owner)  # this may have freed the name for it
        return self.records()[source_id]

    def records(self) -> dict[str, SourceRecord]:
        return {
            source_id: replace(s.record, pin_only=self.place_of(source_id).contests)
            for source_id, s in self.sources.items()
        }


@dataclass(frozen=True)
class Flags:
    replaces: str
    keeps_pin: bool


flags = st.builds(
    Flags,
    st.sampled_from(["", "", "", "main", "main", "main.2", "main.3"]),
    st.sampled_from([False, False, True]),
)


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.machine = machine()
        self.model = Model()
        self.seen: dict[str, SourceRecord] = {}  # what a watcher has seen
        self.documents: Counter[bytes] = Counter()  # that the coordinator holds for bindings

    @rule(seconds=st.sampled_from([0.0, 0.5, 2.0, 4.0, 5.0, 19.0]))
    def time_passes(self, seconds: float) -> None:
        self.model.now += seconds

    @rule(
        source_id=ids,
        own=owns,
        weights=st.sampled_from(["A", "A", "B", "C"]),
        files=st.sampled_from(["", "these", "those"]),
        name=st.sampled_from(["x", "x", "y"]),
        revision=st.sampled_from(["main", "main", "main.2", "main.3"]),
        variant=st.sampled_from(["checkpoint", "checkpoint", "tp0"]),
        generation=generations,
        layers=held,
        role=st.sampled_from([SourceRole.ORIGIN] * 3 + [SourceRole.RELAY]),
        flags=flags,
    )
    def register(
        self,
        source_id: str,
        own: bool,
        weights: str,
        files: str,
        name: str,
        revision: str,
        variant: str,
        generation: int,
        layers: tuple[tuple[int, int], ...],
        role: SourceRole,
        flags: Flags,
    ) -> None:
        record = make_record(
            make_documents(weights, files=files),
            source_id=source_id,
            name=name,
            revision=revision,
            variant=variant,
            generation=generation,
            held=layers,
            role=role,
        )
        secret = secret_of(source_id, own)
        self.model.pass_time()
        expected: Any = self.model.refusal(record, secret)
        if expected is None:
            expected = self.model.place(record, secret, flags)
            if isinstance(expected, tuple):
                expected = self.model.register(record, secret, flags, *expected)

        def register() -> RegisteredSource:
            return register_source(
                self.machine,
                self.model.now,
                owned(record, secret),
                secret,
                replaces=flags.replaces,
                keeps_pin=flags.keeps_pin,
            )

        if isinstance(expected, SourceRecord):
            listed = register().record
            assert plain(listed) == expected
        else:
            with pytest.raises(expected):
                register()

    @rule(source_id=ids, own=owns, state=st.sampled_from(SourceState))
    def heartbeat(self, source_id: str, own: bool, state: SourceState) -> None:
        secret = secret_of(source_id, own)
        self.model.pass_time()
        source = self.model.sources.get(source_id)
        if source is None or source.owner != secret:
            expected = NotAllowedError if source else UnknownSourceError
            with pytest.raises(expected):
                self.machine.heartbeat(self.model.now, source_id, secret, state)
            return
        source.record = replace(source.record, state=state)
        source.until = self.model.now + LEASE_S
        self.model.renewals += 1
        source.renewed = (True, self.model.renewals)
        self.machine.heartbeat(self.model.now, source_id, secret, state)

    @rule(source_id=ids, own=owns, generation=generations, layers=held)
    def advertise(
        self, source_id: str, own: bool, generation: int, layers: tuple[tuple[int, int], ...]
    ) -> None:
        secret = secret_of(source_id, own)
        self.model.pass_time()
        now, source = self.model.now, self.model.sources.get(source_id)
        if source is None or source.owner != secret:
            expected: type[MxError] = NotAllowedError if source else UnknownSourceError
        elif generation < source.record.generation:
            expected = StaleGenerationError
        else:
            table = replace(source.record.table, held=layers)
            source.record = replace(source.record, generation=generation, table=table)
            self.machine.advertise(now, source_id, secret, generation, layers)
            return
        with pytest.raises(expected):
            self.machine.advertise(now, source_id, secret, generation, layers)

    @rule(source_id=ids, own=owns)
    def deregister(self, source_id: str, own: bool) -> None:
        secret = secret_of(source_id, own)
        self.model.pass_time()
        source = self.model.sources.get(source_id)
        if source is not None and source.owner != secret:
            with pytest.raises(NotAllowedError):
                self.machine.deregister(self.model.now, source_id, secret)
            return
        self.machine.deregister(self.model.now, source_id, secret)
        if source is not None:
            self.model.lose(source_id, willingly=True)

    @rule(seconds=st.floats(0, 100))
    def late_event(self, seconds: float) -> None:
        """A clock that goes back changes nothing."""
        self.machine.tick(self.model.now)
        self.machine.tick(self.model.now - seconds)

    @invariant()
    def same_listing(self) -> None:
        self.model.pass_time()
        self.machine.tick(self.model.now)
        listed = {s.record.source_id: s.record for s in self.machine.sources()}
        assert {i: plain(record) for i, record in listed.items()} == self.model.records()
        for record in listed.values():
            owner = self.model.owners.get(record.model.name)
            own = owner and record.commitment == commitment_of(owner) and not record.pin_only
            assert record.by_owner is bool(own)
        for change in self.machine.take_changes():
            source_id = change.record.source_id
            if change.kind is ChangeKind.UP:
                assert source_id not in self.seen and change.before is None
            else:
                assert self.seen[source_id] == change.before
            if change.kind is ChangeKind.GONE:
                del self.seen[source_id]
                assert change.reason in ("lease expired", "deregistered")
            else:
                self.seen[source_id] = change.record
        assert self.seen == listed

    @invariant()
    def same_bindings(self) -> None:
        self.model.pass_time()
        self.machine.tick(self.model.now)
        expected = {(b.key, b.identity): (b.files, b.contests) for b in self.model.all}
        summaries = self.machine.models()
        found = {(m.model, m.ref.identity): (m.ref.packaging, m.pin_only) for m in summaries}
        assert found == expected and len(summaries) == len(expected)
        for each in self.machine.take_answered():
            for digest, _ in each.ref.documents:
                self.documents[digest] += 1 if each.held else -1
                assert self.documents[digest] >= 0
        for m in summaries:
            # Whatever a name means, its documents are there.
            assert all(self.documents[digest] for digest, _ in m.ref.documents)
            if not m.pin_only:
                self.is_found(m.model)
            self.is_found_by_its_pin(m.model, m.ref.identity)
        assert bool(summaries) == bool(self.documents.total())

    def serving(self, *, identity: bytes, key: ModelKey, revision: str) -> set[str]:
        return {
            i
            for i, s in self.model.sources.items()
            if s.record.state is SourceState.SERVING
            and s.record.ref.identity == identity
            and key._replace(revision=revision or s.record.model.revision) == s.record.model
        }

    def is_found(self, key: ModelKey) -> None:
        found = self.machine.resolve(key.name, key.revision, key.variant)
        bound = self.model.bound(key)
        assert bound is not None and found.model == key
        assert (found.ref.identity, found.ref.packaging) == (bound.identity, bound.files)
        serving = self.serving(identity=bound.identity, key=key, revision=key.revision)
        # What contests the key has other weights, or there is nothing to contest.
        assert {s.record.source_id for s in found.sources} == serving
        if key.variant == "checkpoint":
            self.newest_published(key.name)

    def is_found_by_its_pin(self, key: ModelKey, identity: bytes) -> None:
        """All sources of the weights are found, whatever other sources have registered."""
        found = self.machine.resolve(f"{key.name}@{identity.hex()}", "", key.variant)
        assert found.ref.identity == identity
        serving = self.serving(identity=identity, key=key, revision="")
        assert {s.record.source_id for s in found.sources} == serving
        numbers = [self.model.place_of(s.record.source_id).number for s in found.sources]
        bindings = [s.binding for s in found.sources]
        assert numbers == sorted(numbers) and bindings == sorted(bindings)
        assert len({*numbers}) == len({*bindings}) == len({*zip(numbers, bindings, strict=True)})
        assert {*map(id, in_turn(found.sources, random.Random(0)))} == {*map(id, found.sources)}

    def newest_published(self, name: str) -> None:
        """A name alone means the newest revision that was ever bound under it, with or without
        sources, while it is bound at all."""
        number = self.model.published[name, "checkpoint"]
        meant = "main" if number == 1 else f"main.{number}"
        bound = self.model.bound(ModelKey(name, meant))
        if bound is None:
            with pytest.raises(UnknownModelError, match=f"means {name}:{meant}"):
                self.machine.resolve(name)
            return
        found = self.machine.resolve(name)
        assert found.model == found.newest == ModelKey(name, meant)
        assert found.ref.identity == bound.identity
        older = self.machine.resolve(name, allow_older=True)
        assert number_of(older.model.revision) <= number
        if found.older:
            assert older.model == found.older[0] and older.newest == found.newest


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase


class SqliteMachine(OverStores, Machine):
    kind = "sqlite"


class RedisMachine(OverStores, Machine):
    kind = "redis"


TestSqliteMachine = SqliteMachine.TestCase
TestSqliteMachine.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
TestRedisMachine = needs_redis(RedisMachine.TestCase)
TestRedisMachine.settings = settings(max_examples=5, stateful_step_count=30, deadline=None)
