"""The registry in particular situations; `test_registry_machine` checks it in any."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from mx.core.answers import ListedSource, in_order, in_turn
from mx.core.budget import Limits
from mx.core.changes import ChangeKind
from mx.core.registry import RegisteredSource
from mx.core.types import Registration, SourceRecord, SourceRole, SourceState
from mx.errors import (
    BindingError,
    CapacityError,
    ConfigError,
    NotAllowedError,
    StaleGenerationError,
    UnknownModelError,
)
from tests.support.owners import owned, plain, receipt_of
from tests.support.records import make_documents, make_record, register_source
from tests.support.stores import FollowedRegistry

pytestmark = pytest.mark.usefixtures("each_store")

LEASE_S = 5.0
GRACE_S = 20.0
ALICE, BOB = b"a" * 16, b"b" * 16
WEIGHTS = {text: make_documents(text) for text in "ABC"}


class Owned(FollowedRegistry):
    """A registry in which each secret stands for a name key of its own."""

    def register(self, now: float, registration: Registration, **more: Any) -> RegisteredSource:
        mine = owned(registration.record, registration.secret)
        return super().register(now, replace(registration, record=mine), **more)


def machine() -> FollowedRegistry:
    return Owned(lease_s=LEASE_S, binding_grace_s=GRACE_S, limits=Limits(models=8, sources=6))


def listed(
    registry: FollowedRegistry, now: float, record: SourceRecord, secret: bytes, **flags: Any
) -> SourceRecord:
    """Register, and return the record as it is listed, without its owner."""
    answer = register_source(registry, now, record, secret, **flags)
    return plain(answer.record)


def records(sources: Iterable[ListedSource]) -> list[SourceRecord]:
    """Return the records of listed sources, without their owners."""
    return [plain(source.record) for source in sources]


def test_a_revision_keeps_its_meaning_and_an_update_becomes_a_new_one() -> None:
    registry = machine()
    first = make_record(WEIGHTS["A"])
    register_source(registry, 0, first, ALICE)
    update = make_record(WEIGHTS["B"])
    with pytest.raises(BindingError, match="`revision`"):
        register_source(registry, 0, update, ALICE)
    with pytest.raises(BindingError, match="another name key"):
        register_source(registry, 0, update, BOB, replaces="main")
    new = listed(registry, 0, update, ALICE, replaces="main")
    assert new.model.revision == "main.2"
    assert listed(registry, 0, update, ALICE, replaces="main") == new
    assert registry.resolve("llama", "main").ref == first.ref
    assert registry.resolve("llama", "main.2").ref == update.ref
    assert registry.resolve("llama").ref == update.ref
    # The old pair stays bound while its update is there, even without a source.
    registry.deregister(1, first.source_id, ALICE)
    assert registry.resolve("llama", "main").sources == ()
    assert registry.resolve("llama").ref == update.ref


def test_updates_have_consecutive_numbers_and_a_name_has_one_owner() -> None:
    registry = Owned(lease_s=LEASE_S, binding_grace_s=GRACE_S)
    now, record = 0.0, listed(registry, 0, make_record(WEIGHTS["A"]), ALICE)
    for number, weights in ((2, "B"), (3, "C"), (4, "A"), (5, "B")):
        now += 1
        update = make_record(WEIGHTS[weights], revision=record.model.revision)
        following = listed(registry, now, update, ALICE, replaces=record.model.revision)
        assert following.model.revision == f"main.{number}"
        registry.deregister(now, record.source_id, ALICE)
        assert registry.resolve("llama").model.revision == f"main.{number}"
        record = following
    for revision in ("main", "main.6", "main.99"):
        with pytest.raises(BindingError):
            register_source(registry, now, make_record(WEIGHTS["C"], revision=revision), ALICE)
    # With another key it is listed, for readers that give its pin.
    for revision in ("main", "main.6", "mine.7"):
        other = make_record(WEIGHTS["C"], revision=revision)
        assert listed(registry, now, other, BOB) == replace(other, pin_only=True)
        registry.deregister(now, other.source_id, BOB)
    # A pull that began before an update may still be listed with what it pulls.
    relay = make_record(WEIGHTS["A"], revision="main.4", role=SourceRole.RELAY)
    assert listed(registry, now, relay, BOB, keeps_pin=True) == relay
    assert registry.resolve("llama").model.revision == "main.5"


def test_registering_never_updates() -> None:
    """Not even for the owner, and not by naming the next revision."""
    registry = machine()
    register_source(registry, 0, make_record(WEIGHTS["A"]), ALICE)
    for revision in ("main", "main.2", "main.7"):
        with pytest.raises(BindingError, match="`update`|as an update"):
            register_source(registry, 0, make_record(WEIGHTS["B"], revision=revision), ALICE)
    assert [m.model.revision for m in registry.models()] == ["main"]


def test_of_two_updates_of_one_revision_the_second_is_refused_unless_it_is_the_same() -> None:
    registry = Owned(lease_s=LEASE_S, binding_grace_s=GRACE_S)
    register_source(registry, 0, make_record(WEIGHTS["A"]), ALICE)
    first = listed(registry, 0, make_record(WEIGHTS["B"]), ALICE, replaces="main")
    joins = listed(registry, 0, make_record(WEIGHTS["B"]), ALICE, replaces="main")
    assert first.model.revision == joins.model.revision == "main.2"
    with pytest.raises(BindingError, match="another holder of the name key has updated"):
        register_source(registry, 0, make_record(WEIGHTS["C"]), ALICE, replaces="main")
    assert registry.resolve("llama").model.revision == "main.2"
    third = listed(registry, 0, make_record(WEIGHTS["C"]), ALICE, replaces="main.2")
    assert third.model.revision == "main.3"
    # What no source holds refuses no update: its holder did not hear that it was listed.
    registry.deregister(1, third.source_id, ALICE)
    again = listed(registry, 1, make_record(WEIGHTS["A"]), ALICE, replaces="main.2")
    assert again.model.revision == "main.4"


def test_a_holder_that_was_away_updates_only_what_it_knows_of() -> None:
    """The revision has come to stand for another holder's weights meanwhile."""
    registry = Owned(lease_s=LEASE_S, binding_grace_s=GRACE_S)
    away = make_record(WEIGHTS["A"])
    register_source(registry, 0, away, ALICE)
    was = receipt_of(away, ALICE)
    registry.deregister(1, away.source_id, ALICE)
    other = listed(registry, 1, make_record(WEIGHTS["B"]), ALICE)
    relay = make_record(WEIGHTS["B"], role=SourceRole.RELAY)
    register_source(registry, 1, relay, BOB, keeps_pin=True)
    was = was._replace(this_life=True)
    with pytest.raises(BindingError, match="another holder .* has bound"):
        register_source(registry, 2, make_record(WEIGHTS["C"]), ALICE, replaces="main", receipt=was)
    # With the same weights it joins the other.
    same = make_record(WEIGHTS["B"])
    joined = listed(registry, 2, same, ALICE, replaces="main", receipt=was)
    assert joined.model.revision == "main" and not joined.pin_only
    registry.deregister(2, joined.source_id, ALICE)
    # Who has seen it comes after it.
    after = listed(registry, 2, make_record(WEIGHTS["C"]), ALICE, replaces="main")
    assert after.model.revision == "main.2"
    assert registry.resolve("llama", "main").ref == other.ref


