"""A state that has lost some of itself: what is bound until it is known again what names mean."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from mx.core.memory_store import MemoryStore
from mx.core.ownership import Receipt
from mx.core.types import SourceRecord, SourceRole, SourceState
from mx.errors import BindingError, UnknownModelError, UnsettledError
from tests.support.owners import owned, receipt_of
from tests.support.records import make_documents, make_record, register_source
from tests.support.stores import FollowedRegistry

LEASE_S, GRACE_S = 5.0, 20.0
ALICE, BOB = b"alice", b"bob"
A, B = make_documents("A"), make_documents("B")


def in_doubt(now: float = 100.0) -> FollowedRegistry:
    """Return a registry that has run for long, and whose state came back empty at `now`."""
    store = MemoryStore(lambda: now)
    registry = FollowedRegistry(store, lease_s=LEASE_S, binding_grace_s=GRACE_S)
    registry.tick(0)
    asyncio.run(store.begin_epoch(store.epoch, now + LEASE_S))
    return registry


def keep(registry: FollowedRegistry, until_s: float, *sources: tuple[SourceRecord, bytes]) -> None:
    now = 100.0
    while now < until_s:
        now = min(until_s, now + 1)
        for record, secret in sources:
            registry.heartbeat(now, record.source_id, secret, SourceState.SERVING)


def test_a_newcomer_is_found_by_its_pin_and_has_its_name_when_the_doubt_ends() -> None:
    registry = in_doubt()
    new = owned(make_record(A), BOB)
    assert register_source(registry, 100, new, BOB).record.pin_only
    with pytest.raises(UnknownModelError):
        registry.resolve("llama")
    assert registry.resolve(f"llama@{new.ref.identity.hex()}").sources
    keep(registry, 104.9, (new, BOB))
    assert registry.source(new.source_id).record.pin_only
    keep(registry, 105.0, (new, BOB))
    found = registry.source(new.source_id).record
    assert not found.pin_only and found.by_owner
    assert registry.resolve("llama").ref == new.ref


@pytest.mark.parametrize("role", list(SourceRole))
@pytest.mark.parametrize("first", [True, False], ids=["receipt first", "stranger first"])
def test_a_receipt_binds_and_the_stranger_does_not_have_the_name_after_it(
    role: SourceRole, first: bool
) -> None:
    """A relay brings it as well as the owner."""
    registry = in_doubt()
    stranger = owned(make_record(B), BOB)
    back = owned(make_record(A, role=role), ALICE)
    for honest in (first, not first):
        if honest:
            was = receipt_of(back, ALICE)
            given = register_source(registry, 100, back, ALICE, keeps_pin=True, receipt=was)
            assert not given.record.pin_only and given.receipt is not None
        else:
            assert register_source(registry, 100, stranger, BOB).record.pin_only
    keep(registry, 130.0, (stranger, BOB), (back, ALICE))
    assert registry.source(stranger.source_id).record.pin_only
    assert registry.resolve("llama").ref == back.ref


def test_a_receipt_that_is_late_still_wins_in_the_grace_after_the_doubt() -> None:
    registry = in_doubt()
    stranger, back = owned(make_record(B), BOB), owned(make_record(A), ALICE)
    register_source(registry, 100, stranger, BOB)
    keep(registry, 110.0, (stranger, BOB))
    assert registry.resolve("llama").ref == stranger.ref
    was = receipt_of(back, ALICE)
    register_source(registry, 110, back, ALICE, keeps_pin=True, receipt=was)
    assert registry.resolve("llama").ref == back.ref
    assert registry.source(stranger.source_id).record.pin_only


def test_an_update_needs_the_receipt_of_what_it_replaces() -> None:
    """The state may have lost the updates that came before it."""
    registry = in_doubt()
    update = owned(make_record(B), ALICE)
    with pytest.raises(BindingError, match="only by a receipt now"):
        register_source(registry, 100, update, ALICE, replaces="main")
    was = receipt_of(replace(make_record(A), source_id=update.source_id), ALICE, newest=7)
    given = register_source(registry, 100, update, ALICE, replaces="main", receipt=was)
    assert given.record.model.revision == "main.8"


def test_what_is_bound_in_the_older_state_stays_bound() -> None:
    registry = in_doubt()
    registry.store.doubt_until_s = float("-inf")
    first, twin = owned(make_record(A), ALICE), owned(make_record(A), ALICE)
    register_source(registry, 100, first, ALICE)
    asyncio.run(registry.store.begin_epoch(registry.store.epoch, 105.0))
    assert not register_source(registry, 100, twin, ALICE).record.pin_only
    other = owned(make_record(B), ALICE)
    assert register_source(registry, 100, other, ALICE).record.pin_only
    assert registry.resolve("llama").ref == first.ref


def test_a_claim_keeps_its_place_while_its_owner_changes_it() -> None:
    """A stranger who came later does not get the name when the doubt ends meanwhile."""
    registry = in_doubt()
    owner, stranger = owned(make_record(A), ALICE), owned(make_record(B), BOB)
    assert register_source(registry, 100, owner, ALICE).record.pin_only
    assert register_source(registry, 100, stranger, BOB).record.pin_only
    registry.deregister(101, owner.source_id, ALICE, keeps_name=True)
    keep(registry, 106.0, (stranger, BOB))
    assert registry.source(stranger.source_id).record.pin_only
    changed = replace(owned(make_record(make_documents("C")), ALICE), generation=2)
    new = register_source(registry, 106, changed, ALICE, replaces="main").record
    assert new.model.revision == "main.2" and not new.pin_only
    assert registry.resolve("llama").ref == changed.ref


def test_a_claim_whose_owner_does_not_come_back_ends() -> None:
    registry = in_doubt()
    owner, stranger = owned(make_record(A), ALICE), owned(make_record(B), BOB)
    register_source(registry, 100, owner, ALICE)
    register_source(registry, 100, stranger, BOB)
    registry.deregister(101, owner.source_id, ALICE)
    keep(registry, 101.0 + 2 * GRACE_S, (stranger, BOB))
    assert registry.resolve("llama").ref == stranger.ref


def test_an_update_in_a_doubt_is_refused_for_now() -> None:
    registry = in_doubt()
    with pytest.raises(UnsettledError):
        register_source(registry, 100, owned(make_record(B), ALICE), ALICE, replaces="main")


def test_a_name_waits_for_what_its_owner_published_before_a_receipt_came() -> None:
    """The receipt says what the name meant before; the owner is told, and registers an update."""
    registry = in_doubt()
    new, relay = owned(make_record(B), ALICE), make_record(A, role=SourceRole.RELAY)
    register_source(registry, 100, new, ALICE, publishes=True)
    keep(registry, 110.0, (new, ALICE))
    assert registry.resolve("llama").ref == new.ref
    was = receipt_of(owned(make_record(A), ALICE), ALICE)
    back = register_source(registry, 110, relay, BOB, keeps_pin=True, receipt=was).record
    assert not back.pin_only and registry.source(new.source_id).record.pin_only
    with pytest.raises(UnknownModelError, match="means llama:main.2"):
        registry.resolve("llama")
    again = register_source(registry, 111, replace(new, generation=2), ALICE, replaces="main")
    assert registry.resolve("llama").ref == new.ref
    assert again.record.model.revision == "main.2"


def lifeless(now: float = 0.0) -> FollowedRegistry:
    """Return a registry that has just begun, and knows nothing."""
    registry = FollowedRegistry(MemoryStore(lambda: now), lease_s=LEASE_S, binding_grace_s=GRACE_S)
    registry.tick(now)
    return registry


@pytest.mark.parametrize("first", [True, False], ids=["note first", "owner first"])
def test_what_an_owner_publishes_comes_after_all_that_readers_have_seen(first: bool) -> None:
    """The owner has lost its receipts, too: its number is below those that readers know."""
    registry = lifeless()
    new = owned(make_record(B), ALICE)
    seen = receipt_of(owned(make_record(A), ALICE), ALICE)._replace(newest=3)
    for note in (first, not first):
        if note:
            registry.recall(1, seen)
        else:
            register_source(registry, 2, new, ALICE, publishes=True)
    if first:
        assert registry.resolve("llama").model.revision == "main"  # the note has bound nothing
        registry.recall(3, seen)
    assert registry.outdated_by(registry.source(new.source_id)) == "main"
    with pytest.raises(UnknownModelError, match=r"means llama:main\.4"):
        registry.resolve("llama")
    again = register_source(registry, 4, replace(new, generation=2), ALICE, replaces="main")
    assert again.record.model.revision == "main.4"
    assert registry.resolve("llama").ref == new.ref
    assert not registry.outdated_by(registry.source(new.source_id))


def test_what_an_owner_publishes_again_is_newer_than_what_has_lapsed() -> None:
    """A, B, and A again, while a relay has kept A."""
    registry = lifeless()
    first, second = owned(make_record(A), ALICE), owned(make_record(B), ALICE)
    relay = make_record(A, role=SourceRole.RELAY)
    register_source(registry, 0, first, ALICE, publishes=True)
    register_source(registry, 0, relay, BOB)
    register_source(registry, 1, second, ALICE, replaces="main")
    registry.deregister(2, first.source_id, ALICE)
    registry.deregister(2, second.source_id, ALICE)
    for now in range(2, 30):
        registry.heartbeat(now, relay.source_id, BOB, SourceState.SERVING)
    with pytest.raises(UnknownModelError, match=r"means llama:main\.2"):
        registry.resolve("llama")
    assert not registry.outdated_by(registry.source(relay.source_id))
    third = owned(make_record(A), ALICE)
    given = register_source(registry, 30, third, ALICE, publishes=True).record
    assert given.model.revision == "main.3" and not given.pin_only
    assert registry.resolve("llama").ref == first.ref


def test_an_older_publication_does_not_come_back_when_a_newer_one_lapses() -> None:
    registry = lifeless()
    first, second = owned(make_record(A), ALICE), owned(make_record(B), ALICE)
    register_source(registry, 0, first, ALICE, publishes=True)
    register_source(registry, 1, second, ALICE, replaces="main")
    registry.deregister(2, second.source_id, ALICE)
    for now in range(2, 40):
        registry.heartbeat(now, first.source_id, ALICE, SourceState.SERVING)
        assert not registry.outdated_by(registry.source(first.source_id))
    with pytest.raises(UnknownModelError, match=r"means llama:main\.2"):
        registry.resolve("llama")


def test_who_came_first_after_a_loss_does_not_win_after_the_next_one() -> None:
    """The owner was not back in between: what the stranger got there is tentative."""
    stranger, owner = owned(make_record(B), BOB), owned(make_record(A), ALICE)
    were = [receipt_of(owner, ALICE).issued(1_000.0)]
    registry = lifeless()
    given = register_source(registry, 0, owner, ALICE)
    assert given.receipt is not None and given.receipt.tentative
    were.append(Receipt.decode(given.receipt.issued(1_500.0).encode()))
    registry = lifeless()
    given = register_source(registry, 1, stranger, BOB)
    assert given.receipt is not None
    theirs = Receipt.decode(given.receipt.issued(2_000.0).encode())
    for was in were:
        registry = lifeless()
        given = register_source(registry, 0, stranger, BOB, keeps_pin=True, receipt=theirs)
        assert not given.record.pin_only and given.receipt is not None
        assert given.receipt.issued(3_000.0).rank == theirs.rank  # it has not gained by it
        register_source(registry, 1, owner, ALICE, keeps_pin=True, receipt=was)
        assert registry.resolve("llama").ref == owner.ref
        assert registry.source(stranger.source_id).record.pin_only
    # Once the grace is over and no one has come, it is its own.
    registry = lifeless()
    register_source(registry, 0, stranger, BOB)
    for now in range(1, 30):
        registry.heartbeat(now, stranger.source_id, BOB, SourceState.SERVING)
    told = registry.receipt_of(registry.source(stranger.source_id))
    assert told is not None and not told.tentative and told.issued(4_000.0).weight == 4_000.0


def test_an_owner_gets_its_name_back_though_the_coordinator_restarts_in_the_first_grace() -> None:
    """The state is kept, in which a stranger has bound the name before the owner came."""
    registry = lifeless()
    registry.store.outlives = True
    stranger, owner = owned(make_record(B), BOB), owned(make_record(A), ALICE)
    register_source(registry, 0, stranger, BOB)
    again = FollowedRegistry(registry.store, lease_s=LEASE_S, binding_grace_s=GRACE_S)
    again.tick(1)
    told = again.receipt_of(again.source(stranger.source_id))
    assert told is not None and told.tentative
    register_source(again, 2, owner, ALICE, keeps_pin=True, receipt=receipt_of(owner, ALICE))
    assert again.resolve("llama").ref == owner.ref


def test_a_number_that_two_lives_have_used_is_not_taken_for_the_same() -> None:
    """A backup is put back after the owner has begun anew, and readers have seen that."""
    registry = lifeless()
    old, new = owned(make_record(A), ALICE), owned(make_record(B), ALICE)
    relay = make_record(A, role=SourceRole.RELAY)
    register_source(registry, 0, old, ALICE)
    register_source(registry, 0, relay, BOB)
    seen = receipt_of(new, ALICE)._replace(newest_s=50.0)  # `main`, too
    registry.recall(1, receipt_of(old, ALICE)._replace(newest_s=40.0))
    assert registry.resolve("llama").ref == old.ref
    registry.recall(1, seen)
    with pytest.raises(UnknownModelError, match=r"means llama:main\.2"):
        registry.resolve("llama")
    was = receipt_of(new, ALICE, issued_s=60.0)
    given = register_source(
        registry, 2, new, ALICE, keeps_pin=True, receipt=was, published_s=50.0
    ).record
    assert not given.pin_only
    assert registry.outdated_by(registry.source(new.source_id)) == "main"
    again = register_source(
        registry, 3, replace(new, generation=2), ALICE, replaces="main", published_s=50.0
    ).record
    assert again.model.revision == "main.3" and registry.resolve("llama").ref == new.ref
