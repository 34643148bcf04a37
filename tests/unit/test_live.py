"""Memory that is lent: laid out where it is, hashed there, and watched."""

from __future__ import annotations

import ctypes
import gc
import random
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.roots import root_of
from mx.api.tensors import live_tensors
from mx.core.digest import block_digest, shortcut_digest
from mx.core.grid import BLOCK_BYTES
from mx.core.layout import TensorSpec, plan_layout
from mx.core.types import Layout, ModelKey
from mx.errors import ClosedError, ConfigError
from mx.memory import live as claims
from mx.memory.arrays import arrays_of
from mx.memory.describe import describe_arrays
from mx.memory.live import LiveMemory
from mx.source.model import lend_tensors
from mx.storage.landing import ArenaDigests
from mx.storage.reader import hash_in_place
from mx.views import ScatteredView, host_view


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    yield
    assert claims._claims == []


def weights(seed: int = 1) -> dict[str, torch.Tensor]:
    """Permuted, tied, expanded, empty and neighbouring tensors, one larger than two blocks."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(3000, generator=generator)
    embed = torch.randn(700, 900, generator=generator)
    return {
        "model.embed_tokens.weight": embed,
        "model.layers.0.mlp.up.weight": torch.randn(30, 50, generator=generator).t(),
        "model.layers.0.mlp.a.weight": pool[:1000],
        "model.layers.0.mlp.b.weight": pool[1000:1003],
        "model.layers.1.mlp.b.weight": pool[1003:].view(-1, 1),
        "model.layers.1.mlp.bias": pool[1004].expand(5),
        "model.layers.1.mlp.none": torch.zeros(0, 4),
        "lm_head.weight": embed,
    }


def lent(tensors: Mapping[str, Any], **options: Any) -> tuple[Layout, LiveMemory]:
    arrays = arrays_of(tensors)
    found = describe_arrays(arrays)
    layout = plan_layout(found.specs, found.aliases)
    return layout, LiveMemory(layout, arrays, lambda: tensors, "a test lends it", **options)


def test_every_tensor_is_where_the_layout_has_it_and_in_no_other_memory() -> None:
    tensors = weights()
    layout, memory = lent(tensors)
    assert isinstance(memory.view, ScatteredView) and len(memory.view) == layout.arena_nbytes
    for tensor in layout.tensors:
        begin = layout.layers[tensor.layer].arena_offset + tensor.offset
        here = host_view(memory.view[begin : begin + tensor.nbytes])
        assert bytes(here) == bytes(arrays_of(tensors)[tensor.name].view())  # type: ignore[arg-type]
        here[:] = b"\1" * len(here)
    assert all(bool((t.contiguous().view(torch.uint8) == 1).all()) for t in tensors.values())
    places = [
        place
        for t in layout.tensors
        for place in memory.extents.places(t.layer, t.offset, t.offset + t.nbytes)
    ]
    assert len(places) == sum(t.nbytes > 0 for t in layout.tensors)
    for place in places:
        assert 0 <= place.region_offset <= memory.nbytes - place.nbytes
        at = memory.address + place.region_offset
        assert ctypes.string_at(at, place.nbytes) == b"\1" * place.nbytes
    memory.release()


def test_the_memory_outlives_the_tensors_but_not_its_views() -> None:
    tensors = weights()
    _, memory = lent(tensors)
    view = memory.view
    expected = [bytes(host_view(span)) for span in view.located()[1]]  # type: ignore[union-attr]
    memory.release()
    tensors.clear()
    gc.collect()
    noise = [torch.ones(700, 900) for _ in range(3)]
    assert [bytes(host_view(span)) for span in view.located()[1]] == expected  # type: ignore[union-attr]
    del noise


def test_a_released_source_keeps_no_tensor() -> None:
    # Arrays of numpy own their memory themselves, whereas a tensor of torch has a storage.
    tensors = {name: np.arange(3000.0) for name in ("model.layers.0.up", "model.layers.1.up")}
    arrays = arrays_of(tensors)
    held = lend_tensors(describe_arrays(arrays), arrays, lambda: tensors, ModelKey("m"))
    whole = held.view()
    assert len(whole) == held.manifest.layout.arena_nbytes
    storage = weakref.ref(tensors["model.layers.0.up"])
    del whole, arrays
    tensors.clear()
    gc.collect()
    assert storage() is not None
    held.release()
    gc.collect()
    assert storage() is None


def test_nothing_but_empty_tensors() -> None:
    layout, memory = lent({"a": torch.zeros(0), "b": torch.zeros(3, 0)})
    assert memory.nbytes == 0 and memory.address == 0 and memory.extents.rows == ()
    assert hash_in_place(layout, memory.view).roots == {"a": root_of(b""), "b": root_of(b"")}
    memory.release()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 16)
        self.register_buffer("scale", torch.ones(4))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m: setattr(m.up, "weight", torch.nn.Parameter(m.up.weight.clone())), "up.weight"),
        (lambda m: setattr(m.up.bias, "data", m.up.bias.data.clone()), "up.bias"),
        (lambda m: m.up.weight.untyped_storage().resize_(0), "up.weight"),
        (lambda m: m.up.weight.untyped_storage().resize_(1 << 16), "up.weight"),
        (lambda m: m._buffers.pop("scale"), "scale"),
        (lambda m: setattr(m, "scale", None), "scale"),
        (lambda m: setattr(m.up.weight, "data", m.up.weight.data.t()), "up.weight"),
        (lambda m: m.to(torch.float64), "scale"),
        (lambda m: m.to("meta"), "up.bias"),
    ],
)
def test_what_is_no_longer_where_it_was_is_named(
    change: Callable[[Any], object], named: str
) -> None:
    module = Model()
    tensors = live_tensors(module)
    arrays = arrays_of(tensors())
    found = describe_arrays(arrays)
    layout = plan_layout(found.specs, found.aliases)
    memory = LiveMemory(layout, arrays, tensors, "a test lends it")
    assert memory.changed() == ""
    with torch.no_grad():
        module.up.weight.add_(1)  # a write moves nothing
    assert memory.changed() == ""
    change(module)
    assert named in memory.changed()
    assert "replaced, resized or freed" in memory.changed()
    memory.release()
    assert memory.changed() == "the memory was given back"
    memory.release()


def test_a_tensor_that_left_a_dict_or_was_tied_anew_is_named() -> None:
    tensors = weights()
    _, memory = lent(tensors)
    assert memory.changed() == ""
    tensors["lm_head.weight"] = tensors["lm_head.weight"].clone()
    assert memory.changed().startswith("lm_head.weight: ")
    del tensors["model.layers.0.mlp.a.weight"]
    assert "model.layers.0.mlp.a.weight" in memory.changed()
    memory.release()


def test_memory_that_is_filled_is_not_lent() -> None:
    tensors = weights()
    _, first = lent(tensors)
    _, second = lent(tensors)
    for each in (first, second):
        with pytest.raises(ConfigError, match="a test lends it"):
            lent(tensors, fills=True)
        each.release()
    _, filling = lent({"w": tensors["lm_head.weight"][3:5]}, fills=True)
    with pytest.raises(ConfigError, match="in use"):
        lent(tensors)
    filling.release()


def check_filled(layout: Layout, memory: LiveMemory, filled: ArenaDigests) -> None:
    shortcuts = b""
    for layer in layout.layers:
        page = b""
        for tensor in layout.tensors[layer.first_tensor :][: len(layer.extents)]:
            begin = layer.arena_offset + tensor.offset
            data = bytes(host_view(memory.view[begin : begin + tensor.nbytes]))
            assert filled.roots[tensor.name] == root_of(data)
            blocks = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
            page += b"".join(map(block_digest, blocks))
            shortcuts += b"".join(map(shortcut_digest, blocks))
        assert filled.pages[layer.index] == page
    assert filled.shortcuts == shortcuts


def test_hashed_in_place_it_has_the_digests_of_its_bytes() -> None:
    layout, memory = lent(weights())
    check_filled(layout, memory, hash_in_place(layout, memory.view))
    memory.release()


@given(st.sets(st.integers(0, 5)), st.integers(0, 99))
def test_only_what_is_named_is_hashed_again(chosen: set[int], seed: int) -> None:
    tensors = weights(seed)
    layout, memory = lent(tensors)
    before = hash_in_place(layout, memory.view)
    names = [tensor.name for tensor in layout.tensors]
    changed = {names[i] for i in chosen}
    for name in changed:
        tensors[name].add_(1)
    after = hash_in_place(layout, memory.view, only=changed, before=before)
    check_filled(layout, memory, after)
    # What is not named is believed, so that a change of it does not show.
    others = [n for n in names if n not in changed and tensors[n].numel() > 5]
    if others:
        name = random.Random(seed).choice(others)
        tensors[name].add_(1)
        again = hash_in_place(layout, memory.view, only=changed, before=before)
        assert again.roots == after.roots and again.pages == after.pages
        assert hash_in_place(layout, memory.view).roots[name] != after.roots[name]
    memory.release()


def test_hashing_is_cancelled() -> None:
    layout = plan_layout([TensorSpec("w", "U8", (8 * BLOCK_BYTES,))])
    with pytest.raises(ClosedError):
        hash_in_place(layout, memoryview(bytearray(layout.arena_nbytes)), cancelled=lambda: True)
