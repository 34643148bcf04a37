"""Tensors that share memory in several dtypes: filled as they can be lent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mx import api
from mx.core.transfer import TransferMachine
from mx.errors import ConfigError, MxError
from tests.support.outcomes import error_of

pytestmark = pytest.mark.integration

Weights = dict[str, torch.Tensor]
LONG = 600_000  # several blocks


def pool(seed: int | None) -> torch.Tensor:
    if seed is None:
        return torch.zeros(LONG)
    return torch.rand(LONG, generator=torch.Generator().manual_seed(seed))


def whole(memory: torch.Tensor) -> Weights:
    return {"model.layers.0.w": memory, "model.layers.0.bits": memory.view(torch.uint8)}


def in_other_layers(memory: torch.Tensor) -> Weights:
    return {
        "model.layers.0.w": memory,
        "model.layers.1.bits": memory.view(torch.uint8),
        "model.layers.2.ints": memory.view(torch.int32),
        "model.layers.3.own": memory.view(torch.int32)[:0].clone(),
    }


def within(memory: torch.Tensor) -> Weights:
    return {
        "model.layers.0.w": memory,
        "model.layers.0.part": memory.view(torch.uint8)[1001 : LONG + 7],
        "model.layers.1.view": memory[17:170],
    }


def partly(memory: torch.Tensor) -> Weights:
    return {
        "model.layers.0.begin": memory[: LONG // 2 + 5000],
        "model.layers.1.end": memory[LONG // 2 :].view(torch.int32),
        "model.layers.2.also": memory[LONG // 2 - 7 :],
    }


def wait(pull: api.Pull) -> None:
    try:
        pull.wait(60)
    except MxError as error:
        raise AssertionError(f"not filled: {error}") from error


MAKERS = [whole, in_other_layers, within, partly]


def same(left: Weights, right: Weights) -> bool:
    return all(torch.equal(left[n].view(torch.uint8), right[n].view(torch.uint8)) for n in right)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("hold", [False, True], ids=["", "hold"])
def test_what_can_be_lent_can_be_filled(
    coordinator: str, make: Callable[[torch.Tensor], Weights], hold: bool
) -> None:
    lent, own = make(pool(1)), make(pool(None))
    with (
        api.serve(lent, model="m", coordinator=coordinator, copy=False),
        api.pull("m", coordinator=coordinator, into=own, hold=hold) as pull,
    ):
        wait(pull)
        for layer in pull.layers():
            assert same(own, {name: lent[name] for name in layer.tensors()})
        assert same(own, lent)
        if hold:
            third = make(pool(None))
            with api.pull("m", peer=pull.hold().endpoint, into=third) as other:
                other.wait(60)
            assert same(third, lent)


@pytest.mark.parametrize("make", MAKERS)
def test_a_change_is_filled_too(coordinator: str, make: Callable[[torch.Tensor], Weights]) -> None:
    memory = pool(1)
    lent, own = make(memory), make(pool(None))
    with api.serve(lent, model="m", coordinator=coordinator, copy=False) as source:
        for seed in (2, 3):
            with source.changing(["model.layers.0.w"] if "model.layers.0.w" in lent else None):
                memory.copy_(pool(seed))
            with api.pull("m", coordinator=coordinator, into=own) as pull:
                wait(pull)
            assert same(own, lent)


@pytest.mark.parametrize("make", MAKERS)
def test_other_bytes_where_memory_is_shared_are_an_error(
    coordinator: str, make: Callable[[torch.Tensor], Weights]
) -> None:
    """The model's tensors have memory of their own, and differ."""
    memory = pool(1)
    apart = {name: tensor.clone() for name, tensor in make(memory).items()}
    if make is within:
        apart["model.layers.1.view"] = apart["model.layers.0.w"][17:170]
    changed = {"whole": "bits", "in_other_layers": "bits", "within": "part", "partly": "end"}
    name = next(n for n in apart if n.endswith(changed[make.__name__]))
    apart[name].view(torch.uint8)[5] ^= 1
    own = make(pool(None))
    with api.serve(apart, model="m", coordinator=coordinator):
        ready: list[str] = []
        with api.pull("m", coordinator=coordinator, into=own) as pull:
            pull.on_layer(lambda event: ready.extend(event.tensors()))
            error = error_of(pull, 60)
        assert isinstance(error, ConfigError) and "different bytes" in str(error)
        assert name not in ready
        separate = {n: torch.zeros_like(tensor) for n, tensor in apart.items()}
        if make is within:
            separate["model.layers.1.view"] = separate["model.layers.0.w"][17:170]
        with api.pull("m", coordinator=coordinator, into=separate) as pull:
            pull.wait(60)
        assert same(separate, apart)


@pytest.mark.parametrize("overlaps", [True, False])
def test_parts_that_share_memory_are_read_in_turn(
    coordinator: str, monkeypatch: pytest.MonkeyPatch, overlaps: bool
) -> None:
    """Else one may be overwritten by another while it is hashed."""
    depths = []
    add = TransferMachine.add_connection

    def watched(machine: TransferMachine, number: int, depth: int, *more: Any, **named: Any) -> Any:
        depths.append(depth)
        return add(machine, number, depth, *more, **named)

    monkeypatch.setattr(TransferMachine, "add_connection", watched)
    lent, own = partly(pool(1)), partly(pool(None))
    if not overlaps:
        own = {name: tensor.clone() for name, tensor in own.items()}
    with (
        api.serve(lent, model="m", coordinator=coordinator, copy=False),
        api.pull("m", coordinator=coordinator, into=own) as pull,
    ):
        wait(pull)
        assert same(own, lent)
    assert depths and all((depth == 1) == overlaps for depth in depths)


def test_from_a_checkpoint_too(coordinator: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    for seed, ends in ((1, "model.layers.0.w"), (None, "")):
        apart = {name: tensor.clone() for name, tensor in whole(pool(1)).items()}
        if not ends:
            apart["model.layers.0.bits"][5] ^= 1
        path = tmp_path / f"{seed}.safetensors"
        save_file(apart, path)
        own = whole(pool(None))
        with api.pull("m", coordinator=coordinator, into=own, path=path) as pull:
            if ends:
                wait(pull)
                assert same(own, apart)
            else:
                with pytest.raises(MxError, match="different bytes"):
                    pull.wait(60)


def test_a_view_that_is_none_in_the_model_is_still_refused_with_all_that_differs(
    coordinator: str,
) -> None:
    lent = {**whole(pool(1)), "a": torch.rand(4), "b": torch.rand(4), "c": torch.rand(3)}
    own = {**whole(pool(None)), "a": torch.zeros(4), "c": torch.zeros(2)}
    own["b"] = own["a"]
    with (
        api.serve(lent, model="m", coordinator=coordinator, copy=False),
        api.pull("m", coordinator=coordinator, into=own) as pull,
    ):
        text = str(error_of(pull, 60))
    assert "b shares memory with a here, and not in the model" in text and "c is F32 [2]" in text
    assert "nothing was written" in text and "bits" not in text
    assert not own["a"].any() and not own["model.layers.0.w"].any()
