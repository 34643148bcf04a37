"""What a replica starts from, given what is listed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.core.answers import BundleStatus
from mx.core.variant import ProcessingKey
from mx.engines.replica import choice
from mx.engines.replica.choice import Choice, with_checkpoint
from mx.engines.replica.configuration import check_configuration
from mx.engines.replica.options import LoaderOptions
from mx.errors import ConfigError

IDENTITY = "ab" * 32
KEY = ProcessingKey(
    engine="vllm", version="0.32.0", tp=(1, 2), dtype="bf16", state="loaded", config="00ff00ff"
)


def listed(
    variant: str, *, revision: str = "main", missing: int = 0, named: bool = True
) -> BundleStatus:
    ranks = 2 if "tp=" in variant else 1
    return BundleStatus("m", revision, variant, ranks, ("x",) * missing, missing, named)


def replicas(checkpoint: str = "", **how: object) -> BundleStatus:
    return listed(str(with_checkpoint(KEY, checkpoint).bundle), **how)  # type: ignore[arg-type]


def owned_of(bundles: Sequence[BundleStatus]) -> dict[tuple[str, str], str]:
    """What the name's owner serves, if all of it is the owner's."""
    return {(each.revision, variant): IDENTITY for each in bundles for variant in each.variants}


def choose(
    keys: dict[str, ProcessingKey],
    bundles: Sequence[BundleStatus],
    identities: dict[str, str],
    **how: Any,
) -> Choice:
    """Choose, where everything is the owner's."""
    found = choice.choose(keys, bundles, identities, owned_of(bundles), **how)
    if found.state in keys:
        assert set(found.identities.values()) == {IDENTITY}
    return replace(found, identities={})


def test_what_the_names_owner_does_not_vouch_for_is_not_taken() -> None:
    bundles = [listed("checkpoint"), replicas(IDENTITY[:16])]
    owned = owned_of(bundles)
    for missing in bundles[1].variants:  # one rank of it suffices
        some = {key: identity for key, identity in owned.items() if key[1] != missing}
        found = choice.choose({"loaded": KEY}, bundles, {"main": IDENTITY}, some)
        assert (found.state, found.refused) == ("checkpoint", True)
        assert "does not hold the name key of m's owner" in found.why
    found = choice.choose({"loaded": KEY}, bundles, {"main": IDENTITY}, owned)
    assert found.identities == dict.fromkeys(bundles[1].variants, IDENTITY)
    # Where there is no checkpoint either, the engine's own loader takes over.
    found = choice.choose({"loaded": KEY}, bundles[1:], {}, {})
    assert (found.state, found.refused) == ("", True)


def test_replicas_come_before_the_checkpoint() -> None:
    bundles = [listed("checkpoint"), replicas(IDENTITY[:16])]
    found = choose({"loaded": KEY}, bundles, {"main": IDENTITY})
    assert found == Choice("loaded", "main", IDENTITY[:16])


def test_best_state_first() -> None:
    processed = ProcessingKey.parse(str(KEY).replace("state=loaded", "state=processed"))
    bundles = [replicas(), listed(str(processed.bundle))]
    assert choose({"processed": processed, "loaded": KEY}, bundles, {}).state == "processed"
    assert choose({"loaded": KEY, "processed": processed}, bundles, {}).state == "loaded"


def test_replicas_of_an_older_checkpoint_are_refused() -> None:
    bundles = [listed("checkpoint"), replicas("cd" * 8)]
    found = choose({"loaded": KEY}, bundles, {"main": IDENTITY})
    assert (found.state, found.refused) == ("checkpoint", True)
    assert "made of checkpoint cdcdcdcdcdcdcdcd, not of abababababababab" in found.why


def test_replicas_of_an_unknown_checkpoint_are_taken_only_where_none_is_listed() -> None:
    assert choose({"loaded": KEY}, [replicas()], {}).state == "loaded"
    found = choose({"loaded": KEY}, [replicas(), listed("checkpoint")], {"main": IDENTITY})
    assert (found.state, found.refused) == ("checkpoint", True)


def test_several_checkpoints_need_a_word() -> None:
    bundles = [replicas("ab" * 8), replicas("cd" * 8)]
    found = choose({"loaded": KEY}, bundles, {})
    assert found.state == "" and found.refused and "`checkpoint` names none" in found.why
    assert choose({"loaded": KEY}, bundles, {}, checkpoint="cdcd").checkpoint == "cd" * 8


def test_missing_ranks() -> None:
    found = choose({"loaded": KEY}, [replicas(missing=1)], {})
    assert found.state == "" and "1 of 2 ranks have no source" in found.why


