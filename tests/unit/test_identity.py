"""The identity and the other documents: as docs/identity.md says, and as mx promises."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.core.digest import PIN_CONTEXT, ROOT_CONTEXT
from mx.core.identity import IdentityRecords
from mx.core.manifest import decode
from mx.core.pages import check_page
from mx.core.types import DTYPE_BITS, Manifest, ManifestRef
from mx.errors import ManifestError
from tests.support import naive_identity as naive
from tests.support.identity_vectors import model_of, stored, vectors
from tests.support.manifests import manifest_of, modelled, models, pages_of
from tests.support.naive_identity import Alias, Model, Tensor

VECTORS = stored()
MODELS: list[dict[str, Any]] = VECTORS["models"]


# -- the format -----------------------------------------------------------------------------------


def test_the_published_vectors_are_those_of_the_second_implementation() -> None:
    assert vectors() == VECTORS


@pytest.mark.parametrize("vector", MODELS, ids=lambda v: str(v["name"]))
def test_published_models(vector: dict[str, Any]) -> None:
    model = model_of(vector)
    manifest = manifest_of(model)
    ref = manifest.ref
    for what, digest in (
        ("identity", ref.identity), ("layout", ref.layout), ("packaging", ref.packaging)
    ):  # fmt: skip
        assert manifest.documents.get(digest, b"").hex() == vector[f"{what}_document"]
        assert digest.hex() == vector[what]
    assert ref.pin.hex() == vector["pin"]
    pages = [bytes.fromhex(page) for page in vector["pages"]]
    assert pages_of(model) == pages
    decoded = decode(ref, manifest.documents)
    for layer, page in enumerate(pages):
        check_page(decoded, layer, page)


@given(models())
def test_both_implementations_agree(model: Model) -> None:
    manifest = manifest_of(model)
    identity = manifest.documents[manifest.ref.identity]
    assert identity == naive.identity_document(model)
    assert manifest.documents[manifest.ref.layout] == naive.layout_document(model)
    assert manifest.ref.pin == manifest.ref.identity == naive.digest(identity)
    assert decode(manifest.ref, manifest.documents) == manifest


def test_the_page_on_the_format_says_what_is_so() -> None:
    page = (Path(__file__).parents[2] / "docs" / "identity.md").read_text(encoding="utf-8")
    for length, root in re.findall(r"^\| ([\d,]+) \| `([0-9a-f]{64})` \|$", page, re.M):
        assert naive.root(naive.pattern(0, int(length.replace(",", "")))).hex() == root
    one_byte = next(vector for vector in MODELS if vector["name"] == "one byte")
    head, _, rest = bytes.fromhex(one_byte["identity_document"]).partition(b"\n")
    assert f"\n    {head.decode()}\n" in page and rest.startswith(b"w\0")
    assert f"`{one_byte['identity']}`" in page
    assert f"`{ROOT_CONTEXT}`" in page and f"`{PIN_CONTEXT}`" in page
    assert set(DTYPE_BITS) <= set(re.findall(r"`(\w+)`", page)) and naive.BITS == DTYPE_BITS


# -- what is promised -----------------------------------------------------------------------------


@given(models(), st.randoms(use_true_random=False))
def test_nothing_depends_on_the_order_of_tensors(model: Model, rng: Any) -> None:
    shuffled = rng.sample(model.tensors, len(model.tensors))
    other = modelled(shuffled, rng.sample(model.aliases, len(model.aliases)))
    assert manifest_of(other) == manifest_of(model)


@given(models(), st.data())
def test_nothing_depends_on_which_of_tied_names_held_the_bytes(
    model: Model, data: st.DataObject
) -> None:
    one = manifest_of(model)
    ties = [(a, t) for a in model.aliases for t in model.tensors if naive.views_all(a, t)]
    if not ties:
        return
    alias, tensor = data.draw(st.sampled_from(ties))
    old, new = tensor.name, alias.name
    for each in model.aliases:
        each.holder = new if each.holder == old else each.holder
    alias.name, tensor.name = old, new
    assert manifest_of(model) == one


def base() -> Model:
    """A model of two tensors and a view of a part of the first."""
    tensors = [
        Tensor("a", "F32", [2, 3], [], naive.pattern(1, 24)),
        Tensor("b", "F32", [3, 2], [1, 3], naive.pattern(2, 24)),
    ]
    return modelled(tensors, [Alias("view", "a", "F32", [3], 12, [1])])


def change_of(index: int = 0, **fields: Any) -> Callable[[Model], None]:
    """Return a function that changes a tensor, and what its alias says of it."""

    def change(model: Model) -> None:
        vars(model.tensors[index]).update(fields)
        alias = model.aliases[0]
        alias.dtype, alias.holder = model.tensors[0].dtype, model.tensors[0].name

    return change


def change_of_alias(**fields: Any) -> Callable[[Model], None]:
    return lambda model: vars(model.aliases[0]).update(fields)


def change_of_tensors(*more: Tensor) -> Callable[[Model], None]:
    return lambda model: model.tensors.extend(more)


CHANGES: dict[str, Callable[[Model], object]] = {
    "name": change_of(name="c"),
    "dtype": change_of(dtype="I32"),
    "shape": change_of(shape=[3, 2]),
    "dimensions": change_of(shape=[2, 3, 1]),
    "strides": change_of(strides=[1, 2]),
    "no strides": change_of(1, strides=[]),
    "bytes": change_of(data=naive.pattern(1, 23) + b"\0"),
    "other bytes": change_of(data=naive.pattern(2, 24)),
    "an alias less": lambda model: model.aliases.clear(),
    "an alias's name": change_of_alias(name="other"),
    "an alias's shape": change_of_alias(shape=[2]),
    "an alias's offset": change_of_alias(offset=8),
    "an alias's strides": change_of_alias(strides=[0]),
    "an alias's holder": change_of_alias(holder="b"),
    "an alias more": lambda model: model.aliases.append(Alias("more", "a", "F32", [1], 0, [1])),
    "a tensor less": lambda model: model.tensors.pop(),
    "an empty tensor more": change_of_tensors(Tensor("c", "F32", [0])),
    "a copy": change_of_tensors(Tensor("a2", "F32", [2, 3], [], naive.pattern(1, 24))),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_identity_depends_on(change: Callable[[Model], object]) -> None:
    model = base()
    change(model)
    changed = modelled(model.tensors, model.aliases)
    assert manifest_of(changed).ref.identity != manifest_of(base()).ref.identity


def test_each_change_gives_an_identity_of_its_own() -> None:
    found = set()
    for change in CHANGES.values():
        model = base()
        change(model)
        found.add(manifest_of(modelled(model.tensors, model.aliases)).ref.identity)
    assert len(found) == len(CHANGES)


def test_strides_where_none_is_taken_do_not_matter() -> None:
    """Libraries say anything there, and the same tie may have come from two of them."""
    tensor = Tensor("b", "F32", [1, 6], [], naive.pattern(1, 24))
    ties = [Alias("a", "b", "F32", [1, 6], 0, [stride, 1]) for stride in (0, 1, 6, 99)]
    found = {manifest_of(modelled([tensor], [tie])).ref for tie in ties}
    swapped = Tensor("a", "F32", [1, 6], [], tensor.data)
    back = Alias("b", "a", "F32", [1, 6], 0, [7, 1])
    found.add(manifest_of(modelled([swapped], [back])).ref)
    assert len(found) == 1


def test_one_pin_for_weights_with_files_and_another_for_weights_alone() -> None:
    vector = next(v for v in MODELS if v["name"] == "layers")
    with_files = manifest_of(model_of(vector)).ref
    bare = manifest_of(model_of({**vector, "files": [], "side_files": []})).ref
    assert with_files.identity == bare.identity == bare.pin != with_files.pin
    for pin in (bare.pin.hex(), bare.pin.hex()[:8].upper()):
        assert bare.pinned_by(pin) and with_files.pinned_by(pin)
    assert with_files.pinned_by(with_files.pin.hex()) and not bare.pinned_by(with_files.pin.hex())
    side_file = dict(vector, side_files=[["config.json", 3, naive.digest(b"{} ").hex()]])
    assert manifest_of(model_of(side_file)).ref.pin != with_files.pin


# -- what is refused ------------------------------------------------------------------------------


def records_of(manifest: Manifest) -> IdentityRecords:
    tensors = manifest.layout.tensors
    kinds = [(t.dtype, t.shape, t.stride) for t in tensors]
    names = [t.name for t in tensors]
    return IdentityRecords(names, kinds, list(range(len(kinds))), manifest.layout.aliases)


@pytest.mark.parametrize("vector", MODELS, ids=lambda v: str(v["name"]))
def test_records_read_what_they_wrote_and_nothing_else(vector: dict[str, Any]) -> None:
    manifest = manifest_of(model_of(vector))
    records = records_of(manifest)
    document = manifest.documents[manifest.ref.identity]
    roots = dict(zip([t.name for t in manifest.layout.tensors], manifest.roots, strict=True))
    assert records.read(document) == roots and records.document(roots) == document
    head = len(document) - 32 * len(roots)
    for at in range(head):
        changed = document[:at] + bytes([document[at] ^ 1]) + document[at + 1 :]
        with pytest.raises(ManifestError):
            records.read(changed)
    for wrong in (b"", document[:head], document[:-1], document[:-32], document + bytes(32)):
        with pytest.raises(ManifestError):
            records.read(wrong)
    flipped = document[:head] + bytes([document[head] ^ 1]) + document[head + 1 :]
    assert records.read(flipped) != roots  # a root that no page will prove


@pytest.mark.parametrize("wrong", [None, b"", bytes(31), bytes(33)])
def test_each_tensor_has_a_root(wrong: bytes | None) -> None:
    manifest = manifest_of(base())
    roots = {"a": bytes(32), "b": bytes(32)}
    del roots["b"]
    with pytest.raises(ManifestError, match="'b' has no root"):
        records_of(manifest).document(roots if wrong is None else roots | {"b": wrong})


def test_a_layer_without_bytes_has_the_roots_of_nothing() -> None:
    """No page would ever prove them."""
    empty = [Tensor("x.0.w.c", "F32", [0]), Tensor("x.0.w.d", "F32", [2, 0])]
    manifest = manifest_of(modelled([*base().tensors, *empty]))
    document = manifest.documents[manifest.ref.identity]
    assert decode(manifest.ref, manifest.documents).roots[:2] == (naive.root(b""),) * 2
    for at in (-1, -33, -64):
        data = bytearray(document)
        data[at] ^= 1
        identity = naive.digest(bytes(data))
        ref: ManifestRef = replace(manifest.ref, identity=identity)
        with pytest.raises(ManifestError, match="layer x.0 is empty"):
            decode(ref, manifest.documents | {identity: bytes(data)})
