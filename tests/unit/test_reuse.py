"""Chunks that are in memory already: found by their blocks, copied, and hashed again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hypothesis import given
from hypothesis import strategies as st

from mx.core.grid import BLOCK_BYTES
from mx.core.layout import TensorSpec
from mx.core.manifest import encode, plan_layout
from mx.core.pages import Pages
from mx.core.reuse import ReusableWeights, same_chunks
from mx.core.types import Manifest, Packaging
from mx.fetching import prefill
from mx.storage.reader import fill_from_tensors
from mx.views import host_view
from tests.support.checkpoints import make_arena
from tests.support.manifests import in_chunks

#: Whole blocks, of which a tensor has some, and ends of tensors.
BLOCKS = [bytes([fill]) * BLOCK_BYTES for fill in range(3)]
ENDS = [b"", b"a", b"b" * 300]

TENSORS = st.dictionaries(
    st.sampled_from([f"model.layers.{layer}.mlp.{name}" for layer in range(2) for name in "wv"]),
    st.tuples(
        st.lists(st.sampled_from(BLOCKS), max_size=2).map(b"".join), st.sampled_from(ENDS)
    ).map(b"".join),
    min_size=1,
)


class Weights:
    """A model in memory, as a process holds it."""

    def __init__(self, tensors: Mapping[str, bytes], *, chunk_blocks: int = 1) -> None:
        layout = plan_layout(
            [TensorSpec(name, "U8", (len(data),)) for name, data in tensors.items()]
        )
        self.arena = make_arena(layout)
        views = {name: memoryview(data) for name, data in tensors.items()}
        filled = fill_from_tensors(views, layout, self.arena)
        self.manifest = in_chunks(
            encode(layout, Packaging(), filled.roots), chunk_blocks * BLOCK_BYTES
        )
        self.pages = Pages.whole(self.manifest, filled.pages)

    @property
    def held(self) -> ReusableWeights:
        return ReusableWeights(self.manifest, self.pages, self.arena)

    def blocks(self, index: int) -> list[bytes]:
        """Return the bytes of each block of a chunk."""
        grid = self.manifest.grid
        base = self.manifest.layout.layers[grid.layer_of[index]].arena_offset
        return [
            bytes(self.arena[base + offset : base + offset + nbytes])
            for offset, nbytes in grid.blocks(index)
        ]

    def without(self, layers: Iterable[int]) -> Pages:
        """Return the pages of all layers but these."""
        pages = Pages(self.manifest)
        for layer in {layer.index for layer in self.manifest.layout.layers} - set(layers):
            page = self.pages.get(layer)
            assert page is not None
            pages.put(layer, page)
        return pages


@given(
    TENSORS,
    st.lists(TENSORS, max_size=2),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sets(st.integers(0, 1)),
    st.sets(st.integers(0, 1)),
)
def test_a_chunk_is_the_same_if_each_of_its_blocks_is_held_somewhere(
    tensors: dict[str, bytes],
    held: list[dict[str, bytes]],
    chunk_blocks: int,
    held_blocks: int,
    unknown: set[int],
    held_unknown: set[int],
) -> None:
    """Whatever the names, the places, the chunk sizes and the tensors around it."""
    new = Weights(tensors, chunk_blocks=chunk_blocks)
    others = [Weights(each, chunk_blocks=held_blocks) for each in held]
    there: set[bytes] = set()
    for other in others:
        for index in range(len(other.manifest.grid)):
            if other.manifest.grid.layer_of[index] not in held_unknown:
                there.update(other.blocks(index))
    copies = same_chunks(
        new.manifest,
        new.without(unknown),
        [
            ReusableWeights(other.manifest, other.without(held_unknown), other.arena)
            for other in others
        ],
    )
    expected = {
        index
        for index in range(len(new.manifest.grid))
        if new.manifest.grid.layer_of[index] not in unknown and set(new.blocks(index)) <= there
    }
    assert copies.keys() == expected
    for index, copy in copies.items():
        assert copy.index == index
        found = [
            bytes(host_view(view[offset : offset + len(block)]))
            for (view, offset), block in zip(copy.blocks, new.blocks(index), strict=True)
        ]
        assert found == new.blocks(index)


class Filling:
    """An arena that is being filled, and the chunks in it that were found right."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.arena = make_arena(manifest.layout)
        self.right: list[int] = []

    def prefill(self, label: str, source: str, chunks: Iterable[int], seconds: float) -> int:
        assert (label, source) == ("reuse", "local")
        self.right += chunks
        return 0


OLD = {
    "model.embed_tokens.weight": BLOCKS[0] + BLOCKS[1] + b"end",
    "model.layers.0.mlp.weight": BLOCKS[2] + b"c" * 70_000,
    "model.layers.1.mlp.weight": BLOCKS[1],
    "model.norm.weight": b"n" * 33,
}
NEW = OLD | {"model.layers.0.mlp.weight": BLOCKS[2] + b"C" * 70_000, "lm_head.weight": b"h" * 99}


def changed_chunks(weights: Weights) -> list[int]:
    """The chunks of NEW with a block that OLD does not have."""
    return [
        index
        for index in range(len(weights.manifest.grid))
        if {b"C" * 70_000, b"h" * 99} & set(weights.blocks(index))
    ]


def test_what_is_held_is_copied_and_the_rest_left_alone() -> None:
    for chunk_blocks in (1, 2):
        new = Weights(NEW, chunk_blocks=chunk_blocks)
        filling = Filling(new.manifest)
        prefill.reuse(filling, new.pages, [Weights(OLD).held], lambda: False)
        left = changed_chunks(new)
        assert left
        assert filling.right == [i for i in range(len(new.manifest.grid)) if i not in left]
        untouched = make_arena(new.manifest.layout)
        for index in range(len(new.manifest.grid)):
            grid, layers = new.manifest.grid, new.manifest.layout.layers
            source = untouched if index in left else new.arena
            base = layers[grid.layer_of[index]].arena_offset
            for offset, nbytes in grid.blocks(index):
                there = slice(base + offset, base + offset + nbytes)
                assert filling.arena[there] == source[there], layers[grid.layer_of[index]].name


def test_held_memory_that_was_written_to_is_not_believed() -> None:
    new, old = Weights(NEW), Weights(OLD)
    spoilt = same_chunks(new.manifest, new.pages, [old.held])[0]
    ((view, offset),) = spoilt.blocks
    host_view(view[offset + 5 : offset + 6])[0] ^= 1
    filling = Filling(new.manifest)
    prefill.reuse(filling, new.pages, [old.held], lambda: False)
    left = {0, *changed_chunks(new)}
    assert filling.right == [i for i in range(len(new.manifest.grid)) if i not in left]


def test_nothing_is_copied_once_the_pull_is_cancelled() -> None:
    weights = Weights(OLD)
    filling = Filling(weights.manifest)
    calls = iter([False, True])
    prefill.reuse(filling, weights.pages, [weights.held], lambda: next(calls))
    assert filling.right == list(weights.manifest.grid.of_layer(0))
