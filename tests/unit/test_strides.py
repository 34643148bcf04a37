"""Tensors with their dimensions in another order: which strides a layout has, and which not."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import prod
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.roots import root_of
from mx.core.canonical import join_binary, read_json, split_binary, write_json
from mx.core.digest import document_digest
from mx.core.layout import (
    MAX_ARENA_BYTES,
    TensorSpec,
    contiguous_strides,
    kind_nbytes,
    permuted_stride,
    plan_layout,
)
from mx.core.manifest import decode, encode
from mx.core.types import Alias, Manifest, ManifestRef, Packaging
from mx.errors import ManifestError


def stored(shape: tuple[int, ...], order: list[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor whose dimensions are stored in this order."""
    strides, step = [0] * len(shape), 1
    for dimension in reversed(order):
        strides[dimension] = step
        step *= max(shape[dimension], 1)
    return tuple(strides)


def places(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
    """Return where each element is, in row-major order."""
    return [
        sum(i * s for i, s in zip(index, stride, strict=True))
        for index in itertools.product(*map(range, shape))
    ]


@st.composite
def forms(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A shape, and strides that are often those of a dense tensor."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=5)))
    stride = list(stored(shape, draw(st.permutations(range(len(shape))))))
    for dimension in draw(st.sets(st.integers(0, 4), max_size=2)):
        if dimension < len(shape):
            stride[dimension] = draw(st.integers(-1, 60))
    return shape, tuple(stride)


@given(forms())
@example(((3, 1, 2), (2, 99, 1)))
@example(((3, 1, 2), (1, 0, 3)))
@example(((2, 2), (1, 1)))
@example(((2, 2), (-1, 2)))
def test_permuted_strides_are_those_of_tensors_without_gaps_or_overlaps(
    form: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    shape, stride = form
    found = permuted_stride(shape, stride)
    where = places(shape, stride)
    if sorted(where) != list(range(prod(shape))):
        assert found is None
        return
    assert found is not None
    if where == list(range(prod(shape))):
        assert found == ()
    else:
        assert places(shape, found) == where
        assert all(step == 1 for count, step in zip(shape, found, strict=True) if count == 1)
        assert permuted_stride(shape, found) == found
    assert kind_nbytes(("BF16", shape, found)) == 2 * prod(shape)


WRONG = [
    ("F32", (2, 3), (1,)),
    ("F32", (2, 3), (1, 2, 6)),
    ("F32", (), (1,)),
    ("F32", (2, 3), (3, 1)),  # row-major order is spelt ()
    ("F32", (0, 3), (1, 1)),
    ("F32", (2, 1, 3), (1, 6, 2)),  # the stride of a single element is 1
    ("F32", (2, 3), (1, 3)),
    ("F32", (2, 3), (1, 1)),
    ("F32", (2, 3), (0, 1)),
    ("F32", (2, 3), (-1, 2)),
    ("F32", (2, 3), (1, 1 << 70)),
    ("F32", (1 << 30, 1 << 30), (1, 1 << 30)),
    ("F32", (2,) * 65, (1,) * 65),
    ("F4", (4, 4), (1, 4)),
    ("F6_E2M3", (4, 2), (1, 4)),
]


@pytest.mark.parametrize(("dtype", "shape", "stride"), WRONG)
def test_other_strides_are_refused(
    dtype: str, shape: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    with pytest.raises(ManifestError):
        kind_nbytes((dtype, shape, stride))
    with pytest.raises(ManifestError):
        plan_layout([TensorSpec("a", dtype, shape, stride)])
    with pytest.raises(ManifestError):
        _ = TensorSpec("a", dtype, shape, stride).nbytes


SPECS = [
    TensorSpec("model.layers.0.conv.weight", "F16", (4, 3, 2, 2), (12, 1, 6, 3)),
    TensorSpec("model.layers.0.mlp.weight", "F8_E4M3", (6, 4), (1, 6)),
    TensorSpec("model.layers.0.mlp.same", "F8_E4M3", (6, 4)),
    TensorSpec("model.layers.0.packed", "F4", (4, 4)),
    TensorSpec("model.layers.0.none", "F32", (0, 4)),
]


def manifest_of(
    specs: list[TensorSpec], aliases: tuple[Alias, ...] = (), *, salt: int = 0
) -> Manifest:
    layout = plan_layout(specs, aliases)
    roots = {t.name: root_of(bytes([salt + t.nbytes % 256]) * t.nbytes) for t in layout.tensors}
    return encode(layout, Packaging(), roots)


def test_a_manifest_has_the_strides() -> None:
    manifest = manifest_of(SPECS)
    again = decode(manifest.ref, manifest.documents)
    assert again == manifest
    found = {t.name: TensorSpec(t.name, t.dtype, t.shape, t.stride) for t in again.layout.tensors}
    assert found == {spec.name: spec for spec in SPECS}
    assert [t.nbytes for t in again.layout.tensors] == [
        n for layer in again.layout.layers for _, n in layer.extents
    ]


def test_strides_are_part_of_the_identity() -> None:
    plain = manifest_of([SPECS[1]._replace(stride=())])
    assert manifest_of([SPECS[1]]).ref.identity != plain.ref.identity
    assert manifest_of(list(reversed(SPECS))).ref == manifest_of(SPECS).ref


def test_it_does_not_matter_which_of_two_permuted_ties_holds_the_bytes() -> None:
    first, second = SPECS[1]._replace(name="a"), SPECS[1]._replace(name="b")
    part = Alias("part", "a", "F8_E4M3", (4,), 1, (6,))

    def tie(name: str, target: str) -> Alias:
        return Alias(name, target, "F8_E4M3", (6, 4), 0, (1, 6))

    one = manifest_of([first], (tie("b", "a"), part))
    other = manifest_of([second], (tie("a", "b"), part._replace(target="b")))
    assert one.ref.identity == other.ref.identity
    assert decode(other.ref, other.documents) == other
    # A row-major view of all bytes is another tensor.
    turned = Alias("a", "b", "F8_E4M3", (4, 6), 0, (6, 1))
    assert manifest_of([second], (turned,)).ref.identity != one.ref.identity


def with_kind(manifest: Manifest, entry: Any) -> tuple[ManifestRef, dict[bytes, bytes]]:
    """Return a manifest whose layout document has this as its one kind."""
    head, raw = split_binary(manifest.documents[manifest.ref.layout], "layout")
    document = read_json(head, "layout") | {"kinds": [entry]}
    data = join_binary(write_json(document), raw)
    digest = document_digest(data)
    identity, _, packaging = manifest.ref.sizes
    ref = replace(manifest.ref, layout=digest, sizes=(identity, len(data), packaging))
    return ref, manifest.documents | {digest: data}


@pytest.mark.parametrize(
    "stride",
    [
        *(list(stride) for _, shape, stride in WRONG if shape == (2, 3)),
        *([], None, "12", [1, "2"], [1, 2.0], [True, 2], [1, None], [[1], 2]),
        *([1] * 100_000, [1, MAX_ARENA_BYTES], [1, 10**4000]),
    ],
    ids=lambda stride: repr(stride)[:20],
)
def test_hostile_strides_in_a_document_are_refused(stride: Any) -> None:
    manifest = manifest_of([TensorSpec("a", "F32", (2, 3), (1, 2))])
    right = with_kind(manifest, ["F32", [2, 3], [1, 2]])
    assert decode(*right).layout == manifest.layout
    with pytest.raises(ManifestError) as caught:
        decode(*with_kind(manifest, ["F32", [2, 3], stride]))
    assert len(str(caught.value)) < 200


def test_a_document_with_packed_elements_in_another_order_is_refused() -> None:
    manifest = manifest_of([TensorSpec("a", "F4", (4, 4))])
    with pytest.raises(ManifestError, match="strides"):
        decode(*with_kind(manifest, ["F4", [4, 4], [1, 4]]))


def test_a_document_that_leaves_the_strides_out_is_refused() -> None:
    """Else a relay could hand the bytes on as another tensor under the same identity."""
    manifest = manifest_of([TensorSpec("a", "F32", (2, 3), (1, 2))])
    with pytest.raises(ManifestError, match="identity"):
        decode(*with_kind(manifest, ["F32", [2, 3]]))


@pytest.mark.parametrize(
    "alias",
    [
        Alias("a", "w", "F8_E4M3", (6, 4), 1, (1, 6)),
        Alias("a", "w", "F8_E4M3", (7, 4), 0, (1, 6)),
        Alias("a", "w", "F8_E4M3", (2, 2), 0, (1, 23)),
        Alias("a", "w", "F8_E4M3", (2, 2), 0, (1, 1 << 60)),
        Alias("a", "w", "F8_E4M3", (2, 2), -1, (1, 6)),
        Alias("a", "w", "F8_E4M3", (2, 2), 0, (1,)),
        Alias("a", "w", "I8", (2, 2), 0, (1, 6)),
    ],
)
def test_aliases_stay_within_a_permuted_target(alias: Alias) -> None:
    target = TensorSpec("w", "F8_E4M3", (6, 4), (1, 6))
    inside = Alias("a", "w", "F8_E4M3", (2, 2), 17, (0, 6))
    assert plan_layout([target], [inside]).aliases == (inside,)
    with pytest.raises(ManifestError, match="'a'"):
        plan_layout([target], [alias])


def test_a_huge_tensor_costs_nothing() -> None:
    shape = (1 << 20, 1 << 20)
    spec = TensorSpec("a", "F32", shape, (1, 1 << 20))
    assert spec.nbytes == 1 << 42
    assert permuted_stride(shape, contiguous_strides(shape)) == ()
    many = (2,) * 40
    assert permuted_stride(many, tuple(1 << i for i in range(40))) == tuple(
        1 << i for i in range(40)
    )
