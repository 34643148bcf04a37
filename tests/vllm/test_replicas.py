"""Real vLLM engines on a CPU: from disk, from a peer's checkpoint, from each other."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mx
from mx import config
from tests.support.daemon import ended, python
from tests.vllm.checkpoints import bare, write_checkpoint
from tests.vllm.hosts import (
    SLOW_REPLICA,
    SLOW_SOURCE,
    EngineError,
    Host,
    host,
    killed_in_mid_load,
    lending,
    same,
    start,
    wait_for,
)

pytestmark = [pytest.mark.timeout(900), pytest.mark.integration]


@pytest.fixture(scope="module")
def hosts(coordinator: str, place: Path) -> Iterator[tuple[Host, Host]]:
    with host(coordinator, place / "a.log") as a, host(coordinator, place / "b.log") as b:
        yield a, b


@pytest.fixture(scope="module")
def reference(hosts: tuple[Host, Host], checkpoint: Path) -> dict[str, Any]:
    """What vLLM's ordinary loader loads from disk, and generates."""
    found: dict[str, Any] = hosts[0].do("start", str(checkpoint), load_format="auto")
    assert len(found["before"]) > 30 and len(found["generated"]) == 64
    return found


def settings_for(coordinator: str) -> config.Settings:
    return config.load({"coordinator": coordinator})


def test_second_replica_without_weights_starts_from_the_first(
    hosts: tuple[Host, Host], checkpoint: Path, coordinator: str, reference: dict[str, Any]
) -> None:
    """The first replica gets the checkpoint from a source; the source ends; the second replica
    gets what the first lends, and has only a configuration on disk."""
    a, b = hosts
    with mx.serve(checkpoint, model="m", coordinator=coordinator) as source:
        one = start(a, bare(checkpoint), "m")
        assert same(one, reference)
        assert lending(a)["loads"] == {"checkpoint": 1}
        assert f"checkpoint={source.identity_hex[:16]}" in a.status()["variant"]
    two = start(b, bare(checkpoint), "m")
    assert same(two, reference)
    # Each linear layer of the three, and the embedding, was processed once its weights were there.
    assert not one["early"] and len(two["early"]) == 3 * 4 + 1
    assert two["early"].count("QKVParallelLinear") == 3
    status = lending(b)
    assert (status["loads"], status["lending"]) == ({"loaded": 1}, "lending")
    assert status["identity"] == a.status()["identity"]


SCALED = "model.layers.1.mlp.down_proj.weight"


def test_comparison_sees_one_scaled_weight(
    hosts: tuple[Host, Host], checkpoint: Path, reference: dict[str, Any]
) -> None:
    scaled = start(hosts[1], bare(checkpoint), "m", scaled=SCALED)
    assert different(scaled, reference) == {SCALED}
    assert scaled["generated"] != reference["generated"]