def test_a_replica_without_source_is_no_other_one() -> None:
    """Of one rank, whose own name is the bundle's."""
    text = str(KEY).replace("tp=1/2", "tp=0/1")
    alone = ProcessingKey.parse(text)
    found = choose({"loaded": alone}, [listed(text, missing=1)], {})
    assert "have no source" in found.why and "another" not in found.why


def test_newest_revision_or_the_named_one() -> None:
    bundles = [replicas(named=False), replicas(revision="main.2")]
    assert choose({"loaded": KEY}, bundles, {}).revision == "main.2"
    assert choose({"loaded": KEY}, bundles, {}, revision="main").revision == "main"


@pytest.mark.parametrize("revision", ["main.2", "main.10", "abc.3"])
def test_an_update_is_made_of_no_checkpoint(revision: str) -> None:
    """Its key is that of the weights that it has replaced."""
    updated = replicas(IDENTITY[:16], revision=revision)
    for checkpoint in (IDENTITY, IDENTITY[:16], "abab"):
        bundles = [updated, listed("checkpoint")]
        found = choose({"loaded": KEY}, bundles, {"main": IDENTITY}, checkpoint=checkpoint)
        assert (found.state, found.refused) == ("checkpoint", True)
        assert "may be an update" in found.why
        found = choose({"loaded": KEY}, bundles[:1], {}, checkpoint=checkpoint)
        assert (found.state, found.refused) == ("", True)
        kept = [updated, replicas(IDENTITY[:16])]
        assert choose({"loaded": KEY}, kept, {}, checkpoint=checkpoint).revision == "main"
    # Where the user asks for no checkpoint, or for that revision, it is what he means.
    assert choose({"loaded": KEY}, [updated], {}).revision == revision
    found = choose({"loaded": KEY}, [updated], {}, revision=revision, checkpoint=IDENTITY)
    assert found.revision == revision


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("dtype", "fp16", "dtype: bf16 listed, fp16 here"),
        ("version", "0.33.0", "version: 0.32.0 listed, 0.33.0 here"),
        ("tp", "0/4", "tp: 0/2 listed, 0/4 here"),
        ("quantization", "awq", "quantization: none listed, awq here"),
        ("config", "ffffffff", "config: 00ff00ff listed, ffffffff here"),
    ],
)
def test_another_key_is_refused_by_field(field: str, value: str, said: str) -> None:
    other = ProcessingKey(**{**KEY.fields, field: value})
    found = choose({"loaded": other}, [replicas()], {})
    assert found == Choice(why=found.why, refused=True)
    assert said in found.why and found.why.count(" listed, ") == 1


def test_other_engines_are_not_mentioned() -> None:
    other = ProcessingKey(engine="sglang", version="0.5.23", tp=(0, 2), dtype="bf16")
    found = choose({"loaded": KEY}, [listed(str(other.bundle))], {})
    assert found == Choice(why="nothing that this engine can take is listed")
    assert choose({"loaded": KEY}, [], {}) == Choice(why="no source is listed")


@given(st.builds(Choice, st.text(), st.text(), st.text(), st.text(), st.booleans()))
def test_choices_travel_as_text(found: Choice) -> None:
    assert Choice.decode(found.encode()) == found


def test_configurations_are_compared_where_shapes_depend_on_them() -> None:
    here = {"hidden_size": 64, "eos_token_id": 2, "text_config": {"num_layers": 2}, "rope": 1.0}
    check_configuration(here, b'{"hidden_size": 64, "eos_token_id": 3, "rope": 2.0, "new": 1}')
    with pytest.raises(ConfigError, match="text_config.num_layers: 3 there, 2 here"):
        check_configuration(here, b'{"text_config": {"num_layers": 3}}')
    with pytest.raises(ConfigError, match="model_type: b there, a here"):
        check_configuration({"model_type": "a"}, b'{"model_type": "b"}')
    for malformed in (b"{", b"[]", b"[" * 100_000, b"\xff"):
        with pytest.raises(ConfigError, match="config.json is malformed"):
            check_configuration(here, malformed)


def test_options() -> None:
    options = LoaderOptions.read({"model": "m", "lend": False, "wait_s": 3, "insecure": True})
    assert (options.model, options.lend, options.settings.wait_s) == ("m", False, 3.0)
    assert options.settings.insecure
    for wrong, said in (
        ({"stat": "loaded"}, "did you mean state"),
        ({"state": "cooked"}, "one of auto, processed, loaded, checkpoint"),
        ({"lend": "yes"}, "must be true or false"),
        ({"wait_s": "soon"}, "wait_s = 'soon'"),
    ):
        with pytest.raises(ConfigError, match=said):
            LoaderOptions.read(wrong)
