"""The registry in particular situations; `test_registry_machine` checks it in any."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mx.core.answers import in_order, in_turn
from mx.core.registry import ChangeKind, Limits, Registration, Registry
from mx.core.types import SourceRecord, SourceRole, SourceState
from mx.errors import (
    BindingError,
    CapacityError,
    ConfigError,
    NotAllowedError,
    StaleGenerationError,
    UnknownModelError,
)
from tests.support.records import make_documents, make_record

LEASE_S = 5.0
GRACE_S = 20.0
ALICE, BOB = b"a" * 16, b"b" * 16
WEIGHTS = {text: make_documents(text) for text in "ABC"}


def machine() -> Registry:
    return Registry(lease_s=LEASE_S, binding_grace_s=GRACE_S, limits=Limits(models=4, sources=3))


def listed(
    registry: Registry, now: float, record: SourceRecord, secret: bytes, **flags: Any
) -> SourceRecord:
    """Register, and return the record as it is listed."""
    answer = registry.register(now, record, secret, **flags)
    assert answer.record is not None and answer.adopt is None
    return answer.record


def test_a_revision_keeps_its_meaning_and_an_update_becomes_a_new_one() -> None:
    registry = machine()
    first = make_record(WEIGHTS["A"])
    registry.register(0, first, ALICE)
    update = make_record(WEIGHTS["B"])
    with pytest.raises(BindingError, match="`revision`"):
        registry.register(0, update, ALICE)
    with pytest.raises(BindingError, match="only its owner"):
        registry.register(0, update, BOB, replaces_revision=True)
    new = listed(registry, 0, update, ALICE, replaces_revision=True)
    assert new.model.revision == "main.2"
    assert listed(registry, 0, update, ALICE, replaces_revision=True) == new
    assert registry.resolve("llama", "main").ref == first.ref
    assert registry.resolve("llama", "main.2").ref == update.ref
    assert registry.resolve("llama").ref == update.ref
    # The old pair stays bound while its update is there, even without a source.
    registry.deregister(1, first.source_id, ALICE)
    assert registry.resolve("llama", "main").sources == ()
    assert registry.resolve("llama").ref == update.ref


def test_updates_have_consecutive_numbers_and_a_family_has_one_owner() -> None:
    registry = Registry(lease_s=LEASE_S, binding_grace_s=GRACE_S)
    now, record = 0.0, listed(registry, 0, make_record(WEIGHTS["A"]), ALICE)
    for number, weights in ((2, "B"), (3, "C"), (4, "A"), (5, "B")):
        now += 1
        update = make_record(WEIGHTS[weights], revision=record.model.revision)
        following = listed(registry, now, update, ALICE, replaces_revision=True)
        assert following.model.revision == f"main.{number}"
        registry.deregister(now, record.source_id, ALICE)
        assert registry.resolve("llama").model.revision == f"main.{number}"
        record = following
    for revision in ("main", "main.6", "main.99"):
        with pytest.raises(BindingError):
            registry.register(now, make_record(WEIGHTS["C"], revision=revision), BOB)
    other = make_record(WEIGHTS["C"], revision="mine.7")
    assert listed(registry, now, other, BOB) == other
    # A pull that began before an update may still be listed with what it pulls.
    relay = make_record(WEIGHTS["A"], revision="main.4", role=SourceRole.RELAY)
    assert listed(registry, now, relay, BOB) == relay
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
    assert listed(registry, 1, update, ALICE, replaces_revision=True).model.revision == "main.3"


def test_pins() -> None:
    registry = machine()
    record = make_record(WEIGHTS["A"])
    registry.register(0, record, ALICE)
    digits = record.ref.identity.hex()
    assert registry.resolve(f"llama@{digits[:8]}").ref == record.ref
    assert registry.resolve(f"llama@{digits.upper()}").ref == record.ref
    with pytest.raises(UnknownModelError, match=record.ref.pin.hex()[:16]):
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
        registry.resolve("llama", variant="tp1of2")


def test_a_name_alone_is_its_checkpoint_else_its_only_variant_else_an_error_that_lists_them() -> (
    None
):
    registry = machine()
    registry.register(0, make_record(WEIGHTS["A"], variant="rank-0"), ALICE)
    assert registry.resolve("llama").model.variant == "rank-0"
    pin = registry.resolve("llama").ref.identity.hex()
    registry.register(0, make_record(WEIGHTS["B"], variant="rank-1"), ALICE)
    with pytest.raises(UnknownModelError, match="2 others.*rank-0 · rank-1"):
        registry.resolve("llama")
    assert registry.resolve(f"llama@{pin}").model.variant == "rank-0"
    registry.register(0, make_record(WEIGHTS["C"]), ALICE)
    assert registry.resolve("llama").model.variant == "checkpoint"
    assert registry.resolve(f"llama@{pin}").model.variant == "rank-0"


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
    assert listed(registry, 2 * LEASE_S + 2 * GRACE_S, other, BOB) == other
    registry.deregister(51, other.source_id, BOB)
    registry.register(51, make_record(WEIGHTS["C"]), ALICE)


def test_the_same_weights_in_another_layout_or_chunk_size_adopt_the_bound_one() -> None:
    registry = machine()
    first = make_record(WEIGHTS["A"])
    registry.register(0, first, ALICE)
    other = make_record(make_documents("A", layout="other"))
    larger = make_record(WEIGHTS["A"], chunk_nbytes=2 << 20)
    for record in (other, larger, replace(other, model=replace(other.model, revision="v2"))):
        assert registry.register(0, record, BOB) == Registration(None, first.ref)
        assert [s.record for s in registry.sources()] == [first]
    # It registers again with what it was named.
    adopted = replace(other, ref=first.ref, table=replace(other.table, layout_digest=b"l" * 32))
    assert listed(registry, 0, adopted, BOB) == adopted


def test_a_layout_that_does_not_describe_the_weights_keeps_no_source_out() -> None:
    """A stranger registers honest weights first, with a layout document of its own making."""
    registry = machine()
    forged = make_record(make_documents("A", layout="forged"))
    honest = make_record(WEIGHTS["A"])
    registry.register(0, forged, BOB)
    assert registry.register(0, honest, ALICE).adopt == forged.ref
    assert listed(registry, 0, honest, ALICE, disputes=[forged.ref.layout]) == honest
    # A second honest origin joins the first, whatever its own layout.
    second = make_record(make_documents("A", layout="second"))
    answer = registry.register(0, second, ALICE, disputes=[forged.ref.layout])
    assert answer.adopt == honest.ref.with_files_of(forged.ref)
    for reference in ("llama", "llama:main", f"llama@{honest.ref.identity.hex()}"):
        name, _, revision = reference.partition(":")
        found = registry.resolve(name, revision)
        assert [s.record for s in found.sources] == [forged, honest]
        assert found.ref == forged.ref  # which readers can't decode: they go on with the next
    registry.deregister(1, forged.source_id, BOB)
    assert registry.resolve("llama").ref.same_chunks(honest.ref)
    registry.deregister(1, honest.source_id, ALICE)


def test_layouts_are_adopted_across_revisions() -> None:
    """Else a stranger's revision of the same weights would divide the readers by pin."""
    registry = machine()
    strange = make_record(WEIGHTS["A"], revision="zzz", chunk_nbytes=4 << 20)
    registry.register(0, strange, BOB)
    honest = make_record(WEIGHTS["A"])
    assert registry.register(0, honest, ALICE).adopt == strange.ref
    honest = replace(honest, ref=strange.ref)
    listed(registry, 0, honest, ALICE)
    found = registry.resolve(f"llama@{honest.ref.identity.hex()}")
    assert {s.record.source_id for s in found.sources} == {strange.source_id, honest.source_id}
    assert registry.resolve("llama").sources[0].record == honest


