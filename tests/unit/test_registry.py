"""The registry against a simple model: events in any order, with loss, repeats and time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mx.core.registry import ChangeKind, Limits, Registry
from mx.core.types import SourceRecord, SourceRole, SourceState
from mx.errors import (
    BindingError,
    CapacityError,
    ConfigError,
    MxError,
    NotAllowedError,
    StaleGenerationError,
    UnknownModelError,
    UnknownSourceError,
)
from tests.support.records import make_documents, make_record

LEASE_S = 5.0
GRACE_S = 20.0
ALICE, BOB = b"a" * 16, b"b" * 16
IDS = [f"00000000-0000-4000-8000-00000000000{i}" for i in range(4)]
WEIGHTS = {text: make_documents(text) for text in "ABC"}
LIMITS = Limits(models=4, sources=3)

ids = st.sampled_from(IDS)
secrets = st.sampled_from([ALICE, BOB])
held = st.sampled_from([(), ((0, 1),), ((0, 4),), ((0, 1), (2, 4))])
generations = st.integers(1, 3)


def machine() -> Registry:
    return Registry(lease_s=LEASE_S, binding_grace_s=GRACE_S, limits=LIMITS)


@dataclass
class Bundle:
    owner: bytes
    base: str
    variants: dict[str, tuple[bytes, bytes]] = field(default_factory=dict)  # identity, owner
    lapses_at: float | None = None


@dataclass
class Source:
    record: SourceRecord
    owner: bytes
    until: float


class Model:
    """The same rules, written to be read."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sources: dict[str, Source] = {}
        self.bundles: dict[tuple[str, str], Bundle] = {}
        self.buried: dict[str, tuple[bytes, int, float]] = {}

    def used(self, name: str, revision: str) -> bool:
        records = [source.record.model for source in self.sources.values()]
        return any((m.name, m.revision) == (name, revision) for m in records) or any(
            key[0] == name and bundle.base == revision for key, bundle in self.bundles.items()
        )

    def unbind(self, name: str, revision: str) -> None:
        base = self.bundles.pop((name, revision)).base
        if base and (name, base) in self.bundles and not self.used(name, base):
            self.bundles[name, base].lapses_at = self.now + GRACE_S

    def lose(self, source_id: str, *, willingly: bool) -> None:
        source = self.sources.pop(source_id)
        until = self.now + GRACE_S
        if len(self.buried) >= LIMITS.sources:
            del self.buried[next(iter(self.buried))]
        self.buried[source_id] = (source.owner, source.record.generation, until)
        self.leave(source, willingly=willingly)

    def leave(self, source: Source, *, willingly: bool) -> None:
        key = source.record.model
        if self.used(key.name, key.revision):
            return
        bundle = self.bundles[key.name, key.revision]
        superseded = any(
            name == key.name and revision != key.revision for name, revision in self.bundles
        )
        if willingly and bundle.variants[key.variant][1] == source.owner and not superseded:
            self.unbind(key.name, key.revision)
        else:
            bundle.lapses_at = self.now + GRACE_S

    def pass_time(self) -> None:
        for source_id in [i for i, s in self.sources.items() if s.until <= self.now]:
            self.lose(source_id, willingly=False)
        for key, bundle in list(self.bundles.items()):
            if bundle.lapses_at is not None and bundle.lapses_at <= self.now:
                self.unbind(*key)
        self.buried = {i: b for i, b in self.buried.items() if b[2] > self.now}

    def refusal(self, record: SourceRecord, secret: bytes) -> type[MxError] | None:
        known = self.sources.get(record.source_id)
        if known:
            owner, generation = known.owner, known.record.generation
        elif record.source_id in self.buried:
            owner, generation, _ = self.buried[record.source_id]
        else:
            return CapacityError if len(self.sources) >= LIMITS.sources else None
        if owner != secret:
            return NotAllowedError
        if record.generation < generation:
            return StaleGenerationError
        if known and known.record.ref.identity != record.ref.identity:
            return StaleGenerationError if record.generation == generation else None
        return None if known or len(self.sources) < LIMITS.sources else CapacityError

    def place(self, record: SourceRecord, secret: bytes, replaces: bool) -> str | type[MxError]:
        """Return the revision that it is listed under, or the error that refuses it."""
        key, identity = record.model, record.ref.identity
        revision = key.revision
        bundle = self.bundles.get((key.name, revision))
        bound = bundle.variants.get(key.variant) if bundle else None
        if bound and bound[0] != identity:
            if not replaces or bound[1] != secret:
                return BindingError
            numbers = [
                int(r.partition(".")[2] or "1")
                for (name, r), b in self.bundles.items()
                if name == key.name and key.variant in b.variants
            ]
            newest = "main" if max(numbers) == 1 else f"main.{max(numbers)}"
            bound = self.bundles[key.name, newest].variants[key.variant]
            if bound[0] == identity:
                revision = newest
            else:
                revision, bound = f"main.{max(numbers) + 1}", None
        elif not bound and not bundle:
            family = [b for (name, _), b in self.bundles.items() if name == key.name]
            if any(b.owner and b.owner != secret for b in family):
                return BindingError
        if not bound and sum(len(b.variants) for b in self.bundles.values()) >= LIMITS.models:
            return CapacityError
        return revision

    def register(self, record: SourceRecord, secret: bytes, revision: str) -> SourceRecord:
        asked = record.model.revision
        record = replace(record, model=replace(record.model, revision=revision))
        key = record.model
        bundle = self.bundles.setdefault(
            (key.name, revision), Bundle(secret, "main" if asked != revision else "")
        )
        bundle.variants.setdefault(key.variant, (record.ref.identity, secret))
        bundle.lapses_at = None
        if bundle.base and (key.name, bundle.base) in self.bundles:
            self.bundles[key.name, bundle.base].lapses_at = None
        known = self.sources.get(record.source_id)
        self.buried.pop(record.source_id, None)
        self.sources[record.source_id] = Source(record, secret, self.now + LEASE_S)
        if known and known.record.model != key:
            self.leave(known, willingly=True)
        return record


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.machine = machine()
        self.model = Model()
        self.seen: dict[str, SourceRecord] = {}  # what a watcher has seen

    @rule(seconds=st.sampled_from([0.0, 0.5, 2.0, 4.9, 5.0, 19.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.model.now += seconds

    @rule(
        source_id=ids,
        secret=secrets,
        weights=st.sampled_from("ABC"),
        name=st.sampled_from(["x", "y"]),
        revision=st.sampled_from(["main", "main", "main.2", "main.3"]),
        variant=st.sampled_from(["checkpoint", "tp0"]),
        generation=generations,
        layers=held,
        replaces=st.booleans(),
    )
    def register(
        self,
        source_id: str,
        secret: bytes,
        weights: str,
        name: str,
        revision: str,
        variant: str,
        generation: int,
        layers: tuple[tuple[int, int], ...],
        replaces: bool,
    ) -> None:
        record = make_record(
            WEIGHTS[weights],
            source_id=source_id,
            name=name,
            revision=revision,
            variant=variant,
            generation=generation,
            held=layers,
        )
        self.model.pass_time()
        expected: type[MxError] | SourceRecord | None = self.model.refusal(record, secret)
        if expected is None:
            place = self.model.place(record, secret, replaces)
            expected = (
                self.model.register(record, secret, place) if isinstance(place, str) else place
            )
        now = self.model.now
        if isinstance(expected, SourceRecord):
            listed = self.machine.register(now, record, secret, replaces_revision=replaces)
            assert listed == expected
        else:
            with pytest.raises(expected):
                self.machine.register(now, record, secret, replaces_revision=replaces)

    @rule(source_id=ids, secret=secrets, state=st.sampled_from(SourceState))
    def heartbeat(self, source_id: str, secret: bytes, state: SourceState) -> None:
        self.model.pass_time()
        source = self.model.sources.get(source_id)
        if source is None or source.owner != secret:
            expected = NotAllowedError if source else UnknownSourceError
            with pytest.raises(expected):
                self.machine.heartbeat(self.model.now, source_id, secret, state)
            return
        source.record = replace(source.record, state=state)
        source.until = self.model.now + LEASE_S
        self.machine.heartbeat(self.model.now, source_id, secret, state)

    @rule(source_id=ids, secret=secrets, generation=generations, layers=held)
    def advertise(
        self, source_id: str, secret: bytes, generation: int, layers: tuple[tuple[int, int], ...]
    ) -> None:
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

    @rule(source_id=ids, secret=secrets)
    def deregister(self, source_id: str, secret: bytes) -> None:
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
        assert listed == {i: s.record for i, s in self.model.sources.items()}
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
        expected = {
            (name, revision, variant): identity
            for (name, revision), bundle in self.model.bundles.items()
            for variant, (identity, _) in bundle.variants.items()
        }
        summaries = self.machine.models()
        keys = [(m.model.name, m.model.revision, m.model.variant) for m in summaries]
        refs = [m.ref.identity for m in summaries]
        assert dict(zip(keys, refs, strict=True)) == expected
        for key in keys:
            found = self.machine.resolve(*key)
            serving = {
                i
                for i, s in self.model.sources.items()
                if s.record.state is SourceState.SERVING
                and (s.record.model.name, s.record.model.revision, s.record.model.variant) == key
            }
            assert {s.record.source_id for s in found.sources} == serving
            assert all(s.record.ref.identity == found.ref.identity for s in found.sources)
            if key[2] == "checkpoint":
                self.newest_served(key[0])

    def newest_served(self, name: str) -> None:
        """A name alone means the newest revision that is served; if none is, the newest."""
        variants = [m.model for m in self.machine.models() if m.model.name == name]
        numbers = {
            int(m.revision.partition(".")[2] or "1"): m.revision
            for m in variants
            if m.variant == "checkpoint"
        }
        revisions = [numbers[number] for number in sorted(numbers, reverse=True)]
        served = [r for r in revisions if self.machine.resolve(name, r).sources]
        assert self.machine.resolve(name).model.revision == (served or revisions)[0]


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase


def test_a_revision_keeps_its_meaning_and_an_update_becomes_a_new_one() -> None:
    registry = machine()
    first = make_record(WEIGHTS["A"])
    registry.register(0, first, ALICE)
    update = make_record(WEIGHTS["B"])
    with pytest.raises(BindingError, match="`revision`"):
        registry.register(0, update, ALICE)
    with pytest.raises(BindingError, match="only its owner"):
        registry.register(0, update, BOB, replaces_revision=True)
    listed = registry.register(0, update, ALICE, replaces_revision=True)
    assert listed.model.revision == "main.2"
    assert registry.register(0, update, ALICE, replaces_revision=True) == listed
    assert registry.resolve("llama", "main").ref == first.ref
    assert registry.resolve("llama", "main.2").ref == update.ref
    assert registry.resolve("llama").ref == update.ref
    # The old pair stays bound while its update is there, even without a source.
    registry.deregister(1, first.source_id, ALICE)
    assert registry.resolve("llama", "main").sources == ()
    assert registry.resolve("llama").ref == update.ref


def test_updates_have_consecutive_numbers_and_a_family_has_one_owner() -> None:
    registry = Registry(lease_s=LEASE_S, binding_grace_s=GRACE_S)
    now, record = 0.0, registry.register(0, make_record(WEIGHTS["A"]), ALICE)
    for number, weights in ((2, "B"), (3, "C"), (4, "A"), (5, "B")):
        now += 1
        update = make_record(WEIGHTS[weights], revision=record.model.revision)
        following = registry.register(now, update, ALICE, replaces_revision=True)
        assert following.model.revision == f"main.{number}"
        registry.deregister(now, record.source_id, ALICE)
        assert registry.resolve("llama").model.revision == f"main.{number}"
        record = following
    for revision in ("main", "main.6", "main.99"):
        with pytest.raises(BindingError):
            registry.register(now, make_record(WEIGHTS["C"], revision=revision), BOB)
    other = make_record(WEIGHTS["C"], revision="mine.7")
    assert registry.register(now, other, BOB) == other
    # A pull that began before an update may still be listed with what it pulls.
    relay = make_record(WEIGHTS["A"], revision="main.4", role=SourceRole.RELAY)
    assert registry.register(now, relay, BOB) == relay
    assert registry.resolve("llama").model.revision == "main.5"


def test_after_a_restart_relays_keep_a_name_for_its_origin() -> None:
    registry = machine()
    relay = make_record(WEIGHTS["B"], revision="main.2", role=SourceRole.RELAY)
    registry.register(0, relay, BOB)
    assert registry.resolve("llama").sources[0].record == relay
    with pytest.raises(BindingError, match="bound to"):
        registry.register(0, make_record(WEIGHTS["C"], revision="main.2"), BOB)
    origin = make_record(WEIGHTS["B"], revision="main.2")
    registry.register(1, origin, ALICE)
    update = make_record(WEIGHTS["C"], revision="main.2")
    with pytest.raises(BindingError, match="only its owner"):
        registry.register(1, update, BOB, replaces_revision=True)
    assert registry.register(1, update, ALICE, replaces_revision=True).model.revision == "main.3"


def test_pins() -> None:
    registry = machine()
    record = make_record(WEIGHTS["A"])
    registry.register(0, record, ALICE)
    digits = record.ref.identity.hex()
    assert registry.resolve(f"llama@{digits[:8]}").ref == record.ref
    assert registry.resolve(f"llama@{digits.upper()}").ref == record.ref
    with pytest.raises(UnknownModelError, match=digits[:16]):
        registry.resolve("llama@" + "0" * 8)
    for pin in ("", "1234567", "0x123456", "g" * 8, "0" * 65):
        with pytest.raises(ConfigError, match="is not a pin"):
            registry.resolve(f"llama@{pin}")


def test_the_error_for_an_unknown_name_lists_known_ones() -> None:
    registry = machine()
    with pytest.raises(UnknownModelError, match="nothing is registered"):
        registry.resolve("llama")
    registry.register(0, make_record(WEIGHTS["A"], variant="tp0of2"), ALICE)
    with pytest.raises(UnknownModelError, match="there is llama"):
        registry.resolve("lama")
    with pytest.raises(UnknownModelError, match="tp0of2"):
        registry.resolve("llama")


def test_resolve_lists_origins_first_and_no_draining_sources() -> None:
    registry = machine()
    relay = make_record(WEIGHTS["A"], role=SourceRole.RELAY, held=((0, 1),))
    origin = make_record(WEIGHTS["A"])
    draining = make_record(WEIGHTS["A"], state=SourceState.DRAINING)
    for record in (relay, draining, origin):
        registry.register(0, record, ALICE)
    assert [s.record for s in registry.resolve("llama").sources] == [origin, relay]


def test_a_crash_does_not_free_a_name_but_its_owner_can() -> None:
    registry = machine()
    first, other = make_record(WEIGHTS["A"]), make_record(WEIGHTS["B"])
    registry.register(0, first, ALICE)
    with pytest.raises(BindingError):
        registry.register(LEASE_S + GRACE_S / 2, other, BOB)
    assert registry.register(2 * LEASE_S + 2 * GRACE_S, other, BOB) == other
    registry.deregister(51, other.source_id, BOB)
    registry.register(51, make_record(WEIGHTS["C"]), ALICE)


def test_the_same_weights_in_another_layout_are_refused() -> None:
    registry = machine()
    registry.register(0, make_record(WEIGHTS["A"]), ALICE)
    with pytest.raises(BindingError, match="layout"):
        registry.register(0, make_record(make_documents("A", layout="other")), ALICE)


def test_the_resolved_manifest_is_one_that_a_source_has() -> None:
    registry = machine()
    documents = make_documents("A")
    resharded = [*documents[:3], b"another packaging"]
    first, second = make_record(documents), make_record(resharded)
    registry.register(0, first, ALICE)
    registry.register(0, second, BOB)
    assert registry.resolve("llama").ref == first.ref
    registry.deregister(1, first.source_id, ALICE)
    assert registry.resolve("llama").ref == second.ref


def test_one_address_may_take_only_a_part_of_the_limits() -> None:
    limits = Limits(models=4, sources=6, models_per_address=2, sources_per_address=3)
    registry = Registry(limits=limits, binding_grace_s=10.0)
    greedy = [make_record(make_documents(str(i)), name=f"m{i}") for i in range(3)]
    for record in greedy[:2]:
        registry.register(0, record, b"s" * 16, address="ipv4:10.0.0.1")
    with pytest.raises(CapacityError, match="2 models from ipv4:10.0.0.1"):
        registry.register(0, greedy[2], b"s" * 16, address="ipv4:10.0.0.1")
    # A renewal, and another source of a bound model: neither is a new model.
    registry.register(1, greedy[0], b"s" * 16, address="ipv4:10.0.0.1")
    again = make_record(make_documents("0"), name="m0")
    registry.register(1, again, b"s" * 16, address="ipv4:10.0.0.1")
    with pytest.raises(CapacityError, match="3 sources from ipv4:10.0.0.1"):
        another = make_record(make_documents("0"), name="m0")
        registry.register(1, another, b"s" * 16, address="ipv4:10.0.0.1")
    registry.register(1, greedy[2], b"t" * 16, address="ipv4:10.0.0.2")
    # Sources and models that end no longer count.
    registry.deregister(2, greedy[1].source_id, b"s" * 16)
    fourth = make_record(make_documents("4"), name="m4")
    registry.register(2, fourth, b"s" * 16, address="ipv4:10.0.0.1")
    registry.tick(1000)
    registry.tick(1010)
    assert not registry.sources() and not registry.models()
    for record in greedy[:2]:
        registry.register(1010, record, b"s" * 16, address="ipv4:10.0.0.1")


def test_the_first_lease_is_longer_than_later_ones() -> None:
    registry = Registry(lease_s=1.0, first_lease_s=3.0)
    early, late = make_record(WEIGHTS["A"]), make_record(WEIGHTS["A"])
    for record in (early, late):
        registry.register(0, record, b"s" * 16)
    registry.heartbeat(0.5, early.source_id, b"s" * 16, SourceState.SERVING)
    registry.tick(1.5)
    assert [s.record for s in registry.sources()] == [late]
    registry.tick(3.0)
    assert not registry.sources()
