"""Where a layout's bytes are in memory, and what of that is believed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.core.extents import ExtentMap
from mx.core.layout import TensorSpec, plan_layout
from mx.core.types import AddressTable, Region, TableRow
from mx.errors import PeerProtocolError
from mx.wire.rows import encode_rows, with_rows

sizes = st.lists(st.sampled_from([0, 1, 255, 256, 257, 4096, 70_000]), min_size=1, max_size=12)


@given(sizes, st.randoms(use_true_random=False), st.integers(0, 99))
def test_every_byte_of_scattered_memory_is_found(
    sizes: list[int], rng: random.Random, seed: int
) -> None:
    layout = plan_layout(
        [
            TensorSpec(f"model.layers.{i // 3}.mlp.w{i}", "U8", (size,))
            for i, size in enumerate(sizes)
        ]
    )
    memory, place_of = bytearray(), dict[str, int]()
    for tensor in rng.sample(layout.tensors, len(layout.tensors)):
        memory += bytes(rng.randint(0, 99))
        place_of[tensor.name] = len(memory)
        memory += random.Random(f"{seed} {tensor.name}").randbytes(tensor.nbytes)
    rows = (
        TableRow(t.layer, t.offset, t.nbytes, 0, place_of[t.name])
        for t in layout.tensors
        if t.nbytes
    )
    extents = ExtentMap.of_table(layout, AddressTable(b"", (), tuple(rows)))
    # As a reader gets it.
    layers = len(layout.layers)
    table = AddressTable(
        b"l" * 32,
        (Region(0, "cpu", 0, len(memory)),),
        held=((0, layers),),
        row_count=len(extents.rows),
    )
    received = ExtentMap.of_table(layout, with_rows(table, encode_rows(extents.rows)))
    assert received.rows == extents.rows
    for tensor in layout.tensors:
        low, high = sorted(rng.randint(0, tensor.nbytes) for _ in range(2))
        found, at = b"", tensor.offset + low
        for piece in received.places(tensor.layer, tensor.offset + low, tensor.offset + high):
            assert (piece.region, piece.offset) == (0, at)
            found += memory[piece.region_offset : piece.region_offset + piece.nbytes]
            at += piece.nbytes
        assert found == random.Random(f"{seed} {tensor.name}").randbytes(tensor.nbytes)[low:high]


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