def test_a_running_pull_keeps_its_layout() -> None:
    registry = machine()
    relay = make_record(make_documents("A", layout="old"), role=SourceRole.RELAY, held=((0, 1),))
    origin = make_record(WEIGHTS["A"])
    registry.register(0, origin, ALICE)
    assert registry.register(0, relay, BOB).adopt == origin.ref
    assert listed(registry, 0, relay, BOB, keeps_layout=True) == relay
    found = registry.resolve("llama")
    assert found.ref == origin.ref
    assert [s.record for s in found.sources] == [origin, relay]


def test_the_first_origin_with_files_binds_them() -> None:
    registry = machine()
    bare = make_record(make_documents("A", files=""))
    these, those = make_record(WEIGHTS["A"]), make_record(make_documents("A", files="those"))
    registry.register(0, bare, ALICE)
    assert registry.resolve("llama").ref.packaging == b""
    registry.register(0, these, ALICE)
    assert registry.resolve("llama").ref == these.ref
    assert listed(registry, 0, those, BOB) == those  # for its weights, with its own files
    assert registry.resolve("llama").ref == these.ref
    # What is bound stays bound, whichever source goes.
    registry.deregister(1, these.source_id, ALICE)
    found = registry.resolve("llama")
    assert found.ref == these.ref
    assert [s.record.ref.packaging for s in found.sources] == [b"", those.ref.packaging]
    # A pin of files names them, the bound ones or a source's own.
    for ref in (these.ref, those.ref):
        assert registry.resolve(f"llama@{ref.pin.hex()}").ref == ref
        assert registry.resolve(f"llama@{ref.pin.hex()[:8].upper()}").ref == ref
    registry.deregister(1, those.source_id, BOB)
    with pytest.raises(UnknownModelError, match="is not"):
        registry.resolve(f"llama@{those.ref.pin.hex()}")


