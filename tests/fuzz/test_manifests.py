"""Manifests by the thousand: a hostile one is refused in one way only, and one that is accepted
describes a model that every machine can handle."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.roots import root_of
from mx.core.digest import document_digest
from mx.core.identity import IdentityRecords
from mx.core.layout import MAX_ARENA_BYTES, Kind, build_layout, planned_again
from mx.core.manifest import decode, encode
from mx.core.pages import check_page
from mx.core.types import DTYPE_BITS, Alias, Layout, Manifest, Packaging
from mx.errors import DigestError, ManifestError
from tests.support.identity_vectors import model_of, stored
from tests.support.manifests import manifest_of, models

Columns = tuple[list[tuple[str, int]], list[str], list[Kind], list[int], list[Alias]]

MANIFESTS = [manifest_of(model_of(vector)) for vector in stored()["models"]]

NUMBERS = st.integers(-2, 9) | st.sampled_from(
    [1 << 20, 1 << 31, 1 << 47, 1 << 63, 10**30, -(10**9)]
)
TEXTS = st.sampled_from(["", "w", "a", "U8", "F32", "F4", "part.0", "../a.safetensors"])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | TEXTS | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=6,
)


def replaced(draw: Any, value: Any) -> Any:
    """Return JSON with one value changed, left out or doubled, somewhere inside."""
    if isinstance(value, dict) and value and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(sorted(value)))
        return value | {key: replaced(draw, value[key])}
    if isinstance(value, list) and value and draw(st.integers(0, 3)):
        at = draw(st.integers(0, len(value) - 1))
        middle = draw(st.sampled_from(["change", "leave out", "double"]))
        if middle == "change":
            return [*value[:at], replaced(draw, value[at]), *value[at + 1 :]]
        return value[:at] + (value[at : at + 1] * 2 if middle == "double" else []) + value[at + 1 :]
    return draw(VALUES)


@settings(max_examples=400)
@given(st.sampled_from(MANIFESTS), st.sampled_from([0, 1, 2]), st.integers(1, 3), st.data())
def test_documents_with_anything_in_them(
    manifest: Manifest, position: int, times: int, data: st.DataObject
) -> None:
    documents = manifest.ref.documents
    digest, _ = documents[position % len(documents)]
    head, line, raw = manifest.documents[digest].partition(b"\n")
    value = json.loads(head)
    for _ in range(times):
        value = replaced(data.draw, value)
    written = json.dumps(value).encode() + line + raw
    sizes: Any = tuple(len(written) if d == digest else n for d, n in documents)
    sizes += (0,) * (3 - len(sizes))
    field = ("identity", "layout", "packaging")[position % len(documents)]
    changes: dict[str, Any] = {field: document_digest(written), "sizes": sizes}
    ref = replace(manifest.ref, **changes)
    try:
        found = decode(ref, manifest.documents | {document_digest(written): written})
    except ManifestError as error:
        assert str(error).isprintable() and len(str(error)) < 1000
    else:  # it says the same in other words, or is another packaging
        assert position or found == manifest
        assert found.roots == manifest.roots
        assert found.layout.layers == manifest.layout.layers or field == "layout"


NAMES = st.sampled_from(["a", "b", "é", "", "a/../b", "x" * 1025]) | st.text(max_size=3)
INTEGERS = st.integers(0, 9) | NUMBERS


@st.composite
def columns(draw: st.DrawFn) -> Columns:
    """The columns of a layout that are right, or wrong in one place or two."""
    model = draw(models())
    names = [tensor.name for tensor in model.tensors]
    layers = [(name, len(members)) for name, members in model.layers]
    kinds: list[Kind] = [(t.dtype, tuple(t.shape), tuple(t.strides)) for t in model.tensors]
    kind = list(range(len(kinds)))
    aliases = [
        Alias(a.name, a.holder, a.dtype, tuple(a.shape), a.offset, tuple(a.strides))
        for a in model.aliases
    ]
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2, 2]))):
        at = draw(st.integers(0, len(names) - 1))
        match draw(st.sampled_from(["name", "layer", "kind", "dtype", "shape", "stride", "alias"])):
            case "name":
                names[at] = draw(NAMES)
            case "layer":
                layer = draw(st.integers(0, len(layers) - 1))
                layers[layer] = draw(st.tuples(NAMES, st.just(layers[layer][1]) | INTEGERS))
            case "kind":
                kind[at] = draw(st.integers(0, len(kinds) - 1) | NUMBERS)
            case "dtype":
                kinds[at] = (draw(st.sampled_from(sorted(DTYPE_BITS)) | TEXTS), *kinds[at][1:])
            case "shape":
                kinds[at] = (kinds[at][0], draw(changed(kinds[at][1])), kinds[at][2])
            case "stride":
                kinds[at] = (*kinds[at][:2], draw(changed(kinds[at][2])))
            case _ if aliases:
                alias = draw(st.integers(0, len(aliases) - 1))
                aliases[alias] = draw(changed_alias(aliases[alias]))
            case _:
                aliases.append(Alias("alias", names[at], "U8", (1,), 0, (1,)))
    return layers, names, kinds, kind, aliases


@st.composite
def changed(draw: st.DrawFn, numbers: tuple[int, ...]) -> tuple[int, ...]:
    found = list(numbers)
    at = draw(st.integers(0, len(found)))
    found[at : at + draw(st.integers(0, 1))] = draw(st.lists(INTEGERS, max_size=1))
    return tuple(found)


@st.composite
def changed_alias(draw: st.DrawFn, alias: Alias) -> Alias:
    strategies: dict[str, st.SearchStrategy[Any]] = {
        "name": NAMES,
        "target": NAMES,
        "dtype": st.sampled_from(["U8", "F32", ""]),
        "shape": changed(alias.shape),
        "offset_bytes": INTEGERS,
        "stride": changed(alias.stride),
    }
    field = draw(st.sampled_from(sorted(strategies)))
    fields: dict[str, Any] = {field: draw(strategies[field])}
    return alias._replace(**fields)


@settings(max_examples=400)
@given(columns())
def test_layouts_of_anything(made: Columns) -> None:
    layers, names, kinds, kind, aliases = made
    try:
        layout = build_layout(layers, names, kinds, kind, aliases)
    except ManifestError as error:
        assert str(error).isprintable() and len(str(error)) < 1000
        return
    _is_sound(layout)
    # A hostile sender has an identity for any layout: without bytes, a root may be anything.
    roots = {t.name: bytes(32) if t.nbytes else root_of(b"") for t in layout.tensors}
    records = IdentityRecords(names, kinds, kind, aliases)
    assert records.read(records.document(roots)) == roots
    # One layout follows from the tensors; no other is ever encoded, or decoded.
    try:
        manifest = encode(layout, Packaging(), roots)
    except ManifestError:
        layout = build_layout(*planned_again((layers, names, kinds, kind, aliases), layout.version))
        _is_sound(layout)
        return
    assert planned_again((layers, names, kinds, kind, aliases), layout.version)[:2] == (
        layers,
        names,
    )
    assert decode(manifest.ref, manifest.documents) == manifest
    if layout.payload_nbytes < 1 << 40:
        _is_cut(manifest)


def _is_sound(layout: Layout) -> None:
    """Each tensor has a place of its own in an arena that may exist."""
    assert 0 <= layout.arena_nbytes <= MAX_ARENA_BYTES + 4096
    end = 0
    for tensor in layout.tensors:
        begin = layout.layers[tensor.layer].arena_offset + tensor.offset
        assert begin >= end and tensor.nbytes >= 0
        end = begin + tensor.nbytes
    assert end <= layout.arena_nbytes
    every = [t.name for t in layout.tensors] + [a.name for a in layout.aliases]
    assert len(set(every)) == len(every)
    sizes = {t.name: t.nbytes for t in layout.tensors}
    for alias in layout.aliases:
        if 0 not in alias.shape:
            last = sum((n - 1) * s for n, s in zip(alias.shape, alias.stride, strict=True))
            size = DTYPE_BITS[alias.dtype] // 8
            assert alias.offset_bytes + (last + 1) * size <= sizes[alias.target]


def _is_cut(manifest: Manifest) -> None:
    grid = manifest.grid
    assert sum(grid.sizes) == manifest.layout.payload_nbytes
    for layer in range(len(manifest.layout.layers)):
        nbytes = 32 * grid.layer_blocks[layer]
        if nbytes:
            try:
                check_page(manifest, layer, bytes(nbytes))
            except DigestError:
                continue
            raise AssertionError("zeros are the digests of nothing")
        check_page(manifest, layer, b"")
