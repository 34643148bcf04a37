"""Layouts, and the references to manifests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mx.core.digest import pin_of
from mx.core.grid import Layer
from mx.core.layout import TensorSpec, plan_layout
from mx.core.types import (
    Layout,
    Manifest,
    ManifestRef,
    Packaging,
    SourceRecord,
    SourceRole,
    Tensor,
    cover,
)
from tests.support.records import make_documents, make_record

LAYERS = [Layer(0, "part.0", 1, 0, ((0, 1),), 0)]
REF = ManifestRef(b"\xab" * 32, b"l" * 32, b"p" * 32, (3, 5, 7))


def test_tensors_are_made_once_and_when_asked_for() -> None:
    made = []

    def make() -> list[Tensor]:
        made.append(1)
        return [Tensor("a", "U8", (1,), 0, 0, 1)]

    layout = Layout(LAYERS, make)
    assert (layout.arena_nbytes, layout.payload_nbytes, made) == (4096, 1, [])
    assert layout.tensors is layout.tensors
    assert made == [1]
    assert layout == Layout(LAYERS, make())
    assert layout != Layout(LAYERS, [])


def test_the_forms_of_tensors_need_no_tensors() -> None:
    specs = [TensorSpec("b", "F32", (2, 3), (1, 2)), TensorSpec("a", "U8", (5,))]
    layout = plan_layout([*specs, TensorSpec("c", "U8", (5,))])
    made = Layout(layout.layers, layout.tensors)
    for each in (layout, made):
        names, kinds, kind = each.forms
        assert [(name, *kinds[k]) for name, k in zip(names, kind, strict=True)] == [
            (t.name, t.dtype, t.shape, t.stride) for t in layout.tensors
        ]
        assert len(kinds) == 2


def test_a_manifest_is_shown_on_one_line() -> None:
    layout = Layout(LAYERS, [Tensor("a", "U8", (1,), 0, 0, 1)])
    shown = repr(Manifest(REF, layout, Packaging(), (b"r" * 32,), {b"d" * 32: b"document" * 1000}))
    assert "\n" not in shown and len(shown) < 100 and REF.pin.hex()[:16] in shown


def test_threads_that_ask_for_tensors_at_once_all_get_them() -> None:
    """From Python 3.12 on, a cached property has no lock: two threads may both find it empty."""
    layout = Layout(LAYERS, lambda: [Tensor("a", "U8", (1,), 0, 0, 1)])
    make = Layout.__dict__["tensors"].func
    assert make(layout) == make(layout) == layout.tensors == (Tensor("a", "U8", (1,), 0, 0, 1),)


def test_an_arena_is_whole_pages_and_a_layer_space_ends_with_its_last_tensor() -> None:
    specs = [TensorSpec("m.layers.0.a.w", "U8", (4095,)), TensorSpec("m.layers.0.b.w", "U8", (2,))]
    layout = plan_layout([*specs, TensorSpec("m.layers.1.a.w", "U8", (1,))])
    assert [(x.arena_offset, x.nbytes) for x in layout.layers] == [(0, 4098), (8192, 1)]
    assert (layout.arena_nbytes, layout.payload_nbytes) == (12288, 4098)
    assert Layout([], []).arena_nbytes == Layout([], []).payload_nbytes == 0


def test_the_documents_of_a_reference() -> None:
    assert REF.documents == [(REF.identity, 3), (REF.layout, 5), (REF.packaging, 7)]
    bare = replace(REF, packaging=b"", sizes=(3, 5, 0))
    assert bare.documents == REF.documents[:2]
    assert bare.pin == REF.identity and REF.pin == pin_of(REF.identity, REF.packaging)


@pytest.mark.parametrize("digits", [1, 8, 64])
def test_pins(digits: int) -> None:
    for pin in (REF.identity.hex(), REF.pin.hex()):
        assert REF.pinned_by(pin[:digits]) and REF.pinned_by(pin[:digits].upper())
    assert not REF.pinned_by("c" * digits) or REF.pin.hex().startswith("c" * digits)
    assert not REF.pinned_by(REF.identity.hex() + "0")
    assert not REF.pinned_by(REF.layout.hex()) and not REF.pinned_by(REF.packaging.hex())


def test_sources_cover_a_model_where_they_hold_every_layer_together() -> None:
    def relay(*held: tuple[int, int]) -> SourceRecord:
        return make_record(make_documents("A"), held=held, role=SourceRole.RELAY)

    first, last, both_ends = relay((0, 2)), relay((2, 4)), relay((0, 1), (3, 4))
    assert cover([relay((0, 4))]) and cover([first, last]) and cover([last, both_ends, first])
    assert not cover([]) and not cover([first]) and not cover([first, both_ends])
    assert cover([first, both_ends], own=[(2, 3)])
    assert cover([make_record(make_documents("A"), held=())])  # an origin has all
