"""Where weights belong that are to be what their name means."""

from __future__ import annotations

import pytest

from mx.core.revisions import RevisionChoice, placed
from mx.core.types import ModelKey

RANKS = [f"engine=x,version=1,tp={rank}/2,dtype=bf16" for rank in (0, 1)]


def key(revision: str = "main", variant: str = "checkpoint") -> ModelKey:
    return ModelKey("m", revision, variant)


@pytest.mark.parametrize(
    ("bound", "place"),
    [
        ({}, RevisionChoice("main", False)),
        ({key(): b"A"}, RevisionChoice("main", False)),
        ({key(): b"B"}, RevisionChoice("main", True)),
        ({key(): b"B", key("main.2"): b"A"}, RevisionChoice("main.2", False)),
        ({key(): b"A", key("main.2"): b"B"}, RevisionChoice("main.2", True)),
        ({key("main.11"): b"B", key("main.2"): b"A"}, RevisionChoice("main.11", True)),
        ({key("other"): b"B", key("main", "lora"): b"B"}, RevisionChoice("main", False)),
        ({key("other.2"): b"B", key("mainly"): b"B"}, RevisionChoice("main", False)),
    ],
)
def test_weights_update_the_newest_revision_unless_it_has_them(
    bound: dict[ModelKey, bytes], place: RevisionChoice
) -> None:
    assert placed(key(), b"A", bound) == place
    assert placed(key("main.2"), b"A", bound)[1] == place.updates


def test_revisions_of_other_roots_are_updated_by_their_own_numbers() -> None:
    bound = {key("v1"): b"A", key("v1.2"): b"B", key(): b"C", key("main.9"): b"C"}
    assert placed(key("v1"), b"A", bound) == RevisionChoice("v1.2", True)
    assert placed(key("v2"), b"A", bound) == RevisionChoice("v2", False)


def ranks(*numbers: tuple[str, int, bytes]) -> dict[ModelKey, bytes]:
    return {key(revision, RANKS[rank]): identity for revision, rank, identity in numbers}


@pytest.mark.parametrize(
    ("bound", "place"),
    [
        # It was started again with the weights that it had.
        (ranks(("main", 0, b"A"), ("main", 1, b"B")), RevisionChoice("main", False)),
        (ranks(("main", 0, b"C"), ("main", 1, b"B")), RevisionChoice("main", True)),
        # Others have gone on: it goes with them, whatever its weights are, and to where they are.
        (
            ranks(("main", 0, b"A"), ("main", 1, b"B"), ("main.2", 1, b"C")),
            RevisionChoice("main", True),
        ),
        (ranks(("main.2", 0, b"A"), ("main.5", 1, b"C")), RevisionChoice("main.4", True)),
        (ranks(("main.2", 1, b"C")), RevisionChoice("main", True)),
        (ranks(("main", 1, b"C")), RevisionChoice("main", False)),
    ],
)
def test_a_rank_goes_to_the_newest_revision_of_its_bundle(
    bound: dict[ModelKey, bytes], place: RevisionChoice
) -> None:
    assert placed(key(variant=RANKS[0]), b"A", bound) == place


def test_a_rank_of_another_root_goes_to_the_newest_revision_that_is_bound() -> None:
    bound = ranks(("v1", 0, b"A"), ("v1.2", 1, b"B"), ("v1.3", 1, b"C"))
    assert placed(key("v1", RANKS[0]), b"A", bound) == RevisionChoice("v1.2", True)
    assert placed(key("v1", RANKS[0]), b"A", ranks(("v1.2", 1, b"B"))) == RevisionChoice("v1", True)