def test_a_receipt_that_has_displaced_an_owners_weights_does_not_keep_it_from_updating() -> None:
    """A relay's, after a restart of everybody: no other holder of the key has these weights."""
    registry = machine()
    fresh = make_record(WEIGHTS["B"])
    assert listed(registry, 0, fresh, ALICE) == fresh
    now = receipt_of(fresh, ALICE, issued_s=2.0)._replace(this_life=True)
    relay = make_record(WEIGHTS["A"], role=SourceRole.RELAY)
    register_source(registry, 0, relay, BOB, keeps_pin=True, receipt=receipt_of(relay, ALICE))
    assert registry.source(fresh.source_id).record.pin_only
    update = listed(registry, 1, make_record(WEIGHTS["C"]), ALICE, replaces="main", receipt=now)
    assert update.model.revision == "main.2" and not update.pin_only


def test_a_receipt_lets_the_name_await_no_update_that_is_there() -> None:
    """What the receipt displaces was updated meanwhile."""
    registry = Owned(lease_s=LEASE_S, binding_grace_s=GRACE_S)
    register_source(registry, 0, make_record(WEIGHTS["B"]), ALICE, publishes=True)
    listed(registry, 0, make_record(WEIGHTS["C"]), ALICE, replaces="main")
    relay = make_record(WEIGHTS["A"], role=SourceRole.RELAY)
    was = receipt_of(relay, ALICE, newest=2)
    register_source(registry, 1, relay, BOB, keeps_pin=True, receipt=was)
    assert registry.resolve("llama").model.revision == "main.2"


def test_a_name_without_a_commitment_is_never_updated() -> None:
    registry = FollowedRegistry(lease_s=LEASE_S, binding_grace_s=GRACE_S)
    register_source(registry, 0, make_record(WEIGHTS["A"]), ALICE)
    for record in (make_record(WEIGHTS["B"]), owned(make_record(WEIGHTS["B"]), ALICE)):
        with pytest.raises(BindingError, match="another name key"):
            register_source(registry, 0, record, ALICE, replaces="main")
    same = register_source(registry, 0, owned(make_record(WEIGHTS["A"]), ALICE), ALICE).record
    assert same is not None and not same.by_owner and not same.pin_only