def different(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """Return which tensors differ before processing."""
    assert one["before"].keys() == other["before"].keys()
    return {name for name, digest in one["before"].items() if other["before"][name] != digest}


def test_other_dtype_is_refused_and_the_ordinary_loader_takes_over(
    hosts: tuple[Host, Host], checkpoint: Path
) -> None:
    a, b = hosts
    assert a.status()["lending"] == "lending"
    start(b, checkpoint, "m", dtype="float32")
    status = b.status()
    assert (status["loads"], status["refused"]) == ({"ordinary": 1}, 1)
    said = [line for line in b.said().splitlines() if "engine.fallback" in line]
    assert len(said) == 1 and "dtype: bf16" in said[0]
    with pytest.raises(EngineError, match="^ConfigError: .*dtype"):
        start(b, checkpoint, "m", dtype="float16", extra={"fallback": False})


def test_starts_by_name_alone(hosts: tuple[Host, Host], reference: dict[str, Any]) -> None:
    """Configuration and weights come from the first replica: there is nothing on disk."""
    two = hosts[1].do("start", "m")
    assert same(two, reference)
    assert hosts[1].status()["loads"] == {"loaded": 1}


def test_source_killed_in_mid_load(
    hosts: tuple[Host, Host], checkpoint: Path, coordinator: str, reference: dict[str, Any]
) -> None:
    """With a checkpoint on disk the ordinary loader takes over; else the error is typed."""
    b = hosts[1]
    for folder, outcome in ((checkpoint, "ordinary"), (bare(checkpoint), "error")):
        name = f"slow-{outcome}"  # a killed source stays listed for a while, with its reader
        listed = functools.partial(mx.list_sources, name, coordinator=coordinator)
        with ended(python(SLOW_SOURCE, str(checkpoint), name, coordinator)) as source:
            wait_for(listed)
            extra = {"model": name, "transport": "tcp", "fallback": outcome == "ordinary"}
            b.begin("start", str(folder), model_loader_extra_config=extra)
            wait_for(lambda listed=listed: any(each.readers for each in listed()))
            source.kill()
            if outcome == "ordinary":
                assert same(b.end(), reference)
                assert b.status()["loads"] == {"ordinary": 1}
                assert "vLLM's ordinary loader takes over" in b.said()
            else:
                with pytest.raises(EngineError, match="IncompleteError"):
                    b.end()


def test_weights_of_another_shape(
    hosts: tuple[Host, Host], checkpoint: Path, coordinator: str, place: Path
) -> None:
    """The name belongs to another model: its own checkpoint is loaded."""
    other = write_checkpoint(place / "other", seed=2, intermediate_size=192)
    with mx.serve(checkpoint, model="shapes", coordinator=coordinator):
        start(hosts[1], other, "shapes")
    assert hosts[1].status()["loads"] == {"ordinary": 1}
    assert "intermediate_size: 256 there, 192 here" in hosts[1].said()


def test_processed_state_is_lent_in_place_and_revoked(
    hosts: tuple[Host, Host], checkpoint: Path, coordinator: str, place: Path
) -> None:
    """What vLLM computes with is lent; sleep and updates withdraw it; an update is a revision."""
    a, b = hosts
    extra = {"state": "processed"}
    one = start(a, checkpoint, "p", extra=extra)
    status = lending(a)
    assert status["lending"] == "lending" and "state=processed" in status["variant"]
    two = start(b, bare(checkpoint), "p", extra=extra)
    assert (two["tensors"], two["generated"]) == (one["tensors"], one["generated"])
    assert lending(b)["loads"] == {"processed": 1}
    b.do("stop")
    wait_for(lambda: len(mx.list_sources("p", coordinator=coordinator)) == 1)

    a.do("call", "sleep", 1)
    assert a.status()["lending"] == "changing"
    assert not mx.list_sources("p", coordinator=coordinator)
    a.do("call", "wake_up")
    assert (a.status()["lending"], a.status()["revision"]) == ("lending", "main")

    a.do("call", "sleep", 2)
    a.do("call", "wake_up")  # what a deep sleep discarded is lent again once it is written
    assert a.status()["lending"] == "changing"
    newer = write_checkpoint(place / "newer", seed=3)
    a.do("call", "reload_weights", None, str(newer))
    assert (a.status()["lending"], a.status()["revision"]) == ("lending", "main.2")

    two = start(b, bare(checkpoint), "p", extra=extra)
    assert two["tensors"] == a.do("look")["tensors"] != one["tensors"]
    assert two["generated"] == a.do("generate") != one["generated"]


def test_source_of_the_processed_state_killed_in_mid_load(
    hosts: tuple[Host, Host], checkpoint: Path, coordinator: str
) -> None:
    """The model is the ordinary loader's, to the last logprob: nothing is left on meta."""
    a, b = hosts
    extra = {"state": "processed"}
    start(a, checkpoint, "k", extra=extra)
    variant = lending(a)["variant"]
    reference = start(b, checkpoint, "of-none", extra={**extra, "lend": False})
    assert b.status()["loads"] == {"ordinary": 1}
    with ended(python(SLOW_REPLICA, "k", variant, coordinator)) as source:
        after = killed_in_mid_load(b, source, checkpoint, "k-slow", coordinator, extra=extra)
    assert b.status()["loads"] == {"ordinary": 1}
    assert same(after, reference)


def test_failed_update_stays_withdrawn(hosts: tuple[Host, Host], place: Path) -> None:
    a = hosts[0]
    with pytest.raises(EngineError):
        a.do("call", "reload_weights", None, str(place / "nowhere"))
    status = a.status()
    # vLLM lets go of its layers before it opens the first file.
    assert status["lending"] == "withdrawn" and status["why"]


def test_options_are_checked(hosts: tuple[Host, Host], checkpoint: Path) -> None:
    with pytest.raises(EngineError, match="did you mean coordinator"):
        start(hosts[1], checkpoint, "m", extra={"cordinator": "127.0.0.1:1"})


def test_tied_embeddings(hosts: tuple[Host, Host], coordinator: str, place: Path) -> None:
    tied = write_checkpoint(place / "tied", seed=4, tie_word_embeddings=True)
    a, b = hosts
    reference = a.do("start", str(tied), load_format="auto")
    with mx.serve(tied, model="tied", coordinator=coordinator):
        assert same(start(a, bare(tied), "tied"), reference)
    assert same(start(b, bare(tied), "tied"), reference)
    assert b.status()["loads"] == {"loaded": 1}


def test_ranks_each_pull_their_part_and_lend_it(hosts: tuple[Host, Host], checkpoint: Path) -> None:
    a, b = hosts
    one = start(a, checkpoint, "tp", tensor_parallel_size=2)
    first = a.do("call", "mx_peer_status")
    assert [each["lending"] for each in first] == ["lending"] * 2
    assert first[0]["identity"] != first[1]["identity"]
    two = b.do("start", "tp", tensor_parallel_size=2)  # by name alone
    assert two["generated"] == one["generated"]
    second = b.do("call", "mx_peer_status")
    for there, here, rank in zip(first, second, ("tp=0/2", "tp=1/2"), strict=True):
        assert (here["loads"], here["lending"]) == ({"loaded": 1}, "lending")
        assert here["identity"] == there["identity"]
        assert rank in here["variant"]

    start(b, checkpoint, "tp")
    assert b.status()["loads"] == {"ordinary": 1}
    assert "tp: 0/2 listed, 0/1 here" in b.said()


def test_comparison_sees_what_a_source_has_scaled(
    hosts: tuple[Host, Host], checkpoint: Path, coordinator: str, reference: dict[str, Any]
) -> None:
    """The same weight is multiplied at the source: of the checkpoint's, and of what the first
    replica makes of it and lends. What arrives is compared, not what vLLM makes of it."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(checkpoint / "model.safetensors")
    tensors[SCALED] = tensors[SCALED] * 1.5
    wrong = bare(checkpoint).with_name("scaled")
    wrong.mkdir()
    (wrong / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    save_file(tensors, str(wrong / "model.safetensors"), metadata={"format": "pt"})
    a, b = hosts
    with mx.serve(wrong, model="scaled", coordinator=coordinator):
        one = start(a, bare(checkpoint), "scaled")
        assert lending(a)["loads"] == {"checkpoint": 1}
    two = start(b, bare(checkpoint), "scaled")
    assert lending(b)["loads"] == {"loaded": 1}
    for found in (one, two):
        assert not same(found, reference)
        assert different(found, reference) == {SCALED}
        assert found["generated"] != reference["generated"]
    assert same(one, two)
