"""Bundles at the coordinator's machine: which ranks are there, what NAME means, who may join."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mx.core.changes import NameMeaning
from mx.core.registry import RegisteredSource
from mx.core.types import ModelKey, Registration, SourceRecord, SourceRole, SourceState
from mx.errors import BindingError, UnknownModelError
from tests.support.owners import owned, receipt_of
from tests.support.records import make_documents, make_record, register_source
from tests.support.stores import FollowedRegistry

pytestmark = pytest.mark.usefixtures("each_store")

R0, R1 = "tp=0/2,dtype=bf16", "tp=1/2,dtype=bf16"
BUNDLE = "tp=*/2,dtype=bf16"
#: The ranks' processes have secrets of their own, and share the name key.
ALICE, BOB, EVE = b"a" * 16, b"b" * 16, b"e" * 16
SECRETS = {R0: ALICE, R1: BOB}
OWNER = b"owner"


class Owned(FollowedRegistry):
    """A registry where everybody but EVE holds the owner's key."""

    def register(self, now: float, registration: Registration, **more: Any) -> RegisteredSource:
        mine = owned(registration.record, EVE if registration.secret == EVE else OWNER)
        return super().register(now, replace(registration, record=mine), **more)


def machine() -> FollowedRegistry:
    return Owned(lease_s=5.0, binding_grace_s=60.0)


def rank(variant: str, weights: str, revision: str = "main", **rest: object) -> SourceRecord:
    documents = make_documents(f"{variant} {weights}")
    return make_record(documents, variant=variant, revision=revision, **rest)  # type: ignore[arg-type]


def update(registry: FollowedRegistry, now: float, old: SourceRecord, weights: str) -> SourceRecord:
    variant = old.model.variant
    record = rank(variant, weights, old.model.revision, generation=old.generation + 1)
    replaces = old.model.revision
    listed = register_source(registry, now, record, SECRETS[variant], replaces=replaces).record
    assert listed is not None
    return listed


def two_ranks(registry: FollowedRegistry) -> tuple[SourceRecord, SourceRecord]:
    found = []
    for variant in (R0, R1):
        listed = register_source(registry, 0, rank(variant, "one"), SECRETS[variant]).record
        assert listed is not None
        found.append(listed)
    return found[0], found[1]


def revisions(registry: FollowedRegistry) -> tuple[str, ...]:
    return tuple(registry.resolve("llama", variant=each).model.revision for each in (R0, R1))


def missing(registry: FollowedRegistry, revision: str = "main") -> tuple[str, ...]:
    (found,) = [each for each in registry.bundles("llama") if each.revision == revision]
    assert (found.variant, found.ranks, found.missing_count) == (BUNDLE, 2, len(found.missing))
    return found.missing


def test_a_bundle_is_complete_when_whole_sources_serve_all_ranks() -> None:
    registry = machine()
    first = rank(R0, "one")
    register_source(registry, 0, first, ALICE)
    assert missing(registry) == (R1,)
    origin = rank(R1, "one", state=SourceState.DRAINING)
    register_source(registry, 0, origin, BOB)
    part = rank(R1, "one", role=SourceRole.RELAY, held=((0, 1),))
    register_source(registry, 0, part, BOB)
    assert missing(registry) == (R1,)
    registry.advertise(0, part.source_id, BOB, part.generation, ((0, 4),))
    assert missing(registry) == ()
    registry.heartbeat(1, first.source_id, ALICE, SourceState.DRAINING)
    assert missing(registry) == (R0,)
    registry.heartbeat(1, first.source_id, ALICE, SourceState.SERVING)
    assert missing(registry) == ()
    registry.deregister(2, part.source_id, BOB)
    assert missing(registry) == (R1,)
    assert registry.bundles("other") == []


def test_a_lone_variant_is_a_bundle_of_one() -> None:
    registry = machine()
    old, new = (make_record(make_documents(text)) for text in ("A", "B"))
    register_source(registry, 0, old, ALICE)
    register_source(registry, 0, new, ALICE, replaces="main")
    found = {each.revision: each for each in registry.bundles()}
    assert {r: (b.variant, b.ranks, b.missing) for r, b in found.items()} == {
        "main": ("checkpoint", 1, ()),
        "main.2": ("checkpoint", 1, ()),
    }
    assert (found["main"].named, found["main.2"].named) == (False, True)
    registry.deregister(1, new.source_id, ALICE)
    # What the name meant is away, and no older revision takes its place.
    assert [b.revision for b in registry.bundles() if b.named] == ["main.2"]
    meant = registry.resolve("llama")
    assert meant.model.revision == "main.2" and not meant.sources
    assert [each.revision for each in meant.older] == ["main"]
    assert registry.resolve("llama", allow_older=True).model.revision == "main"
    assert registry.take_meant() == []