def test_after_a_restart_a_receipt_restores_the_name_and_its_owner() -> None:
    """Even if a relay is the first to bring it."""
    registry = machine()
    relay = make_record(WEIGHTS["B"], revision="main.2", role=SourceRole.RELAY)
    was = receipt_of(relay, ALICE, base="main", newest=2)
    assert listed(registry, 0, relay, BOB, keeps_pin=True, receipt=was) == relay
    other = make_record(WEIGHTS["C"], revision="main.2")
    pins = [each.ref.pin.hex()[:16] for each in (relay, other)]
    with pytest.raises(BindingError, match=f"bound to {pins[0]}, not {pins[1]}"):
        register_source(registry, 0, other, ALICE)
    update = make_record(WEIGHTS["C"])
    with pytest.raises(BindingError, match="another name key"):
        register_source(registry, 1, update, BOB, replaces="main.2")
    answer = register_source(registry, 1, update, ALICE, replaces="main.2")
    assert answer.record is not None and answer.record.by_owner
    assert answer.record.model.revision == "main.3"
    told = receipt_of(answer.record, ALICE, issued_s=0.0, base="main", newest=3)
    assert answer.receipt == told._replace(newest_s=answer.published_s)


def test_what_was_listed_before_and_has_no_receipt_is_found_by_its_pin_only() -> None:
    registry = machine()
    old = make_record(WEIGHTS["A"])
    assert listed(registry, 0, old, ALICE, keeps_pin=True) == replace(old, pin_only=True)
    with pytest.raises(UnknownModelError):
        registry.resolve("llama")
    assert registry.resolve(f"llama@{old.ref.identity.hex()}").sources
    # A source that comes new binds the name.
    assert listed(registry, 0, make_record(WEIGHTS["B"]), BOB).pin_only is False


def test_a_receipt_for_other_weights_or_another_key_counts_for_nothing() -> None:
    record = make_record(WEIGHTS["A"])
    for was in (
        receipt_of(make_record(WEIGHTS["B"]), ALICE),
        receipt_of(make_record(WEIGHTS["A"], revision="main.2"), ALICE),
        receipt_of(make_record(WEIGHTS["A"], name="other"), ALICE),
    ):
        answer = register_source(machine(), 0, record, ALICE, keeps_pin=True, receipt=was)
        assert answer.record is not None and answer.record.pin_only
        assert answer.receipt is None


@pytest.mark.parametrize("late", [False, True])
def test_a_receipt_wins_against_who_came_first_after_a_restart_in_the_first_grace(
    late: bool,
) -> None:
    registry = machine()
    usurper, honest = make_record(WEIGHTS["B"]), make_record(WEIGHTS["A"])
    register_source(registry, 0, usurper, BOB)
    now = 0.0
    while now < (GRACE_S + 1 if late else 4):
        now += 1
        registry.heartbeat(now, usurper.source_id, BOB, SourceState.SERVING)
    was = receipt_of(honest, ALICE)
    answer = register_source(registry, now, honest, ALICE, keeps_pin=True, receipt=was).record
    assert answer is not None
    assert answer.pin_only is late and answer.by_owner is not late
    other = registry.source(usurper.source_id).record
    assert other.pin_only is not late and other.by_owner is late
    assert registry.resolve("llama").ref == (usurper if late else honest).ref
    for record in (usurper, honest):  # both are found by their pins
        found = registry.resolve(f"llama@{record.ref.identity.hex()}")
        assert [s.record.source_id for s in found.sources] == [record.source_id]


def test_of_two_receipts_the_later_one_wins() -> None:
    for order in ((ALICE, BOB), (BOB, ALICE)):
        registry = machine()
        sources = {ALICE: make_record(WEIGHTS["A"]), BOB: make_record(WEIGHTS["B"])}
        issued = {ALICE: 10.0, BOB: 20.0}
        for owner in order:
            was = receipt_of(sources[owner], owner, issued_s=issued[owner])
            register_source(registry, 0, sources[owner], owner, keeps_pin=True, receipt=was)
        assert registry.resolve("llama").ref == sources[BOB].ref


def test_a_revision_keeps_its_meaning_over_a_restart() -> None:
    """The owner itself starts anew as "main" with other weights, before its replica is back."""
    registry = machine()
    fresh = make_record(WEIGHTS["C"])
    register_source(registry, 0, fresh, ALICE)
    relay = make_record(WEIGHTS["A"], role=SourceRole.RELAY)
    register_source(registry, 1, relay, BOB, keeps_pin=True, receipt=receipt_of(relay, ALICE))
    assert registry.resolve("llama", "main").ref == relay.ref
    assert registry.source(fresh.source_id).record.pin_only
    moved = replace(fresh, generation=2)
    again = listed(registry, 1, moved, ALICE, replaces="main")
    assert again.model.revision == "main.2" and not again.pin_only


def test_an_update_of_an_unbound_name_comes_after_what_it_replaces() -> None:
    """As when the coordinator restarts inside `changing`, and no other source holds the weights."""
    for receipt, number in ((None, 5), (9, 10)):
        registry = machine()
        record = make_record(WEIGHTS["B"])
        replaced = make_record(WEIGHTS["A"], revision="main.4")
        was = receipt and receipt_of(replaced, ALICE, base="main", newest=receipt)
        new = listed(registry, 0, record, ALICE, replaces="main.4", receipt=was)
        assert new.model.revision == f"main.{number}" and not new.pin_only


