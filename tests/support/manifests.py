"""Manifests and pages of described models, made by mx; and models at random."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from benchmarks.roots import root_of
from mx.core.digest import BlockHasher
from mx.core.grid import BLOCK_BYTES, ChunkGrid
from mx.core.layout import TensorSpec, plan_layout
from mx.core.manifest import encode
from mx.core.types import Alias, Layout, Manifest, PackagedFile, Packaging, SideFile
from tests.support import naive_identity as naive


def layout_of(model: naive.Model) -> Layout:
    """Return the model's layout."""
    specs = [TensorSpec(t.name, t.dtype, tuple(t.shape), tuple(t.strides)) for t in model.tensors]
    aliases = [
        Alias(a.name, a.holder, a.dtype, tuple(a.shape), a.offset, tuple(a.strides))
        for a in model.aliases
    ]
    return plan_layout(specs, aliases)


def manifest_of(model: naive.Model) -> Manifest:
    """Return the model's manifest."""
    packaging = Packaging(
        tuple(
            PackagedFile(path, None if metadata is None else dict(metadata), tuple(tensors))
            for path, metadata, tensors in model.files
        ),
        tuple(
            SideFile(path, nbytes, bytes.fromhex(digest))
            for path, nbytes, digest in model.side_files
        ),
    )
    roots = {t.name: root_of(t.data) for t in naive.canonical_holders(model)[0]}
    return encode(layout_of(model), packaging, roots)


def pages_of(model: naive.Model) -> list[bytes]:
    """Return the pages of the model, hashed by mx."""
    return [
        b"".join(BlockHasher(blocks_of(tensor.data)).block_digests() for tensor in tensors)
        for tensors in model.in_layers
    ]


def in_chunks(manifest: Manifest, chunk_nbytes: int) -> Manifest:
    """Return the manifest, cut as those of larger models are: into chunks of several blocks."""
    vars(manifest)["grid"] = ChunkGrid(manifest.layout.layers, chunk_nbytes)
    return manifest


def blocks_of(data: bytes) -> list[memoryview]:
    """Return the blocks of a tensor."""
    return [memoryview(data)[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]


# -- at random ------------------------------------------------------------------------------------

NAMES = st.text('ab.é"\\ \uff5e\U0001d54f', min_size=1, max_size=4).filter(lambda n: ".." not in n)


@st.composite
def tensors(draw: st.DrawFn, name: str) -> naive.Tensor:
    """A tensor of a few hundred bytes at most."""
    dtype = draw(st.sampled_from(["U8", "BF16", "F32", "F4", "F6_E2M3"]))
    shape = draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 5]), max_size=3))
    strides: list[int] = []
    if naive.BITS[dtype] < 8:
        shape = [8, *shape]  # fills whole bytes
    elif 0 not in shape:
        order = draw(st.permutations(range(len(shape))))
        wide = [d for d in order if shape[d] > 1]
        if wide != sorted(wide):
            strides = [1] * len(shape)
            for at, d in enumerate(wide):
                strides[d] = naive.elements([shape[other] for other in wide[at + 1 :]])
    tensor = naive.Tensor(name, dtype, shape, strides)
    tensor.data = naive.pattern(draw(st.integers(0, 255)), tensor.nbytes)
    return tensor


@st.composite
def aliases(draw: st.DrawFn, name: str, holder: naive.Tensor) -> naive.Alias:
    """A view of all or of a part of a tensor."""
    strides = holder.strides or naive.row_major(holder.shape)
    kind = (name, holder.name, holder.dtype)
    if naive.BITS[holder.dtype] < 8:
        return naive.Alias(*kind, [8], 0, [1]) if holder.nbytes else naive.Alias(*kind, [0], 0, [1])
    count = naive.elements(holder.shape)
    if count and draw(st.booleans()):
        size = naive.BITS[holder.dtype] // 8
        begin = draw(st.integers(0, count - 1))
        step = draw(st.integers(0, 2))
        most = (count - 1 - begin) // step + 1 if step else 4
        return naive.Alias(*kind, [draw(st.integers(0, most))], begin * size, [step])
    free = [
        draw(st.integers(0, 9)) if n < 2 else s for n, s in zip(holder.shape, strides, strict=True)
    ]
    return naive.Alias(*kind, list(holder.shape), 0, free if 0 not in holder.shape else strides)


@st.composite
def models(draw: st.DrawFn) -> naive.Model:
    """A small model with any names, forms and ties."""
    names = draw(st.lists(NAMES, min_size=1, max_size=8, unique=True))
    count = draw(st.integers(1, len(names)))
    members = [draw(tensors(name)) for name in names[:count]]
    views = [draw(aliases(name, draw(st.sampled_from(members)))) for name in names[count:]]
    return modelled(members, views)


def modelled(tensors: list[naive.Tensor], aliases: Sequence[naive.Alias] = ()) -> naive.Model:
    """Return the model of these tensors, with the layers that mx plans."""
    model = naive.Model(tensors, aliases=list(aliases))
    layout = layout_of(model)
    for layer in layout.layers:
        end = layer.first_tensor + len(layer.extents)
        names = [tensor.name for tensor in layout.tensors[layer.first_tensor : end]]
        model.layers.append((layer.name, names))
    return model