def test_two_sizes_of_one_model_are_two_bundles() -> None:
    registry = machine()
    two_ranks(registry)
    register_source(registry, 0, rank("tp=3/4,dtype=bf16", "one"), BOB)
    found = {each.variant: each.missing for each in registry.bundles("llama")}
    assert found == {
        BUNDLE: (),
        "tp=*/4,dtype=bf16": tuple(f"tp={i}/4,dtype=bf16" for i in range(3)),
    }


def test_the_name_means_an_update_once_all_ranks_have_registered_it() -> None:
    registry = machine()
    zero, one = two_ranks(registry)
    assert registry.take_meant() == [NameMeaning("llama", BUNDLE, "main")]
    new_one = update(registry, 1, one, "two")
    assert new_one.model.revision == "main.2"
    assert revisions(registry) == ("main", "main")
    assert registry.resolve("llama", "main.2", R1).model.revision == "main.2"
    assert registry.take_meant() == []
    new_zero = update(registry, 1, zero, "two")
    assert new_zero.model.revision == "main.2"
    assert revisions(registry) == ("main.2", "main.2")
    assert registry.take_meant() == [NameMeaning("llama", BUNDLE, "main.2")]
    # The end of a rank brings nothing back, though the old revision is still served.
    registry.deregister(2, new_zero.source_id, ALICE)
    assert revisions(registry) == ("main.2", "main.2")
    assert registry.resolve("llama", variant=R0).sources == ()
    assert missing(registry, "main.2") == (R0,)
    assert missing(registry, "main") == ()


def test_an_update_that_a_rank_never_registers_is_never_meant() -> None:
    registry = machine()
    zero, one = two_ranks(registry)
    new = update(registry, 1, zero, "two")
    registry.deregister(2, new.source_id, ALICE)
    update(registry, 2, one, "two")
    assert revisions(registry) == ("main", "main")


def test_a_rank_whose_weights_stay_the_same_updates_with_the_others() -> None:
    registry = machine()
    zero, one = two_ranks(registry)
    new_zero = update(registry, 1, zero, "two")
    new_one = update(registry, 1, one, "one")
    assert (new_zero.model.revision, new_one.model.revision) == ("main.2", "main.2")
    assert revisions(registry) == ("main.2", "main.2")
    # A repeated registration of the same source is no further update.
    again = register_source(registry, 2, new_one, BOB, replaces="main").record
    assert again is not None
    assert again.model.revision == "main.2"


def test_an_update_that_was_taken_back_is_repeated_under_its_number() -> None:
    registry = machine()
    zero, one = two_ranks(registry)
    lost = update(registry, 1, zero, "two")
    registry.deregister(1, lost.source_id, ALICE)
    assert update(registry, 2, zero, "two").model.revision == "main.2"
    assert update(registry, 2, one, "two").model.revision == "main.2"
    assert revisions(registry) == ("main.2", "main.2")


@pytest.mark.parametrize("first", [(R0, "main.2"), (R1, "main"), (R0, "main")])
def test_ranks_come_back_after_a_restart_in_any_order(
    first: tuple[str, str],
) -> None:
    """In the middle of an update: rank 0 serves both revisions, rank 1 the old one."""
    registry = machine()
    there = [(R0, "main.2"), (R1, "main"), (R0, "main")]
    for variant, revision in sorted(there, key=lambda each: each != first):
        record = rank(variant, revision, revision)
        was = receipt_of(record, OWNER, base="main" if revision == "main.2" else "")
        listed = register_source(
            registry, 0, record, SECRETS[variant], keeps_pin=True, receipt=was
        ).record
        assert listed is not None
        assert not listed.pin_only
    assert revisions(registry) == ("main", "main")
    (one,) = [s.record for s in registry.sources() if s.record.model.variant == R1]
    update(registry, 1, one, "main.2")
    assert revisions(registry) == ("main.2", "main.2")


def test_a_stranger_takes_no_variant_of_a_rank_that_has_an_owner() -> None:
    registry = machine()
    zero, _ = two_ranks(registry)
    update(registry, 1, zero, "two")
    evil = [
        (rank(R1, "evil"), "main"),
        (rank(R0, "evil"), "main.2"),
        (make_record(make_documents("evil")), "main"),  # no rank
    ]
    for record, replaces in evil:
        with pytest.raises(BindingError, match="another name key"):
            register_source(registry, 1, record, EVE, replaces=replaces)
    for record in (rank(R0, "evil", "main.3"), make_record(make_documents("evil"), revision="x")):
        listed = register_source(registry, 1, record, EVE).record
        assert listed is not None
        assert listed.pin_only and not listed.by_owner
    assert revisions(registry) == ("main", "main")


