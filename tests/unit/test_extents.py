"""Where another layout's bytes are in an arena, and what of that is believed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.core.digest import block_digest, root_of
from mx.core.extents import ExtentMap, relaid_digests
from mx.core.grid import BLOCK_BYTES
from mx.core.layout import TensorSpec, build_layout, plan_layout
from mx.core.manifest import decode, encode
from mx.core.pages import check_page
from mx.core.types import AddressTable, Alias, Layout, Manifest, Packaging, Region, TableRow
from mx.errors import PeerProtocolError
from mx.wire.rows import RowsDecoder, rows_to_wire


def arena_of(layout: Layout, seed: int) -> bytes:
    return random.Random(seed).randbytes(layout.arena_nbytes)


def tensor_bytes(layout: Layout, arena: bytes, name: str) -> bytes:
    tensor = next(t for t in layout.tensors if t.name == name)
    begin = layout.layers[tensor.layer].arena_offset + tensor.offset
    return arena[begin : begin + tensor.nbytes]


def manifest_of(layout: Layout, roots: dict[str, bytes]) -> Manifest:
    return encode(layout, Packaging(), roots)


def pages_of(layout: Layout, blobs: dict[str, bytes]) -> list[bytes]:
    found = []
    for layer in layout.layers:
        tensors = layout.tensors[layer.first_tensor : layer.first_tensor + len(layer.extents)]
        blocks = [
            blobs[t.name][at : at + BLOCK_BYTES]
            for t in tensors
            for at in range(0, t.nbytes, BLOCK_BYTES)
        ]
        found.append(b"".join(map(block_digest, blocks)))
    return found


def relaid_layout(own: Layout, order: Sequence[int], cuts: Sequence[bool]) -> Layout:
    """Return a layout of the same tensors in another order and in other layers."""
    tensors = [own.tensors[i] for i in order]
    kinds = sorted({(t.dtype, t.shape, t.stride) for t in tensors})
    counts: list[int] = []
    for cut in cuts:
        if cut or not counts:
            counts.append(0)
        counts[-1] += 1
    return build_layout(
        [(f"layer {i}", count) for i, count in enumerate(counts)],
        [t.name for t in tensors],
        kinds,
        [kinds.index((t.dtype, t.shape, t.stride)) for t in tensors],
        own.aliases,
    )


sizes = st.lists(st.sampled_from([0, 1, 255, 256, 257, 4096, 70_000]), min_size=1, max_size=12)


@given(sizes, st.randoms(use_true_random=False), st.integers(0, 99))
def test_every_byte_of_the_other_layout_is_found(
    sizes: list[int], rng: random.Random, seed: int
) -> None:
    own = plan_layout(
        [
            TensorSpec(f"model.layers.{i // 3}.mlp.w{i}", "U8", (size,))
            for i, size in enumerate(sizes)
        ]
    )
    order = list(range(len(sizes)))
    rng.shuffle(order)
    other = relaid_layout(own, order, [rng.random() < 0.3 for _ in order])
    arena = arena_of(own, seed)
    extents = ExtentMap.of_arena(own).relaid(own, other)
    # As a reader gets it.
    layers = len(other.layers)
    table = AddressTable(b"l" * 32, (Region(0, "cpu", 0, len(arena)),), held=((0, layers),))
    decoder = RowsDecoder(table, len(sizes))
    rows = [row for page in rows_to_wire(extents.rows) for row in decoder.feed(page)]
    received = ExtentMap.of_table(other, replace(table, rows=tuple(rows)))
    assert received.rows == extents.rows
    for tensor in other.tensors:
        low, high = sorted(rng.randint(0, tensor.nbytes) for _ in range(2))
        found, at = b"", tensor.offset + low
        for piece in received.places(tensor.layer, tensor.offset + low, tensor.offset + high):
            assert (piece.region, piece.offset) == (0, at)
            found += arena[piece.region_offset : piece.region_offset + piece.nbytes]
            at += piece.nbytes
        assert found == tensor_bytes(own, arena, tensor.name)[low:high]


def test_an_arena_in_its_own_layout_has_one_place_a_range_and_no_rows() -> None:
    layout = plan_layout(
        [TensorSpec(f"model.layers.{i}.mlp.weight", "U8", (1000,)) for i in range(3)]
    )
    extents = ExtentMap.of_arena(layout)
    assert extents.contiguous and extents.rows == ()
    assert extents.places(1, 10, 500) == [(0, layout.layers[1].arena_offset + 10, 10, 490)]
    regions = (
        Region(0, "cpu", 0, 1 << 20, (2, 3)),
        Region(1, "cpu", 0, 1 << 20, (0, 2)),
    )
    table = AddressTable(b"l" * 32, regions, held=((0, 3),))
    received = ExtentMap.of_table(layout, table)
    assert received.contiguous
    assert received.places(2, 0, 1000) == [(0, 0, 0, 1000)]
    assert received.places(1, 0, 1000) == [(1, layout.layers[1].arena_offset, 0, 1000)]


def test_neighbours_share_a_row() -> None:
    """A source whose layers lie in another order needs a row a layer, not one a tensor."""
    specs = [
        TensorSpec(f"model.layers.{i}.mlp.w{j}", "U8", (700,)) for i in range(2) for j in range(3)
    ]
    own = plan_layout(specs)
    other = relaid_layout(own, [3, 4, 5, 0, 1, 2], [True, False, False] * 2)
    assert len(ExtentMap.of_arena(own).relaid(own, other).rows) == 2


def test_the_proof_is_in_the_identity_and_pages_follow() -> None:
    """Another layout, in which another of two tied names holds the bytes, and its manifest."""
    size = BLOCK_BYTES + 5
    specs = [TensorSpec("embed", "U8", (size,)), TensorSpec("model.layers.0.mlp.w", "U8", (9,))]
    own = plan_layout(specs, [Alias("lm_head", "embed", "U8", (size,), 0, (1,))])
    kinds = [("U8", (9,), ()), ("U8", (size,), ())]
    other = build_layout(
        [("all", 2)],
        ["model.layers.0.mlp.w", "lm_head"],
        kinds,
        [0, 1],
        [Alias("embed", "lm_head", "U8", (size,), 0, (1,))],
    )
    arena = arena_of(own, 1)
    blobs = {t.name: tensor_bytes(own, arena, t.name) for t in own.tensors}
    ours = manifest_of(own, {name: root_of(data) for name, data in blobs.items()})
    theirs_blobs = {**blobs, "lm_head": blobs["embed"]}
    theirs = manifest_of(
        other, {n: root_of(theirs_blobs[n]) for n in ("model.layers.0.mlp.w", "lm_head")}
    )
    assert theirs.ref.identity == ours.ref.identity and theirs.ref.layout != ours.ref.layout
    layout_document = theirs.documents[theirs.ref.layout]
    adopted = decode(theirs.ref, {**ours.documents, theirs.ref.layout: layout_document})
    extents = ExtentMap.of_arena(own).relaid(own, adopted.layout)
    (head,) = [t for t in adopted.layout.tensors if t.name == "lm_head"]
    begin, end = head.offset, head.offset + head.nbytes
    places = extents.places(head.layer, begin, end)
    found = b"".join(arena[p.region_offset : p.region_offset + p.nbytes] for p in places)
    assert found == blobs["embed"]
    pages = relaid_digests(b"".join(pages_of(own, blobs)), own, adopted.layout)
    assert pages == pages_of(other, theirs_blobs)
    for layer, page in enumerate(pages):
        check_page(adopted, layer, page)


LAYOUT = plan_layout([TensorSpec(f"model.layers.{i}.mlp.weight", "U8", (1000,)) for i in range(2)])


@pytest.mark.parametrize(
    ("regions", "rows", "why"),
    [
        ([(1 << 20, None)], [(0, 0, 999, 0, 0)], "no row says"),  # a hole
        ([(1 << 20, None)], [(0, 1, 999, 0, 0)], "no row says"),
        ([(1 << 20, None)], [(0, 0, 1000, 0, 0)], "no row says"),  # a layer without rows
        ([(1 << 20, None)], [], "no row says"),
        ([(1 << 20, None)], [(0, 0, 1001, 0, 0)], "outside layer 0"),
        ([(1 << 20, None)], [(2, 0, 1, 0, 0)], "outside layer 2"),
        ([(1 << 20, (0, 2)), (1 << 20, None)], [(1, 0, 1000, 1, 0)], "a region and rows"),
        ([(1 << 20, (0, 3))], [], "has not"),
        ([(1000, (0, 2))], [], "too small"),
    ],
)
def test_tables_that_do_not_fit_the_layout_are_refused(
    regions: list[tuple[int, tuple[int, int] | None]],
    rows: list[tuple[int, int, int, int, int]],
    why: str,
) -> None:
    table = AddressTable(
        b"l" * 32,
        tuple(Region(i, "cpu", 0, nbytes, layers) for i, (nbytes, layers) in enumerate(regions)),
        tuple(TableRow(*row) for row in rows),
        held=((0, 2),),
    )
    with pytest.raises(PeerProtocolError, match=why):
        ExtentMap.of_table(LAYOUT, table)


def test_rows_may_leave_out_what_is_not_held() -> None:
    region = Region(0, "cpu", 0, 1 << 20)
    rows = (TableRow(1, 0, 400, 0, 5000), TableRow(1, 400, 600, 0, 0))
    extents = ExtentMap.of_table(LAYOUT, AddressTable(b"l" * 32, (region,), rows, ((1, 2),)))
    assert extents.places(1, 300, 1000) == [(0, 5300, 300, 100), (0, 0, 400, 600)]
    with pytest.raises(PeerProtocolError, match="no row says"):
        extents.places(0, 0, 1)