def test_pins() -> None:
    registry = machine()
    record = make_record(WEIGHTS["A"])
    register_source(registry, 0, record, ALICE)
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
    register_source(registry, 0, make_record(WEIGHTS["A"], variant="tp0of2"), ALICE)
    with pytest.raises(UnknownModelError, match="listed is llama"):
        registry.resolve("lama")
    with pytest.raises(UnknownModelError, match="there is llama"):
        registry.resolve("other")
    with pytest.raises(UnknownModelError, match="tp0of2"):
        registry.resolve("llama", variant="tp1of2")
    register_source(registry, 1, make_record(WEIGHTS["B"], name="qwen"), ALICE)
    with pytest.raises(UnknownModelError, match="listed are llama and qwen"):
        registry.resolve("other")


def test_a_name_alone_is_its_checkpoint_else_its_only_variant_else_an_error_that_lists_them() -> (
    None
):
    registry = machine()
    register_source(registry, 0, make_record(WEIGHTS["A"], variant="rank-0"), ALICE)
    assert registry.resolve("llama").model.variant == "rank-0"
    pin = registry.resolve("llama").ref.identity.hex()
    register_source(registry, 0, make_record(WEIGHTS["B"], variant="rank-1"), ALICE)
    with pytest.raises(UnknownModelError, match="2 others.*rank-0 · rank-1"):
        registry.resolve("llama")
    assert registry.resolve(f"llama@{pin}").model.variant == "rank-0"
    register_source(registry, 0, make_record(WEIGHTS["C"]), ALICE)
    assert registry.resolve("llama").model.variant == "checkpoint"
    assert registry.resolve(f"llama@{pin}").model.variant == "rank-0"


def test_a_name_alone_is_no_part_of_a_trainer() -> None:
    registry = machine()
    register_source(registry, 0, make_record(WEIGHTS["A"], variant="part=1/2"), ALICE)
    for revision in ("", "main"):
        with pytest.raises(UnknownModelError, match="part=1/2"):
            registry.resolve("llama", revision)
    assert registry.resolve("llama", variant="part=1/2").model.variant == "part=1/2"
    register_source(registry, 0, make_record(WEIGHTS["C"]), ALICE)
    assert registry.resolve("llama").model.variant == "checkpoint"


def test_resolve_lists_origins_first_and_no_draining_sources() -> None:
    registry = machine()
    relay = make_record(WEIGHTS["A"], role=SourceRole.RELAY, held=((0, 1),))
    origin = make_record(WEIGHTS["A"])
    draining = make_record(WEIGHTS["A"], state=SourceState.DRAINING)
    for record in (origin, relay, draining):
        register_source(registry, 0, record, ALICE)
    assert records(registry.resolve("llama").sources) == [origin, relay]


def test_a_crash_does_not_free_a_name_but_its_owner_can() -> None:
    registry = machine()
    first, other = make_record(WEIGHTS["A"]), make_record(WEIGHTS["B"])
    register_source(registry, 0, first, ALICE)
    assert listed(registry, LEASE_S + GRACE_S / 2, other, BOB).pin_only
    registry.deregister(LEASE_S + GRACE_S / 2, other.source_id, BOB)
    # Nor is it free at once when its grace is over: its owner may yet come back.
    assert listed(registry, 2 * LEASE_S + 2 * GRACE_S, other, BOB).pin_only
    registry.deregister(51, other.source_id, BOB)
    assert listed(registry, 2 * LEASE_S + 3 * GRACE_S, other, BOB) == other
    registry.deregister(71, other.source_id, BOB)
    again = make_record(WEIGHTS["C"])
    assert listed(registry, 71, again, BOB) == again
    registry.deregister(71, again.source_id, BOB)
    assert listed(registry, 71 + GRACE_S, make_record(WEIGHTS["C"]), ALICE).pin_only is False


def test_one_layout_for_the_same_weights() -> None:
    """It is the one that follows from them by the layout version of the first source."""
    registry = machine()
    first = make_record(WEIGHTS["A"])
    register_source(registry, 0, first, ALICE)
    assert registry.layout_version(first.model, 9) == first.ref.layout_version
    assert registry.layout_version(first.model._replace(revision="other"), 9) == 9
    version = first.ref.layout_version + 1
    ref = replace(first.ref, layout=b"l" * 32, layout_version=version)
    other = replace(make_record(WEIGHTS["A"]), ref=ref)
    with pytest.raises(BindingError, match=f"layout {version - 1}, .* layout {version}"):
        register_source(registry, 0, other, BOB)
    assert records(registry.sources()) == [first]