def test_a_rank_that_has_only_what_the_name_does_not_mean_yet_is_not_resolved() -> None:
    registry = machine()
    register_source(registry, 0, rank(R0, "one"), ALICE)
    register_source(registry, 0, rank(R1, "two", "main.2"), BOB)
    assert registry.resolve("llama", variant=R0).model.revision == "main"
    with pytest.raises(UnknownModelError, match="means main .*has not registered"):
        registry.resolve("llama", variant=R1)


def test_a_variant_that_is_not_listed_is_answered_with_the_nearest_one() -> None:
    registry = machine()
    two_ranks(registry)
    register_source(registry, 0, make_record(make_documents("disk")), ALICE)
    with pytest.raises(UnknownModelError) as caught:
        registry.resolve("llama", variant="tp=0/2,dtype=fp16")
    assert caught.value.message == (
        "no llama[tp=0/2,dtype=fp16] here: llama[tp=0/2,dtype=bf16] is the nearest that is listed"
    )
    assert caught.value.hint == "dtype: bf16 listed, fp16 asked for"
    with pytest.raises(UnknownModelError) as caught:
        registry.resolve("llama", variant="engine=vllm,tp=1/2,dtype=fp16")
    assert caught.value.hint == (
        "engine: none listed, vllm asked for; dtype: bf16 listed, fp16 asked for"
    )
    with pytest.raises(UnknownModelError, match="there is llama"):
        registry.resolve("llama", variant="rank-0")


def test_names_of_other_revisions_are_not_gated() -> None:
    registry = machine()
    record = rank(R0, "one", "exp")
    register_source(registry, 0, record, ALICE)
    new = update(registry, 1, record, "two")
    assert new.model == ModelKey("llama", "exp.2", R0)
    assert registry.resolve("llama", "exp.2", R0).model == new.model
    assert registry.take_meant() == []


def test_what_a_name_means_ends_with_its_last_revision() -> None:
    registry = machine()
    zero, one = two_ranks(registry)
    update(registry, 0, zero, "two")
    update(registry, 0, one, "two")
    registry.take_meant()
    registry.tick(5)  # the leases end
    registry.tick(66)  # main.2 is forgotten, and main not yet: no older one takes its place
    assert registry.take_meant() == []
    assert [each.named for each in registry.bundles()] == [False]
    registry.tick(200)
    assert registry.take_meant() == [NameMeaning("llama", BUNDLE, "")]
    assert registry.bundles() == []


def test_a_rank_that_was_started_again_updates_with_the_others() -> None:
    """It has another secret, and the same name key."""
    registry = machine()
    zero, one = two_ranks(registry)
    registry.deregister(1, one.source_id, BOB)
    again, process = rank(R1, "one"), b"started again"[:16].ljust(16)
    listed = register_source(registry, 2, again, process).record
    assert listed is not None and listed.by_owner
    new = register_source(
        registry, 2, rank(R1, "two", generation=2), process, replaces="main"
    ).record
    assert new is not None
    assert new.model.revision == "main.2"
    assert update(registry, 2, zero, "two").model.revision == "main.2"
    assert revisions(registry) == ("main.2", "main.2")


def test_a_rank_away_for_long_is_still_its_owners() -> None:
    registry = machine()
    zero, one = two_ranks(registry)
    registry.deregister(1, one.source_id, BOB)
    for now in range(4, 204, 4):
        registry.heartbeat(now, zero.source_id, ALICE, zero.state)
    stranger = register_source(registry, 204, rank(R1, "one"), EVE).record
    assert stranger is not None and not stranger.by_owner
    with pytest.raises(BindingError, match="another name key"):
        register_source(registry, 204, rank(R1, "two"), EVE, replaces="main")
    new = register_source(registry, 204, rank(R1, "two"), BOB, replaces="main").record
    assert new is not None
    assert new.model.revision == "main.2" and new.by_owner


def test_ranks_have_one_number_also_if_a_reader_of_one_knows_of_updates() -> None:
    registry = machine()
    zero, one = two_ranks(registry)
    seen = receipt_of(replace(zero, model=zero.model._replace(revision="main.2")), OWNER, newest=2)
    registry.recall(1, seen._replace(base="main", completed=2))
    found = {update(registry, 1, each, "two").model.revision for each in (one, zero)}
    assert found == {"main.3"}
    assert revisions(registry) == ("main.3", "main.3")