def test_a_relay_binds_no_files() -> None:
    """After a restart a pull may register before its origin, with whatever files it has."""
    registry = machine()
    relay = make_record(make_documents("A", files="those"), role=SourceRole.RELAY)
    registry.register(0, relay, BOB)
    assert registry.resolve("llama").ref == relay.ref
    origin = make_record(WEIGHTS["A"])
    registry.register(0, origin, ALICE)
    assert registry.resolve("llama").ref == origin.ref
    registry.deregister(1, origin.source_id, ALICE)
    assert registry.resolve("llama").ref == origin.ref


def test_a_name_that_is_taken_after_a_restart_leaves_the_pin() -> None:
    registry = machine()
    usurper, honest = make_record(WEIGHTS["B"]), make_record(WEIGHTS["A"])
    registry.register(0, usurper, BOB)
    with pytest.raises(BindingError, match="is bound to"):
        registry.register(0, honest, ALICE)
    contested = listed(registry, 0, honest, ALICE, keeps_pin=True)
    assert contested == replace(honest, pin_only=True)
    assert registry.resolve("llama").sources[0].record == usurper
    pinned = registry.resolve(f"llama@{honest.ref.identity.hex()}")
    assert pinned.ref == honest.ref and pinned.sources[0].record == contested
    marked = {m.ref.identity: (m.sources, m.pin_only) for m in registry.models()}
    assert marked == {usurper.ref.identity: (1, False), honest.ref.identity: (1, True)}
    # Pulls of it are listed beside it, without asking for anything.
    relay = make_record(WEIGHTS["A"], role=SourceRole.RELAY)
    assert listed(registry, 0, relay, BOB, keeps_layout=True).pin_only
    registry.take_changes()
    # It gets the name when that ends: at once if its owner goes.
    registry.deregister(1, usurper.source_id, BOB)
    assert registry.resolve("llama").ref == honest.ref
    kinds = [(c.kind, c.record.pin_only) for c in registry.take_changes()]
    assert sorted(kinds, key=str) == [
        (ChangeKind.CHANGED, False),
        (ChangeKind.CHANGED, False),
        (ChangeKind.GONE, False),
    ]
    # And it owns the name.
    update = make_record(WEIGHTS["C"])
    assert listed(registry, 1, update, ALICE, replaces_revision=True).model.revision == "main.2"