def test_the_first_origin_with_files_binds_them() -> None:
    registry = machine()
    bare = make_record(make_documents("A", files=""))
    these, those = make_record(WEIGHTS["A"]), make_record(make_documents("A", files="those"))
    register_source(registry, 0, bare, ALICE)
    assert registry.resolve("llama").ref.packaging == b""
    register_source(registry, 0, these, ALICE)
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
    register_source(registry, 0, relay, BOB, keeps_pin=True, receipt=receipt_of(relay, ALICE))
    assert registry.resolve("llama").ref == relay.ref
    stranger = make_record(make_documents("A", files="evil"))
    register_source(registry, 0, stranger, BOB)
    assert registry.resolve("llama").ref == relay.ref  # nor does another key's
    registry.deregister(0, stranger.source_id, BOB)
    origin = make_record(WEIGHTS["A"])
    register_source(registry, 0, origin, ALICE)
    assert registry.resolve("llama").ref == origin.ref
    registry.deregister(1, origin.source_id, ALICE)
    assert registry.resolve("llama").ref == origin.ref


def test_a_name_that_is_taken_after_a_restart_leaves_the_pin() -> None:
    registry = machine()
    usurper, honest = make_record(WEIGHTS["B"]), make_record(WEIGHTS["A"])
    register_source(registry, 0, usurper, BOB)
    with pytest.raises(BindingError, match="is bound to"):
        register_source(registry, 0, make_record(WEIGHTS["C"]), BOB)
    # Whether it was listed before, or has started anew.
    contested = listed(registry, 0, honest, ALICE, keeps_pin=True)
    assert contested == replace(honest, pin_only=True) == listed(registry, 0, honest, ALICE)
    assert records(registry.resolve("llama").sources) == [usurper]
    pinned = registry.resolve(f"llama@{honest.ref.identity.hex()}")
    assert pinned.ref == honest.ref and records(pinned.sources) == [contested]
    marked = {m.ref.identity: (m.sources, m.pin_only) for m in registry.models()}
    assert marked == {usurper.ref.identity: (1, False), honest.ref.identity: (1, True)}
    # Pulls of it are listed beside it, without asking for anything.
    relay = make_record(WEIGHTS["A"], role=SourceRole.RELAY)
    assert listed(registry, 0, relay, BOB).pin_only
    registry.take_changes()
    # It gets the name when that ends and its owner has not come back.
    registry.deregister(1, usurper.source_id, BOB)
    with pytest.raises(UnknownModelError, match="by its pin only"):
        registry.resolve("llama")
    for now in range(2, int(GRACE_S) + 2):
        for source, secret in ((honest, ALICE), (relay, BOB)):
            registry.heartbeat(now, source.source_id, secret, SourceState.SERVING)
    assert registry.resolve("llama").ref == honest.ref
    kinds = [(c.kind, c.record.pin_only) for c in registry.take_changes()]
    assert sorted(kinds, key=str) == [
        (ChangeKind.CHANGED, False),
        (ChangeKind.CHANGED, False),
        (ChangeKind.GONE, False),
    ]
    # And it owns the name.
    update = make_record(WEIGHTS["C"])
    assert listed(registry, now, update, ALICE, replaces="main").model.revision == "main.2"


def test_a_contested_name_lapses_to_the_oldest_that_contests_it() -> None:
    registry = Owned(lease_s=LEASE_S, binding_grace_s=GRACE_S)
    usurper = make_record(WEIGHTS["B"])
    register_source(registry, 0, usurper, BOB)
    contesting = [make_record(WEIGHTS[text]) for text in "AC"]
    for record in contesting:
        listed(registry, 1, record, ALICE, keeps_pin=True)
    now = 1.0
    while registry.source(contesting[0].source_id).record.pin_only:
        now += 1.0
        assert now < 2 * (LEASE_S + 2 * GRACE_S)
        for record in contesting:
            registry.heartbeat(now, record.source_id, ALICE, SourceState.SERVING)
    assert now >= LEASE_S + 2 * GRACE_S
    assert registry.resolve("llama").ref == contesting[0].ref
    assert registry.source(contesting[1].source_id).record.pin_only
    # The usurper comes too late now.
    assert listed(registry, now, usurper, BOB).pin_only


def test_an_update_that_stands_against_a_strangers_family_is_contested_too() -> None:
    registry = machine()
    register_source(registry, 0, make_record(WEIGHTS["B"]), BOB)  # as "main"
    update = make_record(WEIGHTS["A"], revision="main.2")
    assert listed(registry, 0, update, ALICE, keeps_pin=True).pin_only
    assert registry.resolve("llama").ref.identity != update.ref.identity
    with pytest.raises(UnknownModelError) as caught:
        registry.resolve("llama", "main.2")
    assert "by its pin only" in caught.value.hint
    assert registry.resolve(f"llama@{update.ref.identity.hex()}", "main.2").ref == update.ref


