"""Tensors that a pull fills: all that differs is said at once, and nothing is written before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mx.api.tensors import in_place
from mx.core.layout import plan_layout
from mx.core.types import Layout
from mx.errors import ClosedError, ConfigError
from mx.memory import live as claims
from mx.memory.arrays import arrays_of
from mx.memory.describe import describe_arrays
from mx.memory.in_place import InPlace
from mx.views import host_view

Weights = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    yield
    assert claims._claims == []


def weights(fill: float | None = None) -> Weights:
    embed, pool = torch.rand(6, 4), torch.rand(40)
    found = {
        "embed": embed,
        "head": embed,
        "l.turned": torch.rand(3, 5).t(),
        "l.a": pool[:16],
        "l.b": pool[16:],
        "l.spread": pool[3].expand(7),
        "l.none": torch.rand(0, 3),
        "l.step": torch.tensor(3),
    }
    if fill is not None:
        for tensor in (embed, pool, found["l.turned"], found["l.step"]):
            tensor.fill_(fill)
    return found


def layout_of(tensors: Mapping[str, Any]) -> Layout:
    found = describe_arrays(arrays_of(tensors))
    return plan_layout(found.specs, found.aliases)


def bits(tensor: Any) -> bytes:
    return bytes(np.ascontiguousarray(tensor.numpy() if hasattr(tensor, "numpy") else tensor))


def refusal(into: Mapping[str, Any], layout: Layout) -> str:
    before = {name: bits(tensor) for name, tensor in into.items()}
    with pytest.raises(ConfigError, match="nothing was written") as caught:
        in_place(into).arena(layout)
    assert {name: bits(tensor) for name, tensor in into.items()} == before
    return caught.value.message


def test_tensors_that_are_reshaped_while_a_pull_waits_are_not_written_to() -> None:
    """Their memory is where it was, and as large."""
    layout = layout_of({"a": torch.zeros(2, 6), "b": torch.zeros(4)})
    into = {"a": torch.ones(2, 6), "b": torch.ones(4)}
    filled = in_place(into)
    into["a"].resize_(6, 2)
    with pytest.raises(ConfigError, match="nothing was written"):
        filled.arena(layout)
    assert all(tensor.eq(1).all() for tensor in into.values())


def test_what_fits_is_an_arena_of_the_tensors_own_memory() -> None:
    model, into = weights(), weights(0)
    layout = layout_of(model)
    filled = in_place(into)
    arena = filled.arena(layout)
    arrays = arrays_of(model)
    for tensor in layout.tensors:
        begin = layout.layers[tensor.layer].arena_offset + tensor.offset
        host_view(arena.view[begin : begin + tensor.nbytes])[:] = host_view(
            arrays[tensor.name].view()
        )
    assert all(torch.equal(into[name], model[name]) for name in model)
    found = filled.tensors(["head", "l.none"])
    assert found["head"] is into["head"] and found["l.none"] is into["l.none"]
    arena.release()
    filled.release()
    with pytest.raises(ClosedError):
        filled.tensors(["head"])


def test_everything_that_differs_is_in_one_error() -> None:
    layout = layout_of(weights())
    frozen = np.zeros(24, np.float32)
    frozen.flags.writeable = False
    into = weights() | {
        "embed": torch.rand(4, 6),
        "l.turned": torch.rand(5, 3),
        "l.b": frozen,
        "l.step": torch.tensor(3.0),
        "surplus": torch.rand(2),
    }
    del into["l.a"]
    message = refusal(into, layout)
    for what in (
        "missing here: l.a",
        "not in the model: surplus",
        "embed is F32 [4, 6] here, F32 [6, 4] in the model",
        "l.turned has the strides [3, 1] here, [1, 5] in the model",
        "l.b is read-only",
        "l.step is F32 [] here, I64 [] in the model",
        "head shares the memory of embed in the model, and not here",
    ):
        assert what in message


def test_ties_have_to_be_the_models() -> None:
    layout = layout_of(weights())
    loose = weights()
    loose["head"] = loose["head"].clone()
    assert "head shares the memory of embed in the model" in refusal(loose, layout)
    shifted = weights()
    shifted["l.spread"] = shifted["l.a"][4].expand(7)
    assert "l.spread shares the memory of l.a in the model" in refusal(shifted, layout)
    copied = weights()
    copied["l.spread"] = copied["l.a"][3:10]
    assert "l.spread" in refusal(copied, layout)
    tied = weights()
    tied["l.b"] = tied["embed"].view(-1)
    assert "shares memory with" in refusal(tied, layout)


def test_names_may_be_many_and_are_counted() -> None:
    layout = layout_of({f"w{i:04}": torch.rand(1) for i in range(1000)})
    message = refusal({f"v{i:04}": torch.rand(1) for i in range(1000)}, layout)
    assert "w0000, w0001, w0002, w0003, w0004 and 995 more" in message
    assert len(message) < 400


def test_what_has_no_memory_is_refused_at_once_and_by_every_name() -> None:
    into = weights() | {
        "l.a": torch.empty(16, device="meta"),
        "l.b": torch.empty(24, device="meta"),
        "l.none": torch.rand(2, 2).to_sparse(),
    }
    with pytest.raises(ConfigError, match="nothing was written") as caught:
        in_place(into)
    assert "l.a, l.b is on the meta device" in caught.value.message
    assert "l.none" in caught.value.message
    assert "to_empty" in caught.value.hint


def test_a_modules_other_buffers_may_be_absent_from_the_model() -> None:
    class Rotary(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Linear(2, 2)
            self.register_buffer("kept", torch.ones(2))
            self.register_buffer("left_out", torch.ones(3), persistent=False)

    module = Rotary()
    without = layout_of(module.state_dict())
    all_of_it = layout_of({**module.state_dict(), "left_out": module.left_out})
    for layout in (without, all_of_it):
        in_place(module).arena(layout).release()
    with pytest.raises(ConfigError, match="not in the model: kept"):
        in_place(module).arena(layout_of({"w.weight": module.w.weight, "w.bias": module.w.bias}))
    with pytest.raises(ConfigError, match="missing here: left_out"):
        in_place(module.state_dict()).arena(all_of_it)


def test_memory_is_filled_by_one_at_a_time() -> None:
    into = weights()
    layout = layout_of(weights())
    arena = in_place(into).arena(layout)
    with pytest.raises(ConfigError, match="another pull or broadcast fills it") as caught:
        in_place({**into}).arena(layout)
    assert "close" in caught.value.hint
    arena.release()
    in_place(into).arena(layout).release()


def test_what_is_neither_is_refused() -> None:
    for what in ([torch.rand(2)], {1: torch.rand(2)}, {"a": [1.0]}, {"a": None}):
        with pytest.raises(ConfigError):
            in_place(what)
    assert isinstance(in_place({}), InPlace)


names = st.lists(st.sampled_from([f"l.{i}" for i in range(5)]), unique=True)
shapes = st.sampled_from([(), (0,), (3,), (2, 3), (3, 2)])
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int8])
forms = names.flatmap(
    lambda chosen: st.fixed_dictionaries({name: st.tuples(shapes, dtypes) for name in chosen})
)


@given(forms.filter(bool), forms)
def test_only_equal_forms_fit_and_each_difference_is_named(
    model: dict[str, Any], here: dict[str, Any]
) -> None:
    def made(form: dict[str, Any]) -> Weights:
        return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in form.items()}

    layout, into = layout_of(made(model)), in_place(made(here))
    if model == here:
        into.arena(layout).release()
        return
    with pytest.raises(ConfigError) as caught:
        into.arena(layout)
    for name in model.keys() | here.keys():
        assert (name in caught.value.message) == (model.get(name) != here.get(name))


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), min_size=1, max_size=6))
def test_tensors_anywhere_in_one_memory_are_filled_where_they_are(
    places: list[tuple[int, int]],
) -> None:
    """Against pairs of ranges: which share bytes, and which lie within another one."""
    pool = torch.zeros(26, dtype=torch.uint8)
    into = {f"model.layers.{i}.w": pool[at : at + n] for i, (at, n) in enumerate(places)}
    layout = layout_of({name: torch.zeros_like(each) for name, each in into.items()})
    ranges = {name: set(range(at, at + n)) for name, (at, n) in zip(into, places, strict=True)}
    others = {name: [ranges[o] for o in into if o != name] for name in into}
    if any(ranges[name] and ranges[name] <= other for name in into for other in others[name]):
        with pytest.raises(ConfigError, match="shares memory with"):
            in_place(into).arena(layout)
        return
    arena = in_place(into).arena(layout)
    try:
        shared = {name for name in into if any(ranges[name] & other for other in others[name])}
        assert arena.overlapping == {t.layer for t in layout.tensors if t.name in shared}
        for number, tensor in enumerate(layout.tensors, 1):
            begin = layout.layers[tensor.layer].arena_offset + tensor.offset
            if tensor.nbytes:
                span = host_view(arena.view[begin : begin + tensor.nbytes])
                span[:] = bytes([number]) * tensor.nbytes
        for number, tensor in enumerate(layout.tensors, 1):
            assert tensor.name in shared or into[tensor.name].eq(number).all()
        assert not pool[sorted(set(range(26)) - set().union(*ranges.values()))].any()
    finally:
        arena.release()
