"""A layer's tensors as views of the memory that they are in."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest

from mx.core.layout import TensorSpec
from mx.core.manifest import plan_layout
from mx.core.types import Alias, Layout
from mx.errors import ClosedError
from mx.fetching.report import LayerEvent
from mx.memory.arrays import layer_views
from mx.views import DeviceView, ScatteredView, TensorView, host_view

SPECS = [
    TensorSpec("embed_tokens.weight", "BF16", (4, 3)),
    TensorSpec("layers.0.a", "I16", (2, 5), (1, 2)),
    TensorSpec("layers.0.scalar", "F32", ()),
    TensorSpec("layers.0.none", "F32", (0, 4)),
    TensorSpec("layers.0.packed", "F4", (3, 4)),
]
TIED = [
    Alias("lm_head.weight", "embed_tokens.weight", "BF16", (4, 3), 0, (3, 1)),
    Alias("embed_tokens.row", "embed_tokens.weight", "BF16", (3,), 6, (1,)),
    Alias("embed_tokens.column", "embed_tokens.weight", "BF16", (4,), 2, (3,)),
]


@pytest.fixture
def layout() -> Layout:
    return plan_layout(SPECS, TIED)


def filled(layout: Layout) -> bytes:
    return bytes(i % 251 for i in range(layout.arena_nbytes))


def everything(layout: Layout, arena: memoryview | ScatteredView) -> dict[str, TensorView]:
    found: dict[str, TensorView] = {}
    for layer in layout.layers:
        views = layer_views(layer.index, layout, arena)
        assert not views.keys() & found.keys()
        found |= views
    return found


def test_each_tensor_has_its_form_and_its_bytes(layout: Layout) -> None:
    data = filled(layout)
    found = everything(layout, memoryview(bytearray(data)))
    assert found.keys() == {each.name for each in SPECS} | {each.name for each in TIED}
    for tensor in layout.tensors:
        begin = layout.layers[tensor.layer].arena_offset + tensor.offset
        view = found[tensor.name]
        assert (view.dtype, view.shape) == (tensor.dtype, tensor.shape)
        assert bytes(host_view(view.view)) == data[begin : begin + tensor.nbytes]
        assert isinstance(view.view, memoryview) and view.view.readonly
    assert found["layers.0.a"].stride == (1, 2) and found["layers.0.packed"].stride == (4, 1)
    assert found["layers.0.scalar"].stride == () and found["layers.0.none"].view.nbytes == 0


def test_tied_tensors_are_where_their_target_is(layout: Layout) -> None:
    found = everything(layout, memoryview(bytearray(filled(layout))))
    target = np.frombuffer(host_view(found["embed_tokens.weight"].view), "<u2").reshape(4, 3)
    for name, right in {
        "lm_head.weight": target,
        "embed_tokens.row": target[1],
        "embed_tokens.column": target[:, 1],
    }.items():
        view = found[name]
        flat = np.frombuffer(host_view(view.view), "<u2")
        strides = [2 * each for each in view.stride]
        assert np.array_equal(np.lib.stride_tricks.as_strided(flat, view.shape, strides), right)


def test_views_see_what_is_written_and_keep_the_memory(layout: Layout) -> None:
    memory = np.zeros(layout.arena_nbytes, np.uint8)
    gone = weakref.ref(memory)
    view = host_view(everything(layout, memory.data)["layers.0.scalar"].view)
    memory[:] = 7
    del memory
    gc.collect()
    assert bytes(view) == b"\7" * 4 and gone() is not None
    del view
    assert gone() is None


def test_tensors_in_several_places_are_each_in_one(layout: Layout) -> None:
    data = filled(layout)
    begins, parts = [], []
    for tensor in layout.tensors:
        if tensor.nbytes:
            begins.append(layout.layers[tensor.layer].arena_offset + tensor.offset)
            parts.append(memoryview(bytearray(data[begins[-1] : begins[-1] + tensor.nbytes])))
    arena = ScatteredView.over(begins, parts, layout.arena_nbytes)
    whole = everything(layout, memoryview(data))
    for name, view in everything(layout, arena).items():
        assert view == whole[name]
        assert isinstance(view.view, memoryview) and view.view.readonly


def test_device_memory_is_named_where_it_is(layout: Layout) -> None:
    owner = object()
    arena = DeviceView("cuda:GPU-1", 1 << 20, layout.arena_nbytes, owner)
    (tensor,) = [each for each in layout.tensors if each.name == "layers.0.a"]
    begin = layout.layers[tensor.layer].arena_offset + tensor.offset
    found = layer_views(tensor.layer, layout, arena)["layers.0.a"]
    assert found.view == DeviceView("cuda:GPU-1", (1 << 20) + begin, tensor.nbytes, owner)


def test_an_event_whose_pull_is_gone_says_so() -> None:
    event = LayerEvent(3, "model.layers.2", 8, "digest", 0.1)
    with pytest.raises(ClosedError, match="the pull of layer 3 is gone"):
        event.views()
    assert replace(event) == event