@pytest.mark.parametrize("each_store", ["memory"], indirect=True)  # as text it takes minutes
def test_many_sources_of_one_address_do_not_fill_an_answer() -> None:
    registry = FollowedRegistry()
    for _ in range(300):
        register_source(registry, 0, make_record(WEIGHTS["A"]), BOB, address="ipv4:10.0.0.66")
    honest = [make_record(WEIGHTS["A"], role=role) for role in SourceRole]
    for record in honest:
        register_source(registry, 0, record, ALICE, address="ipv4:10.0.0.1")
    sources = registry.resolve("llama").sources
    found = [s.record for s in in_turn(sources, random.Random(0))]
    assert len(found) == 302 and found.index(honest[0]) <= 1
    # Relays come after all origins.
    assert found.index(honest[1]) == 301
    # Nor do many revisions of one address.
    for number in range(300):
        record = make_record(WEIGHTS["A"], revision=f"r{number}")
        register_source(registry, 0, record, BOB, address="ipv4:10.0.0.66")
    sources = registry.resolve(f"llama@{honest[0].ref.identity.hex()}").sources
    assert len(sources) == 602
    taken = [*in_turn(sources, random.Random(0))][:256]
    assert honest[0] in [each.record for each in taken[:2]]
    assert [s.record for s in in_order(taken)].index(honest[0]) <= 1


@pytest.mark.parametrize("each_store", ["memory"], indirect=True)
@pytest.mark.parametrize("addresses", [1, 20, 600])
def test_answers_that_are_cut_off_name_every_source_in_turn(addresses: int) -> None:
    """Else all pulls would have the first ones as neighbours, which would be full."""
    registry = FollowedRegistry()
    for number in range(600):
        record = make_record(WEIGHTS["A"], role=SourceRole.RELAY)
        address = f"ipv4:10.0.{number % addresses}.1"
        register_source(registry, 0, record, ALICE, address=address)
    sources, rng = registry.resolve("llama").sources, random.Random(0)
    named: Counter[str] = Counter()
    for _ in range(60):
        taken = [*in_turn(sources, rng)][:100]
        assert len({id(each) for each in taken}) == 100
        named.update(each.record.source_id for each in taken)
    assert len(named) == 600  # each is named 10 times on average
    assert max(named.values()) <= 30


def test_another_layout_wants_a_higher_generation() -> None:
    registry = machine()
    first = make_record(WEIGHTS["A"])
    register_source(registry, 0, first, ALICE)
    other = replace(first, ref=replace(first.ref, layout=b"l" * 32))
    with pytest.raises(StaleGenerationError, match="raise the generation"):
        register_source(registry, 0, other, ALICE)
    with pytest.raises(NotAllowedError):
        register_source(registry, 0, replace(other, generation=2), BOB)


def test_one_address_may_take_only_a_part_of_the_limits() -> None:
    limits = Limits(models=4, sources=6)
    registry = Owned(limits=limits, binding_grace_s=10.0)
    greedy = [make_record(make_documents(str(i)), name=f"m{i}") for i in range(3)]
    for record in greedy[:2]:
        register_source(registry, 0, record, b"s" * 16, address="ipv4:10.0.0.1")
    with pytest.raises(CapacityError, match=r"2 models of ipv4:10\.0\.0\.1"):
        register_source(registry, 0, greedy[2], b"s" * 16, address="ipv4:10.0.0.1")
    # A renewal, and another source of a bound model: neither is a new model.
    register_source(registry, 1, greedy[0], b"s" * 16, address="ipv4:10.0.0.1")
    again = make_record(make_documents("0"), name="m0")
    register_source(registry, 1, again, b"s" * 16, address="ipv4:10.0.0.1")
    with pytest.raises(CapacityError, match=r"3 sources of ipv4:10\.0\.0\.1"):
        another = make_record(make_documents("0"), name="m0")
        register_source(registry, 1, another, b"s" * 16, address="ipv4:10.0.0.1")
    register_source(registry, 1, greedy[2], b"t" * 16, address="ipv4:10.0.0.2")
    # Sources and models that end no longer count.
    registry.deregister(2, greedy[1].source_id, b"s" * 16)
    fourth = make_record(make_documents("4"), name="m4")
    register_source(registry, 2, fourth, b"s" * 16, address="ipv4:10.0.0.1")
    registry.tick(1000)
    registry.tick(1010)
    assert not registry.sources() and not registry.models()
    for record in greedy[:2]:
        register_source(registry, 1010, record, b"s" * 16, address="ipv4:10.0.0.1")


def test_the_first_lease_is_longer_than_later_ones() -> None:
    registry = FollowedRegistry(lease_s=1.0, first_lease_s=3.0)
    early, late = make_record(WEIGHTS["A"]), make_record(WEIGHTS["A"])
    for record in (early, late):
        register_source(registry, 0, record, b"s" * 16)
    registry.heartbeat(0.5, early.source_id, b"s" * 16, SourceState.SERVING)
    registry.tick(1.5)
    assert [s.record for s in registry.sources()] == [late]
    registry.tick(3.0)
    assert not registry.sources()


