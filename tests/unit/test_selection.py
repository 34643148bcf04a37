"""Selections: names, patterns, slices, ties, and what they need of a model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mx.core import manifest as manifests
from mx.core.grid import ChunkGrid
from mx.core.selection import Selection, Shard
from mx.core.types import Alias, Layout
from mx.errors import ConfigError
from mx.units import MIB

Q = "model.layers.0.self_attn.q_proj.weight"
O = "model.layers.0.self_attn.o_proj.weight"  # noqa: E741 - as it is called
NORM = "model.layers.1.norm.weight"
EMBED = "model.embed_tokens.weight"
PACKED = "model.layers.1.mlp.packed"
TURNED = "model.layers.1.mlp.turned"
HEAD, ROW = "lm_head.weight", "model.row"


def layout_of() -> Layout:
    specs = [
        manifests.TensorSpec(EMBED, "F32", (1000, 64)),
        manifests.TensorSpec(Q, "F32", (1024, 512)),
        manifests.TensorSpec(O, "BF16", (512, 1022)),
        manifests.TensorSpec(NORM, "F32", (512,)),
        manifests.TensorSpec(PACKED, "F4", (64, 64)),
        manifests.TensorSpec(TURNED, "F32", (64, 32), (1, 64)),
    ]
    aliases = [
        Alias(HEAD, EMBED, "F32", (1000, 64), 0, (64, 1)),
        Alias(ROW, EMBED, "F32", (64,), 256, (1,)),
    ]
    return manifests.plan_layout(specs, aliases)


def names(selection: Selection) -> list[str]:
    subset = selection.of(layout_of())
    tensors = [tensor.name for tensor in subset.layout.tensors]
    return tensors + [alias.name for alias in subset.layout.aliases]


def refused(*arguments: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Selection(*arguments).of(layout_of())
    return str(caught.value)


def test_names_and_patterns_select() -> None:
    assert names(Selection(Q)) == [Q]
    assert names(Selection([NORM, "*.self_attn.?_proj.weight"])) == [O, Q, NORM]
    assert set(names(Selection("*"))) == set(names(Selection())) >= {Q, HEAD, ROW}


@pytest.mark.parametrize("only", ["nothing", "*.nothing", ["model.*", "x", "y*"]])
def test_what_fits_nothing_is_named(only: Any) -> None:
    unfit = [only] if isinstance(only, str) else only[1:]
    message = refused(only)
    assert all(repr(each) in message for each in unfit)


def test_only_a_selection_of_everything_is_everything() -> None:
    assert Selection().everything and Selection("*").everything
    assert not Selection(["*", "x"]).everything  # "x" may name nothing
    assert not Selection("model.*").everything
    assert not Selection(None, {Q: (0, 0, 1)}).everything


@pytest.mark.parametrize(
    ("only", "slices"),
    [([], None), ([""], None), ([3], None), (None, {Q: (0, 1)}), (None, {Q: (0, 1, 2.0)}),
     (None, {Q: Shard(0, 2, 2)}), (None, {Q: Shard(0, -1, 2)}), (None, {Q: "rows"}),
     (None, {Q: (0, True, 2)})],
)  # fmt: skip
def test_malformed_selections_are_refused_at_once(only: Any, slices: Any) -> None:
    with pytest.raises(ConfigError):
        Selection(only, slices)


def test_slices_have_their_shapes_and_bytes() -> None:
    subset = Selection([Q, O, NORM], {"*q_proj*": Shard(0, 1, 4), O: (-1, 511, 1022)}).of(
        layout_of()
    )
    shapes = {each.name: each.shape for each in subset.layout.tensors}
    assert shapes == {Q: (256, 512), O: (512, 511), NORM: (512,)}
    # q: rows 256 to 512 are half of block 0; o: every row; the norm is a part of a block anyway.
    assert subset.own_nbytes == 256 * 512 * 4 + 512 * 511 * 2 + 512 * 4
    assert subset.moved_nbytes == MIB + 512 * 1022 * 2 + 512 * 4
    assert subset.amplification == subset.moved_nbytes / subset.own_nbytes


@pytest.mark.parametrize(
    ("slices", "said"),
    [
        ({O: Shard(1, 0, 4)}, "dimension 1 .* has 1022 elements, of which 4 ranks"),
        ({Q: (0, 0, 1025)}, "0 to 1025 .* 1024 elements"),
        ({Q: (0, 5, 5)}, "5 to 5"),
        ({Q: (2, 0, 1)}, "no dimension 2"),
        ({NORM: (-2, 0, 1)}, "no dimension -2"),
        ({PACKED: (0, 0, 32)}, f"{PACKED} is F4"),
        ({TURNED: (0, 0, 32)}, f"{TURNED} is stored with the strides"),
        ({"unknown": (0, 0, 1)}, "no selected tensor is named 'unknown'"),
        ({"*q_proj*": (0, 0, 1), "*.self_attn.q*": (0, 0, 2)}, "both select .*q_proj"),
        ({EMBED: (0, 0, 10)}, f"{HEAD}|{ROW}"),
        ({ROW: (0, 0, 10)}, ROW),
    ],
)
def test_slices_that_do_not_fit_are_refused(slices: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Selection(None, slices).of(layout_of())


def test_a_slice_that_is_all_of_a_tensor_is_none() -> None:
    subset = Selection([PACKED, TURNED], {"*": Shard(0, 0, 1)}).of(layout_of())
    assert subset.own_nbytes == subset.moved_nbytes
    assert {t.name: t.stride for t in subset.layout.tensors}[TURNED] == (1, 64)


def test_a_name_counts_before_patterns() -> None:
    subset = Selection([Q], {"*": (0, 0, 1), Q: (0, 0, 2)}).of(layout_of())
    assert subset.layout.tensors[0].shape == (2, 512)


def test_a_slice_of_what_is_not_selected_is_refused() -> None:
    assert "no selected tensor" in refused([Q], {O: (0, 0, 1)})


def test_an_alias_brings_its_tensor_or_takes_its_place() -> None:
    assert names(Selection(EMBED)) == [EMBED]  # all of the tensor, under its own name
    assert names(Selection(ROW)) == [HEAD, ROW]  # a part of it
    assert names(Selection([EMBED, ROW])) == [HEAD, EMBED, ROW]
    subset = Selection([HEAD, EMBED]).of(layout_of())
    (alias,) = subset.layout.aliases
    assert (alias.name, alias.target, subset.own_nbytes) == (EMBED, HEAD, 256_000)


def test_ties_are_sliced_together() -> None:
    subset = Selection([HEAD, EMBED], {HEAD: Shard(0, 1, 2), EMBED: Shard(0, 1, 2)}).of(layout_of())
    (tensor,), (alias,) = subset.layout.tensors, subset.layout.aliases
    assert tensor.shape == alias.shape == (500, 64)
    assert (alias.target, alias.offset_bytes, alias.stride) == (HEAD, 0, (64, 1))
    assert names(Selection(EMBED, {EMBED: (1, 0, 8)})) == [EMBED]
    assert "slice neither or both alike" in refused([HEAD, EMBED], {HEAD: Shard(0, 1, 2)})


SIZES = st.lists(st.integers(0, 3 * MIB), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, chunk_mib=st.integers(1, 4), data=st.data())
def test_wanted_blocks_by_chunk_are_those_of_the_tensors(
    sizes: list[int], chunk_mib: int, data: st.DataObject
) -> None:
    """Block by block, over the grid's own blocks."""
    specs = [
        manifests.TensorSpec(f"model.layers.{number // 5}.t{number}", "U8", (nbytes,))
        for number, nbytes in enumerate(sizes)
    ]
    layout = manifests.plan_layout(specs)
    grid = ChunkGrid(layout.layers, chunk_mib * MIB)
    chosen = data.draw(st.lists(st.sampled_from(specs), min_size=1, unique=True))
    slices: dict[str, Any] = {}
    for spec in chosen:
        if spec.shape[0] and data.draw(st.booleans()):
            begin = data.draw(st.integers(0, spec.shape[0] - 1))
            slices[spec.name] = (0, begin, data.draw(st.integers(begin + 1, spec.shape[0])))
    subset = Selection([spec.name for spec in chosen], slices).of(layout)
    wanted = subset.wanted(grid)
    places = {tensor.name: tensor for tensor in layout.tensors}
    expected: dict[tuple[int, int], bool] = {}
    for chunk in range(len(grid)):
        for number, (offset, nbytes) in enumerate(grid.blocks(chunk)):
            for spec in chosen:
                tensor = places[spec.name]
                if tensor.layer != grid.layer_of[chunk]:
                    continue
                begin, end = slices.get(spec.name, (0, 0, tensor.nbytes))[1:]
                low = max(offset, tensor.offset + begin)
                high = min(offset + nbytes, tensor.offset + end)
                if low < high:
                    expected[chunk, number] = high - low < nbytes
    found = {
        (part.chunk, number): wanted.is_aside(part)
        for chunk in wanted.chunks
        for part in wanted.parts(chunk)
        for number in range(part.begin, part.end)
    }
    assert found == expected
    assert wanted.nbytes == subset.moved_nbytes
    assert wanted.bits == sum(1 << chunk for chunk in {chunk for chunk, _ in expected})
    assert all(
        wanted.needs_aside(chunk) == any(a for (c, _), a in expected.items() if c == chunk)
        for chunk in range(len(grid))
    )
    assert subset.own_nbytes == sum(t.nbytes for t in subset.layout.tensors) <= wanted.nbytes
