"""Buckets: all ranks send every byte once, in whole blocks, in layer order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mx.core.grid import BLOCK_BYTES, block_count
from mx.core.layout import TensorSpec, plan_layout
from mx.fleet import buckets
from mx.fleet.buckets import ALONE_BYTES, BUCKET_BYTES, cut_buckets
from mx.units import MIB

SIZES = st.one_of(
    st.integers(0, 3 * MIB),
    st.integers(BUCKET_BYTES - 2, 3 * BUCKET_BYTES),
    st.sampled_from([0, 1, MIB - 1, MIB, MIB + 1, BUCKET_BYTES]),
)


@given(st.lists(st.lists(SIZES, min_size=1, max_size=6), min_size=1, max_size=6))
def test_buckets_cover_a_layout_once_and_in_order(sizes: list[list[int]]) -> None:
    layout = plan_layout(
        TensorSpec(f"model.layers.{layer}.w{i}", "U8", (nbytes,))
        for layer, each in enumerate(sizes)
        for i, nbytes in enumerate(each)
    )
    found = cut_buckets(layout)
    landed: dict[int, list[tuple[int, int, int]]] = {}
    left = [sum(nbytes for _, nbytes in layer.extents) for layer in layout.layers]
    for bucket in found:
        assert bucket.parts and bucket.nbytes == sum(part.nbytes for part in bucket.parts)
        assert bucket.nbytes <= BUCKET_BYTES
        assert len(bucket.parts) == 1 or max(p.nbytes for p in bucket.parts) < ALONE_BYTES
        for part in bucket.parts:
            tensor = layout.tensors[part.tensor]
            assert tensor.layer == part.layer
            base = layout.layers[part.layer].arena_offset + tensor.offset
            landed.setdefault(part.tensor, []).append(
                (part.arena_offset - base, part.nbytes, part.block)
            )
            left[part.layer] -= part.nbytes
        # As many layers are complete as it says, and not one more.
        assert bucket.layers == next((i for i, n in enumerate(left) if n), len(left))
    for index, tensor in enumerate(layout.tensors):
        parts = landed.get(index, [])
        first = layout.layers[tensor.layer].first_tensor
        block = sum(block_count(t.nbytes) for t in layout.tensors[first:index])
        at = 0
        for begin, nbytes, number in parts:
            assert (begin, number) == (at, block + at // BLOCK_BYTES)
            assert at % BLOCK_BYTES == 0
            at += nbytes
        assert at == tensor.nbytes
    assert not found or found[-1].layers == len(layout.layers)


def test_small_tensors_of_many_layers_share_buckets() -> None:
    specs = [TensorSpec(f"model.layers.{i}.w", "U8", (1000,)) for i in range(5000)]
    assert len(cut_buckets(plan_layout(specs))) == 1
    assert buckets.BUCKET_BYTES % BLOCK_BYTES == 0


def test_a_layer_of_large_and_small_tensors_is_complete_before_the_next_begins() -> None:
    specs = [
        TensorSpec(f"model.layers.{i}.{name}", "U8", (nbytes,))
        for i in range(3)
        for name, nbytes in (("mlp", BUCKET_BYTES), ("norm", 100))
    ]
    assert [b.layers for b in cut_buckets(plan_layout(specs))] == [0, 1, 1, 2, 2, 3]