def test_a_contested_name_lapses_to_the_oldest_that_contests_it() -> None:
    registry = Registry(lease_s=LEASE_S, binding_grace_s=GRACE_S)
    usurper = make_record(WEIGHTS["B"])
    registry.register(0, usurper, BOB)
    contesting = [make_record(WEIGHTS[text]) for text in "AC"]
    for record in contesting:
        listed(registry, 1, record, ALICE, keeps_pin=True)
    now = 1.0
    while registry.source(contesting[0].source_id).record.pin_only:
        now += 1.0
        assert now < 2 * (LEASE_S + GRACE_S)
        for record in contesting:
            registry.heartbeat(now, record.source_id, ALICE, SourceState.SERVING)
    assert now >= LEASE_S + GRACE_S
    assert registry.resolve("llama").ref == contesting[0].ref
    assert registry.source(contesting[1].source_id).record.pin_only
    # The usurper comes too late now.
    with pytest.raises(BindingError, match="is bound to"):
        registry.register(now, usurper, BOB)


def test_an_update_that_stands_against_a_strangers_family_is_contested_too() -> None:
    registry = machine()
    registry.register(0, make_record(WEIGHTS["B"]), BOB)  # as "main"
    update = make_record(WEIGHTS["A"], revision="main.2")
    with pytest.raises(BindingError, match="count as an update"):
        registry.register(0, update, ALICE)
    assert listed(registry, 0, update, ALICE, keeps_pin=True).pin_only
    assert registry.resolve("llama").ref.identity != update.ref.identity
    with pytest.raises(UnknownModelError) as caught:
        registry.resolve("llama", "main.2")
    assert "by its pin only" in caught.value.hint
    assert registry.resolve(f"llama@{update.ref.identity.hex()}", "main.2").ref == update.ref


def test_many_sources_of_one_address_do_not_fill_an_answer() -> None:
    registry = Registry()
    for _ in range(300):
        registry.register(0, make_record(WEIGHTS["A"]), BOB, address="ipv4:10.0.0.66")
    honest = [make_record(WEIGHTS["A"], role=role) for role in SourceRole]
    for record in honest:
        registry.register(0, record, ALICE, keeps_layout=True, address="ipv4:10.0.0.1")
    sources = registry.resolve("llama").sources
    found = [s.record for s in in_turn(sources)]
    assert len(found) == 302 and found.index(honest[0]) == 1
    # Relays come after all origins.
    assert found.index(honest[1]) == 301
    # Nor do many layouts of one address.
    forged = make_documents("A", layout="forged")
    for number in range(300):
        size = (number + 2) << 20
        record = make_record(forged, revision=f"r{number}", chunk_nbytes=size)
        registry.register(0, record, BOB, keeps_layout=True, address="ipv4:10.0.0.66")
    sources = registry.resolve(f"llama@{honest[0].ref.identity.hex()}").sources
    assert len(sources) == 602
    taken = in_turn(sources)[:256]
    assert taken[1].record == honest[0]
    assert [s.record for s in in_order(taken)].index(honest[0]) <= 1


def test_other_chunks_want_a_higher_generation() -> None:
    registry = machine()
    first = make_record(WEIGHTS["A"])
    registry.register(0, first, ALICE)
    larger = replace(first, ref=replace(first.ref, chunk_nbytes=2 << 20))
    with pytest.raises(StaleGenerationError, match="raise the generation"):
        registry.register(0, larger, ALICE)
    with pytest.raises(NotAllowedError):
        registry.register(0, replace(larger, generation=2), BOB)


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
