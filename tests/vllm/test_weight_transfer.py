"""vLLM's weight transfer backend `mx`: replicas follow a trainer that serves its shards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import mx
from tests.vllm.checkpoints import write_checkpoint, write_mixture
from tests.vllm.hosts import EngineError, Host, host, lending, start
from tests.vllm.policy import policy

pytestmark = [pytest.mark.timeout(900), pytest.mark.integration]

BACKEND = {"backend": "mx"}
TOKENS = [5, 9, 3, 7, 11, 200, 31, 8, 77, 120, 6, 4]
#: How log-probabilities of two programs may differ that compute in bfloat16: a few roundings.
ROUNDING = 4 * 2.0**-8
#: Parameters of vLLM's, and the trainer's that they are made of.
PARAMETERS = {
    "model.embed_tokens.weight": ["model.embed_tokens.weight"],
    "model.layers.0.self_attn.qkv_proj.weight": [
        f"model.layers.0.self_attn.{each}_proj.weight" for each in "qkv"
    ],
    "model.layers.1.mlp.gate_up_proj.weight": [
        f"model.layers.1.mlp.{each}_proj.weight" for each in ("gate", "up")
    ],
    "model.layers.2.mlp.down_proj.weight": ["model.layers.2.mlp.down_proj.weight"],
    "model.norm.weight": ["model.norm.weight"],
    "lm_head.weight": ["lm_head.weight"],
}


@pytest.fixture(scope="module")
def engine(coordinator: str, place: Path) -> Iterator[Host]:
    with host(coordinator, place / "transfer.log") as found:
        yield found


def close_to(one: list[float], other: list[float]) -> bool:
    allowed = ROUNDING * max(map(abs, other))
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) < allowed


def update(engine: Host, revision: str) -> None:
    engine.do("transfer", "start_weight_update")
    engine.do("transfer", "update_weights", {"revision": revision})
    engine.do("transfer", "finish_weight_update", revision)


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        ("plain", "loaded"),
        ("plain", "processed"),
        ("tied", "processed"),
        ("tied", "auto"),
        ("experts", "auto"),
    ],
)
def test_an_update_equals_a_start_from_the_same_weights(
    engine: Host, coordinator: str, place: Path, kind: str, state: str
) -> None:
    if kind == "experts":
        one, two = (write_mixture(place / f"{kind}-{state}-{n}", seed=n) for n in (1, 2))
    else:
        tied = {"tie_word_embeddings": kind == "tied"}
        one, two = (write_checkpoint(place / f"{kind}-{state}-{n}", seed=n, **tied) for n in (1, 2))
    how: dict[str, Any] = {"extra": {"state": state}}
    if state == "auto":
        how = {"load_format": "auto"}
    name = f"{kind}-{state}"
    begin = (
        start
        if state != "auto"
        else lambda host, model, _, **more: host.do("start", str(model), **more)
    )
    wanted = begin(engine, two, f"wanted-{name}", **how)["generated"]
    first = begin(engine, one, f"replica-{name}", weight_transfer_config=BACKEND, **how)
    assert first["generated"] != wanted
    with mx.serve(load_file(one / "model.safetensors"), model=name, coordinator=coordinator) as it:
        engine.do(
            "transfer", "init_weight_transfer_engine", {"model": name, "coordinator": coordinator}
        )
        update(engine, it.model.revision)
        assert engine.do("generate") == first["generated"]
        for _ in range(2):
            it.update(load_file(two / "model.safetensors"))
            update(engine, it.model.revision)
            assert engine.do("generate") == wanted
            assert engine.do("version") == it.model.revision
            it.update(load_file(one / "model.safetensors"))
            update(engine, it.model.revision)
            assert engine.do("generate") == first["generated"]
        if state == "processed":
            done = engine.status()["update"]
            assert done["reloaded"] == 0 and done["in_place"] > 10
            assert lending(engine)["lending"] == "lending"
        engine.do("transfer", "shutdown_weight_transfer_engine")


def test_weights_that_do_not_fit_are_refused_before_anything_is_written(
    engine: Host, coordinator: str, place: Path
) -> None:
    folder = write_checkpoint(place / "refusing", seed=4)
    first = start(engine, folder, "refusing", weight_transfer_config=BACKEND)["generated"]
    tensors = load_file(folder / "model.safetensors")
    zeros = {name: each * 0 for name, each in tensors.items()}
    lacking = {
        n: each for n, each in zeros.items() if n != "model.layers.1.self_attn.k_proj.weight"
    }
    unknown = zeros | {"model.layers.0.mlp.other.weight": zeros["model.norm.weight"]}
    narrow = zeros | {"model.norm.weight": zeros["model.norm.weight"][:64]}
    for number, (wrong, said) in enumerate(
        ((lacking, "qkv_proj"), (unknown, "other"), (narrow, "Error")), 1
    ):
        name = f"wrong-{number}"
        with mx.serve(wrong, model=name, coordinator=coordinator) as source:
            about = {"model": name, "coordinator": coordinator}
            engine.do("transfer", "init_weight_transfer_engine", about)
            with pytest.raises(EngineError, match=said):
                update(engine, source.model.revision)
            assert engine.do("generate") == first, said
    given: dict[str, Any] = {"model": "wrong-1", "coordinator": coordinator, "wait_s": 1.0}
    engine.do("transfer", "init_weight_transfer_engine", given)
    with pytest.raises(EngineError, match="waited 1 s"):
        update(engine, "main.7")
    assert engine.do("generate") == first
    with mx.serve(tensors | zeros, model="right", coordinator=coordinator) as source:
        given = {"model": "right", "coordinator": coordinator}
        engine.do("transfer", "init_weight_transfer_engine", given)
        update(engine, source.model.revision)
    assert engine.do("generate") != first


@pytest.mark.parametrize("state", ["auto", pytest.param("processed", marks=pytest.mark.slow)])
def test_an_install_that_fails_half_way_is_mended_by_the_next(
    engine: Host, coordinator: str, place: Path, state: str
) -> None:
    one, two = (write_checkpoint(place / f"torn-{state}-{n}", seed=n) for n in (8, 9))
    how: dict[str, Any] = {"load_format": "auto"}
    if state == "processed":
        how = {"model_loader_extra_config": {"model": "torn", "state": state}}
    wanted = engine.do("start", str(two), **how)["generated"]
    first = engine.do("start", str(one), weight_transfer_config=BACKEND, **how)["generated"]
    name = f"torn-{state}-policy"
    with mx.serve(load_file(two / "model.safetensors"), model=name, coordinator=coordinator) as it:
        given = {"model": name, "coordinator": coordinator}
        engine.do("transfer", "init_weight_transfer_engine", given)
        engine.do("fail_once")
        with pytest.raises(EngineError, match="no memory for it"):
            update(engine, it.model.revision)
        for _ in range(2):
            update(engine, it.model.revision)
            assert engine.do("generate") == wanted
            if state == "auto":
                engine.do("look_at_values")
                engine.do("transfer", "init_weight_transfer_engine", given)
        it.update(load_file(one / "model.safetensors"))
        update(engine, it.model.revision)
        assert engine.do("generate") == first
        assert ("engine.untraceable" in engine.said()) >= (state == "auto")


@pytest.mark.parametrize(
    ("steps", "joins", "dies"),
    [(4, 2, 3), pytest.param(30, 10, 20, marks=pytest.mark.slow)],
)
def test_replicas_that_come_and_go_follow_a_trainer(
    coordinator: str, place: Path, tmp_path: Path, steps: int, joins: int, dies: int
) -> None:
    name, folder = f"policy-{steps}", write_checkpoint(place / f"policy-{steps}", seed=5)
    replicas: list[Host] = []

    def add(number: int) -> None:
        log = tmp_path / f"{number}.log"
        made = Host(coordinator, log)
        replicas.append(made)
        how: dict[str, Any] = {"extra": {"state": "processed"}, "weight_transfer_config": BACKEND}
        start(made, folder, f"replica-{steps}", **how)
        made.do("transfer", "init_weight_transfer_engine", given)

    def ask(method: str, arguments: list[Any]) -> None:
        if method == "init_weight_transfer_engine":
            given.update(arguments[0])
        for each in replicas:
            each.begin("transfer", method, *arguments)
        for each in replicas:
            each.end()

    given: dict[str, Any] = {}
    try:
        with policy(2, str(folder), ask) as trainer:
            made = trainer.ask(f"rank.begin({name!r}, {coordinator!r})")
            assert made == ["MxTrainerWeightTransferEngine"] * 2
            add(0)
            add(1)
            for step in range(1, steps + 1):
                if step == joins:
                    add(2)
                if step == dies:
                    gone = replicas.pop(0)
                    gone.kill()
                    gone.close()
                losses = trainer.ask(f"rank.step({step})")
                assert losses[0] == losses[1]
                sent = trainer.ask("rank.send()")
                wanted = trainer.ask(f"rank.score({TOKENS})")[0]
                digests = trainer.ask(f"rank.digests(*{list(PARAMETERS.values())})")[0]
                for each in replicas:
                    assert each.do("digests", *PARAMETERS) == digests, step
                    assert close_to(each.do("score", TOKENS), wanted), step
                    assert each.do("version") == sent[0]
            assert len(replicas) == 2
    finally:
        for each in replicas:
            each.close()


@pytest.mark.parametrize("relay", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_ranks_take_their_slices(
    coordinator: str, place: Path, engine: Host, relay: bool
) -> None:
    one, two = (write_checkpoint(place / f"slices-{relay}-{n}", seed=n) for n in (6, 7))
    how: dict[str, Any] = {"load_format": "auto", "tensor_parallel_size": 2}
    wanted = engine.do("start", str(two), **how)["generated"]
    first = engine.do("start", str(one), weight_transfer_config=BACKEND, **how)["generated"]
    name = f"slices-{relay}"
    with mx.serve(load_file(two / "model.safetensors"), model=name, coordinator=coordinator) as it:
        given = {"model": name, "coordinator": coordinator, "relay": relay}
        engine.do("transfer", "init_weight_transfer_engine", given)
        for number in range(3):
            update(engine, it.model.revision)
            assert engine.do("generate") == (first if number == 1 else wanted)
            it.update(load_file((one, two)[number % 2] / "model.safetensors"))
            if number == 1:
                engine.do("call", "mx_peer_status")
    engine.do("stop")
