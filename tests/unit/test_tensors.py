"""Tensors out of an arena, and into a source."""

from __future__ import annotations

import pytest
import torch

from mx.core.layout import TensorSpec, contiguous_strides, plan_layout
from mx.core.types import Alias
from mx.errors import ConfigError, ManifestError
from mx.memory.tensors import state_dict
from tests.support.described import describe


def packed_alias(shape: tuple[int, ...], offset: int, stride: tuple[int, ...]) -> Alias:
    return Alias("tied", "packed", "F4", shape, offset, stride)


def test_an_alias_of_a_packed_dtype_is_a_slice_of_its_bytes() -> None:
    specs = [TensorSpec("packed", "F4", (4, 16))]
    alias = packed_alias((2, 8), 5, contiguous_strides((2, 8)))
    layout = plan_layout(specs, [alias])
    arena = memoryview(bytearray(range(256)) + bytearray(layout.arena_nbytes - 256))
    tensors = state_dict(arena, layout)
    assert tensors["packed"].shape == (4, 8)  # pairs
    assert tensors["packed"].view(torch.uint8).flatten().tolist() == list(range(32))
    assert (tensors["tied"].dtype, tensors["tied"].shape) == (torch.float4_e2m1fn_x2, (2, 4))
    assert tensors["tied"].view(torch.uint8).flatten().tolist() == list(range(5, 13))
    assert tensors["tied"].untyped_storage().data_ptr() == tensors["packed"].data_ptr()


@pytest.mark.parametrize(("dtype", "shape"), [("F6_E2M3", (4, 4)), ("F4", (2, 3))])
def test_what_torch_has_no_form_for_comes_as_bytes(dtype: str, shape: tuple[int, ...]) -> None:
    layout = plan_layout([TensorSpec("packed", dtype, shape)])
    arena = memoryview(bytearray(range(256)) + bytearray(layout.arena_nbytes - 256))
    found = state_dict(arena, layout)["packed"]
    assert found.dtype == torch.uint8
    assert found.tolist() == list(range(layout.tensors[0].nbytes))


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((2, 8), (16, 1)), ((8,), (2,)), ((2, 8), (1 << 60, 1))],
)
def test_packed_elements_are_not_taken_apart(
    shape: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    with pytest.raises(ManifestError, match="tied"):
        plan_layout([TensorSpec("packed", "F4", (4, 16))], [packed_alias(shape, 0, stride)])


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def described(**tensors: torch.Tensor) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return what is served of them: bytes by name, and the aliases."""
    specs, aliases, views = describe(tensors)
    assert {spec.name for spec in specs} == set(views)
    return {name: bytes(view) for name, view in views.items()}, {a.name: a.target for a in aliases}


def test_conjugated_and_negated_views_are_served_as_their_values() -> None:
    base = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    conjugate, negated = base.conj(), base.conj().imag
    assert conjugate.is_conj() and negated.is_neg()
    found, aliases = described(base=base, conjugate=conjugate, negated=negated)
    assert aliases == {}
    assert found["base"] == bytes_of(torch.tensor([1 + 2j, 3 - 4j]))
    assert found["conjugate"] == bytes_of(torch.tensor([1 - 2j, 3 + 4j]))
    assert found["negated"] == bytes_of(torch.tensor([-2.0, 4.0]))


def test_overlapping_expanded_and_strided_tensors_keep_their_values() -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(6, 4)
    tensors = {
        "above": base[0:4],
        "below": base[2:6],  # neither lies within the other
        "column": base[0:4, 1],
        "row": base[1].expand(5, 4),
        "alone": torch.tensor([7.0]).expand(3),
        "turned": torch.arange(6, dtype=torch.int16).reshape(2, 3).t(),
        "scalar": torch.tensor(3.0, requires_grad=True),
        "none": torch.empty(0, 4),
    }
    specs, aliases, views = describe(tensors)
    assert {alias.name: alias.target for alias in aliases} == {"column": "above", "row": "above"}
    layout = plan_layout(specs, aliases)
    arena = memoryview(bytearray(layout.arena_nbytes))
    for tensor in layout.tensors:
        start = layout.layers[tensor.layer].arena_offset + tensor.offset
        arena[start : start + tensor.nbytes] = views[tensor.name]
    found = state_dict(arena, layout)
    assert found.keys() == tensors.keys()
    for name, expected in tensors.items():
        assert torch.equal(found[name], expected), name


class Elsewhere(torch.Tensor):
    """A subclass that keeps its values in another tensor, as quantised ones do."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Elsewhere:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        assert isinstance(made, Elsewhere)
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        raise NotImplementedError(func)


@pytest.mark.parametrize(
    "tensor",
    [
        Elsewhere(torch.ones(2)),
        torch.nn.UninitializedParameter(),
        torch.empty(2, device="meta"),
        torch.eye(2).to_sparse(),
    ],
    ids=["wrapper", "lazy", "meta", "sparse"],
)
def test_what_is_not_plain_memory_is_refused_by_name(tensor: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match=r"layer\.weight"):
        describe({"layer.weight": tensor})
