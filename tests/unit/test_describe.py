"""Which tensors have bytes of their own, by where they are: of any library, without a copy."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mx.memory.torch_source  # noqa: F401  # torch's tensors are understood once it is imported
from mx.errors import ConfigError
from mx.memory.arrays import arrays_of
from mx.memory.describe import DescribedTensors, describe_arrays


def described(**tensors: Any) -> DescribedTensors:
    return describe_arrays(arrays_of(tensors))


def owners(found: DescribedTensors) -> dict[str, tuple[str, int]]:
    return {alias.name: (alias.target, alias.offset_bytes) for alias in found.aliases}


def test_permuted_tensors_are_described_as_they_lie() -> None:
    weight, image = torch.arange(12.0).view(3, 4), torch.rand(2, 3, 4, 5)
    image = image.contiguous(memory_format=torch.channels_last)
    found = described(w=weight.t(), c=image, n=np.asfortranarray(np.zeros((2, 3))))
    strides = {spec.name: (spec.shape, spec.stride) for spec in found.specs}
    assert strides == {
        "w": ((4, 3), (1, 4)),
        "c": ((2, 3, 4, 5), (60, 1, 15, 3)),
        "n": ((2, 3), (1, 2)),
    }
    assert bytes(found.views()["w"]) == weight.numpy().tobytes()
    assert not found.aliases


def test_views_of_a_dense_tensor_are_its_aliases() -> None:
    whole = torch.arange(24, dtype=torch.int16).view(4, 6)
    found = described(
        whole=whole,
        zz_tied=whole.view(6, 4),
        third=whole[1:3],
        gappy=whole[:, 1:3],
        turned=whole[2:].t(),
        wide=whole[0].expand(5, 6),
        empty=whole[4:],
    )
    assert {spec.name for spec in found.specs} == {"whole", "empty"}
    assert owners(found) == {
        "zz_tied": ("whole", 0),
        "third": ("whole", 12),
        "gappy": ("whole", 2),
        "turned": ("whole", 24),
        "wide": ("whole", 0),
    }
    strides = {alias.name: alias.stride for alias in found.aliases}
    assert strides["gappy"] == (6, 1) and strides["turned"] == (1, 6) and strides["wide"] == (0, 1)
    assert found.views().keys() == {"whole", "empty"}


def test_neighbours_in_one_allocation_are_tensors_of_their_own() -> None:
    pool = torch.arange(3000, dtype=torch.uint8)
    tensors = {f"w{i}": pool[1000 * i : 1000 * (i + 1)] for i in range(3)}
    found = described(**tensors, other=pool[500:1500].view(torch.int32))
    assert {spec.name for spec in found.specs} == {"w0", "w1", "w2", "other"}
    assert not found.aliases
    assert bytes(found.views()["w1"]) == pool[1000:2000].numpy().tobytes()


def test_dense_tensors_that_overlap_in_part_are_each_their_own() -> None:
    pool = torch.arange(20, dtype=torch.int32)
    found = described(a=pool[:12], b=pool[8:20])
    assert {spec.name for spec in found.specs} == {"a", "b"}
    views = found.views()
    assert (len(views["a"]), len(views["b"])) == (48, 48)


def test_gaps_are_refused_and_every_name_is_said() -> None:
    pool = torch.zeros(40)
    wrong = {"rows": pool.view(4, 10)[:, :5], "step": pool[::2], "spread": pool[:1].expand(7)}
    with pytest.raises(ConfigError, match="gaps or overlaps") as caught:
        described(**wrong, fine=torch.zeros(3))
    assert "fine" not in caught.value.message
    assert all(name in caught.value.message for name in wrong)
    assert "copy=True" in caught.value.hint
    covered = described(**wrong, whole=pool)  # which fills the gaps
    assert {alias.name for alias in covered.aliases} == wrong.keys()


def test_an_expanded_view_of_nothing_else_may_be_copied() -> None:
    arrays = arrays_of({"spread": torch.full((1,), 7.0).expand(5)})
    copies = []

    def dense(name: str) -> Any:
        copies.append(torch.full((5,), 7.0))
        return arrays_of({name: copies[-1]})[name]

    found = describe_arrays(arrays, dense)
    assert bytes(found.views()["spread"]) == copies[0].numpy().tobytes()


@given(st.integers(0, 1 << 30), st.integers(1, 12))
def test_the_same_sharing_is_described_alike_in_any_order(seed: int, count: int) -> None:
    rng = random.Random(seed)
    pool = torch.arange(64, dtype=torch.int32)
    tensors = {}
    for number in range(count):
        begin = rng.randrange(60)
        end = rng.randrange(begin, 64)
        tensors[f"t{number}"] = pool[begin:end]
    tensors["square"] = pool.view(8, 8).t()
    names = list(tensors)
    rng.shuffle(names)
    one, other = described(**tensors), described(**{name: tensors[name] for name in names})
    assert one.specs == other.specs and one.aliases == other.aliases
    held = {name: bytes(view) for name, view in one.views().items()}
    for alias in one.aliases:
        nbytes = 4 * tensors[alias.name].numel()
        inside = held[alias.target][alias.offset_bytes : alias.offset_bytes + nbytes]
        if alias.name != "square":
            assert inside == tensors[alias.name].numpy().tobytes()


def test_empty_tensors_at_one_place_are_no_aliases() -> None:
    pool = torch.zeros(4)
    found = described(a=pool[4:], b=pool[4:], c=pool[:0])
    assert {spec.name for spec in found.specs} == {"a", "b", "c"} and not found.aliases