def test_a_stranger_that_contests_a_name_gets_it_only_when_its_owner_has_left_for_long() -> None:
    registry = machine()
    record, other = make_record(WEIGHTS["A"]), make_record(WEIGHTS["B"])
    register_source(registry, 0, record, ALICE)
    assert listed(registry, 0, other, BOB).pin_only
    registry.deregister(1, record.source_id, ALICE)
    assert registry.source(other.source_id).record.pin_only
    # Nor does a fresh source of the stranger get it, in any revision, or one without a key.
    for revision in ("main", "x"):
        fresh = make_record(WEIGHTS["C"], revision=revision)
        assert listed(registry, 2, fresh, BOB).pin_only
        registry.deregister(2, fresh.source_id, BOB)
    # The owner is back, with whatever it has.
    again = make_record(WEIGHTS["C"])
    assert listed(registry, 3, again, ALICE) == again
    update = listed(registry, 3, make_record(WEIGHTS["A"]), ALICE, replaces="main")
    assert update.model.revision == "main.2" and not update.pin_only
    assert registry.source(other.source_id).record.pin_only


@pytest.mark.parametrize("how", ["deregistered", "withdrawn for now", "crashed"])
def test_an_emptied_name_is_its_owners_for_a_grace_and_goes_to_who_contests_it_then(
    how: str,
) -> None:
    registry = machine()
    record, other = make_record(WEIGHTS["A"]), make_record(WEIGHTS["B"])
    register_source(registry, 0, record, ALICE)
    register_source(registry, 0, other, BOB)
    if how != "crashed":
        registry.deregister(0, record.source_id, ALICE, keeps_name=how != "deregistered")
    ends = {"deregistered": GRACE_S, "withdrawn for now": 2 * GRACE_S}
    ends_s = ends.get(how, LEASE_S + 2 * GRACE_S)
    now = 0.0
    while now < ends_s - 1:
        now += 1
        registry.heartbeat(now, other.source_id, BOB, SourceState.SERVING)
        assert registry.source(other.source_id).record.pin_only
    registry.tick(ends_s)
    assert not registry.source(other.source_id).record.pin_only
    assert registry.source(other.source_id).record.by_owner
    assert registry.resolve("llama").ref == other.ref


def test_an_emptied_name_takes_its_owners_receipt_and_no_strangers() -> None:
    registry = machine()
    record, other = make_record(WEIGHTS["A"]), make_record(WEIGHTS["B"])
    registry.tick(0)
    now = GRACE_S + 1  # the first grace is over
    register_source(registry, now, record, ALICE)
    registry.deregister(now, record.source_id, ALICE)
    was = receipt_of(other, BOB, issued_s=9.0)
    assert listed(registry, now, other, BOB, keeps_pin=True, receipt=was).pin_only
    relay = make_record(WEIGHTS["A"], role=SourceRole.RELAY)
    answer = register_source(
        registry, now, relay, BOB, keeps_pin=True, receipt=receipt_of(relay, ALICE)
    )
    assert answer.record is not None and not answer.record.pin_only
    assert listed(registry, now, make_record(WEIGHTS["C"]), ALICE, replaces="main").model.revision


def test_names_that_are_kept_for_their_owners_are_bounded() -> None:
    """Who keeps the most gives way, and what contested its oldest name gets that."""
    registry = Owned(lease_s=LEASE_S, binding_grace_s=GRACE_S, limits=Limits(models=4))
    kept = [make_record(WEIGHTS["A"], name=name) for name in ("honest", "a", "b", "c", "d")]
    other = make_record(WEIGHTS["B"], name="a")
    for record in kept:
        address = "ipv4:10.0.0.1" if record is kept[0] else "ipv4:10.0.0.2"
        register_source(registry, 0, record, ALICE, address=address)
        if record.model.name == "a":
            register_source(registry, 0, other, BOB, address="ipv4:10.0.0.1")
        registry.deregister(0, record.source_id, ALICE)
    assert not registry.source(other.source_id).record.pin_only
    for record in (kept[0], kept[2]):
        late = make_record(WEIGHTS["B"], name=record.model.name)
        assert listed(registry, 0, late, BOB).pin_only
        registry.deregister(0, late.source_id, BOB)


def in_layout(record: SourceRecord, version: int) -> SourceRecord:
    """Return the record of a source that has the same weights in this layout version."""
    ref = replace(record.ref, layout=bytes([version]) * 32, layout_version=version)
    return replace(record, ref=ref)


def test_an_owner_does_not_join_what_is_listed_by_its_pin_in_another_layout() -> None:
    """Nor is it kept from its name: the name and the pin have one layout each."""
    registry = machine()
    held = in_layout(make_record(WEIGHTS["A"], role=SourceRole.RELAY), 2)
    assert listed(registry, 0, held, BOB, keeps_pin=True).pin_only
    mine = in_layout(make_record(WEIGHTS["A"]), 3)
    assert not listed(registry, 0, mine, ALICE).pin_only
    assert records(registry.resolve("llama").sources) == [mine]
    assert {m.ref.layout_version: m.sources for m in registry.models()} == {2: 1, 3: 1}
    with pytest.raises(BindingError, match="listed in layout 3"):
        register_source(registry, 0, replace(held, generation=9), BOB, keeps_pin=True)


