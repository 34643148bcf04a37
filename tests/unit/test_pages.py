"""Pages: the right one is believed, from any source, and no other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.core.manifest import decode
from mx.core.pages import Pages, check_page
from mx.core.types import Manifest
from mx.errors import DigestError, IntegrityError
from mx.units import MIB
from tests.support import naive_identity as naive
from tests.support.manifests import manifest_of, modelled, models, pages_of
from tests.support.naive_identity import Model, Tensor


def tensor(layer: int, name: str, nbytes: int, seed: int) -> Tensor:
    return Tensor(f"layers.{layer}.x.{name}", "U8", [nbytes], [], naive.pattern(seed, nbytes))


FIRST_LAYER = [tensor(0, "a", 2 * MIB, 1), tensor(0, "b", 2 * MIB, 2), tensor(0, "c", 5, 3)]
MIXED = [tensor(1, "d", 0, 0), tensor(1, "e", MIB + 1, 4), tensor(1, "f", 0, 0)]
EMPTY = [tensor(2, "g", 0, 0), tensor(2, "h", 0, 0)]
TWINS = [tensor(3, "i", 100, 5), tensor(3, "j", 100, 5), tensor(3, "k", 101, 5)]
MODEL = modelled([*FIRST_LAYER, *MIXED, *EMPTY, *TWINS])
PAGES = pages_of(MODEL)
FIRST = PAGES[0]


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    made = manifest_of(MODEL)
    return decode(made.ref, made.documents)


def refused(manifest: Manifest, layer: int, page: bytes) -> bool:
    with pytest.raises(DigestError, match=manifest.layout.layers[layer].name + "|tensor") as caught:
        check_page(manifest, layer, page)
    return isinstance(caught.value, IntegrityError)


def test_the_right_pages(manifest: Manifest) -> None:
    assert [len(page) // 32 for page in PAGES] == manifest.grid.layer_blocks == [5, 2, 0, 3]
    for layer, page in enumerate(PAGES):
        check_page(manifest, layer, page)


@pytest.mark.parametrize("layer", range(len(PAGES)))
def test_each_flipped_bit(manifest: Manifest, layer: int) -> None:
    page = PAGES[layer]
    for at in range(len(page)):
        wrong = bytearray(page)
        wrong[at] ^= 1 << at % 8
        assert refused(manifest, layer, bytes(wrong))


@pytest.mark.parametrize("layer", range(len(PAGES)))
def test_each_other_length(manifest: Manifest, layer: int) -> None:
    page = PAGES[layer]
    for nbytes in range(len(page)):
        assert refused(manifest, layer, page[:nbytes])
    for more in (b"\0", bytes(32), page[-32:] or bytes(32), page or bytes(64)):
        assert refused(manifest, layer, page + more)
        assert refused(manifest, layer, more + page)


def test_digests_in_another_order(manifest: Manifest) -> None:
    digests = [FIRST[i : i + 32] for i in range(0, len(FIRST), 32)]
    for one in range(len(digests)):
        for two in range(one):
            swapped = list(digests)
            swapped[one], swapped[two] = swapped[two], swapped[one]
            assert refused(manifest, 0, b"".join(swapped))
    assert refused(manifest, 0, FIRST[64:128] + FIRST[:64] + FIRST[128:])  # two whole tensors
    assert refused(manifest, 0, FIRST[32:] + FIRST[:32])


def test_pages_of_another_layer_or_model(manifest: Manifest) -> None:
    for layer in range(len(PAGES)):
        for other, page in enumerate(PAGES):
            if other != layer:
                assert refused(manifest, layer, page)
    assert refused(manifest, 0, bytes(len(FIRST)))
    other_model = modelled([*FIRST_LAYER[:2], tensor(0, "c", 5, 99), *MIXED, *EMPTY, *TWINS])
    page = pages_of(other_model)[0]
    assert refused(manifest, 0, page) and refused(manifest_of(other_model), 0, FIRST)
    check_page(manifest_of(other_model), 0, page)


def test_twins_may_change_places(manifest: Manifest) -> None:
    """Equal bytes have equal digests: there is nothing to tell, and nothing to gain. A tensor with
    the same block and another length is none of them."""
    page = PAGES[3]
    assert page[:32] == page[32:64] != page[64:]
    check_page(manifest, 3, page[32:64] + page[:32] + page[64:])
    assert refused(manifest, 3, page[:32] * 3)


def test_the_error_names_the_tensor(manifest: Manifest) -> None:
    with pytest.raises(DigestError, match=r"tensor layers\.0\.x\.b do"):
        check_page(manifest, 0, FIRST[:95] + bytes([FIRST[95] ^ 1]) + FIRST[96:])


@given(models(), st.data())
def test_exactly_what_the_second_implementation_accepts(model: Model, data: st.DataObject) -> None:
    manifest = manifest_of(model)
    layer = data.draw(st.integers(0, len(model.layers) - 1))
    tensors = model.in_layers[layer]
    page = naive.page(tensors)
    change = data.draw(st.sampled_from(["none", "cut", "more", "other", "rotate"]))
    if change == "cut":
        page = page[: data.draw(st.integers(0, len(page)))]
    elif change == "more":
        page += data.draw(st.binary(max_size=64))
    elif change == "other":
        page = naive.page(data.draw(st.sampled_from(model.in_layers)))
    elif change == "rotate":
        page = page[32:] + page[:32]
    roots = [naive.root(each.data) for each in tensors]
    lengths = [each.nbytes for each in tensors]
    if naive.page_is_right(lengths, roots, page):
        check_page(manifest, layer, page)
    else:
        assert refused(manifest, layer, page)


# -- the pages that are known ---------------------------------------------------------------------


def test_pages_become_known(manifest: Manifest) -> None:
    pages = Pages(manifest)
    assert pages.missing == [0, 1, 3]  # the layer without bytes needs none
    assert [pages.get(layer) for layer in range(4)] == [None, None, b"", None]
    assert [pages.nbytes(layer) for layer in range(4)] == [len(page) for page in PAGES]
    pages.put(1, PAGES[1])
    assert pages.get(1) == PAGES[1] and pages.missing == [0, 3]


def test_pages_of_a_whole_model(manifest: Manifest) -> None:
    pages = Pages.whole(manifest, PAGES)
    assert pages.missing == [] and [pages.get(layer) for layer in range(4)] == PAGES