def test_what_is_listed_by_its_pin_or_as_an_update_names_the_layout_of_the_next_source() -> None:
    """Else that one would be refused each time it starts."""
    registry = Owned(lease_s=LEASE_S, binding_grace_s=GRACE_S)
    held = in_layout(make_record(WEIGHTS["A"], role=SourceRole.RELAY), 2)
    assert listed(registry, 0, held, BOB, keeps_pin=True).pin_only
    key = held.model
    assert registry.layout_version(key, 3) == 2
    assert registry.layout_version(key, 1) == 1  # a stranger's pin imposes no newer one
    # After a restart an update is there before what it is an update of.
    record = in_layout(make_record(WEIGHTS["B"], name="mistral", revision="main.2"), 2)
    was = receipt_of(record, ALICE, base="main")
    assert not listed(registry, 0, record, ALICE, keeps_pin=True, receipt=was).pin_only
    for revision, version in (("main", 2), ("main.2", 2), ("main.3", 2), ("other", 3)):
        assert registry.layout_version(record.model._replace(revision=revision), 3) == version


def test_a_pin_of_two_revisions_means_the_layout_that_more_readers_plan() -> None:
    registry = machine()
    newer = in_layout(make_record(WEIGHTS["A"]), 3)
    older = in_layout(make_record(WEIGHTS["A"], revision="v1"), 2)
    register_source(registry, 0, newer, ALICE)
    register_source(registry, 0, older, ALICE)
    pinned = f"llama@{older.ref.identity.hex()}"
    assert registry.resolve(pinned).ref == older.ref
    assert registry.resolve(pinned, "main").ref == newer.ref
    # A pull that has begun with the other ones still learns of them.
    assert {source.record.source_id for source in registry.resolve(pinned).sources} == {
        newer.source_id,
        older.source_id,
    }
    registry.deregister(1, older.source_id, ALICE)
    assert registry.resolve(pinned).ref == newer.ref
    # A stranger's lower one leads no readers away from it.
    lower = in_layout(make_record(WEIGHTS["A"], revision="v2"), 1)
    assert listed(registry, 1, lower, BOB).pin_only
    assert registry.resolve(pinned).ref == newer.ref


@pytest.mark.parametrize("first", [ALICE, BOB])
@pytest.mark.parametrize("late", [False, True])
def test_after_a_restart_another_layout_of_the_weights_keeps_no_receipt_from_its_name(
    first: bytes, *, late: bool
) -> None:
    """Neither a stranger's, nor that of a source of the owner that has just begun."""
    registry, now = Owned(lease_s=LEASE_S, binding_grace_s=GRACE_S), 0.0
    registry.tick(now)
    was = in_layout(make_record(WEIGHTS["A"]), 2)
    newcomer = in_layout(make_record(WEIGHTS["A"]), 3)
    assert not listed(registry, now, newcomer, first).pin_only
    back: dict[str, Any] = {"keeps_pin": True, "receipt": receipt_of(was, ALICE)}
    if late:
        for step in range(1, 20):
            now = step * GRACE_S / 15
            registry.heartbeat(now, newcomer.source_id, first, SourceState.SERVING)
        with pytest.raises(BindingError):
            register_source(registry, now, was, ALICE, **back)
        return
    assert not listed(registry, now, was, ALICE, **back).pin_only
    assert records(registry.resolve("llama").sources) == [was]
    assert registry.source(newcomer.source_id).record.pin_only
    other = in_layout(make_record(WEIGHTS["A"]), 2)
    assert not listed(registry, now, other, ALICE, **back).pin_only
    with pytest.raises(BindingError, match="listed in layout 2"):
        register_source(registry, now, in_layout(make_record(WEIGHTS["A"]), 3), ALICE)


def test_an_update_after_a_restart_joins_no_other_layout_of_it_and_displaces_nothing() -> None:
    registry = Owned(lease_s=LEASE_S, binding_grace_s=GRACE_S)
    registry.tick(0)
    base = in_layout(make_record(WEIGHTS["A"]), 2)
    assert not listed(registry, 0, base, ALICE).pin_only
    newer = in_layout(make_record(WEIGHTS["B"]), 3)
    assert listed(registry, 0, newer, ALICE, replaces="main").model.revision == "main.2"
    older, was = in_layout(make_record(WEIGHTS["B"]), 2), receipt_of(base, ALICE)
    with pytest.raises(BindingError, match="listed in layout 3"):
        register_source(registry, 0, older, ALICE, replaces="main", receipt=was)
    joined = in_layout(make_record(WEIGHTS["B"]), 3)
    assert not listed(registry, 0, joined, ALICE, replaces="main", receipt=was).pin_only
    assert not registry.source(base.source_id).record.pin_only
    assert len(registry.resolve("llama").sources) == 2
