"""Tensors that are not here yet: what they answer, what they wait for, what is made of them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch

from mx.engines.transformers.pending import Pending, Value, Values
from mx.errors import ForkError, IncompleteError

FORM = (4, 6)


def pending(values: Values, name: str, shape: tuple[int, ...] = FORM) -> Pending:
    meta = torch.empty(shape, device="meta")
    return Pending.of(values, Value(meta, frozenset([name]), name), meta)


@pytest.fixture
def values() -> Values:
    return Values(lambda one, other: {one, other} == {"a", "same-as-a"})


@pytest.fixture
def here() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(FORM, generator=generator) for name in ("a", "b")}


def test_a_form_is_answered_at_once(values: Values) -> None:
    values.building = False
    values.failed(IncompleteError("nothing comes"))  # so that waiting would raise
    tensor = pending(values, "a")
    tensor._is_param = True
    assert isinstance(tensor, torch.nn.Parameter) and torch.is_tensor(tensor)
    assert (tensor.shape, tensor.dtype, tensor.device.type) == (FORM, torch.float32, "cpu")
    assert (tensor.numel(), tensor.dim(), len(tensor), tensor.nbytes) == (24, 2, 4, 96)
    assert tensor.is_contiguous() and tensor.stride() == (6, 1) and not tensor.is_meta
    assert tensor.is_floating_point() and torch.is_floating_point(tensor)
    assert "not here yet" in repr(tensor) and tensor in {tensor}
    tensor.requires_grad_(True)
    assert tensor.requires_grad and tensor.grad is None and tensor.is_leaf


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t + 1,
        lambda t: t.data_ptr(),
        lambda t: t.sum().item(),
        lambda t: t.data,
        lambda t: t.detach(),
        lambda t: t.numpy(),
        lambda t: t.tolist(),
        lambda t: torch.nn.functional.linear(torch.ones(1, 6), t),
        lambda t: torch.cat([torch.ones(FORM), t]),
        copy.deepcopy,
        lambda t: t.__reduce_ex__(2),
        lambda t: bool((t == 0).any()),
        lambda t: t.untyped_storage(),
        lambda t: t.zero_(),
    ],
)
def test_a_value_that_will_not_come_raises_why(
    use: Callable[[torch.Tensor], object], values: Values
) -> None:
    values.building = False
    values.failed(IncompleteError("the source is gone"))
    for _ in range(2):
        with pytest.raises(IncompleteError, match="the source is gone"):
            use(pending(values, "a"))


def test_an_operator_waits_until_its_value_is_here(
    values: Values, here: dict[str, torch.Tensor]
) -> None:
    values.building = False
    tensor, found = pending(values, "a"), []
    thread = threading.Thread(target=lambda: found.append(tensor + 1))
    thread.start()
    with values.changed:
        tensor.mx_value.settle(tensor.mx_value.make(here))
        values.changed.notify_all()
    thread.join()
    assert torch.equal(found[0], here["a"] + 1) and type(found[0]) is torch.Tensor
    assert torch.equal(copy.deepcopy(tensor), here["a"])
    assert repr(tensor) == repr(here["a"])


def test_what_is_made_of_missing_tensors_is_made_when_they_are_here(
    values: Values, here: dict[str, torch.Tensor]
) -> None:
    def convert(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        stacked = torch.stack([a, b])
        first, second = torch.chunk(a, 2)
        return [
            torch.cat([stacked, stacked * 2], dim=1).transpose(1, 2).contiguous(),
            first,
            second.clone(),
            a[...].to(torch.bfloat16),
            torch.nn.Parameter(b.T),
            a.to("cpu"),
            *torch.split(b, [1, 3]),
        ]

    later = convert(pending(values, "a"), pending(values, "b"))
    expected = convert(here["a"], here["b"])
    for each, other in zip(later, expected, strict=True):
        assert isinstance(each, Pending)
        assert (each.shape, each.dtype, each.stride()) == (
            other.shape,
            other.dtype,
            other.stride(),
        )
        assert each.requires_grad == other.requires_grad
        assert torch.equal(each.mx_value.make(here), other)
    assert later[0].mx_value.needs == {"a", "b"}  # type: ignore[attr-defined]
    assert later[1].mx_value.needs == {"a"}  # type: ignore[attr-defined]


def test_while_building_equal_tensors_are_known_by_their_digests(values: Values) -> None:
    a, b = pending(values, "a"), pending(values, "b")
    assert torch.equal(a, pending(values, "same-as-a")) and torch.equal(a, a.detach())
    assert not torch.equal(a, b)
    with pytest.raises(NotImplementedError):
        torch.equal(a, b.T.contiguous().T * 2)


def test_while_building_nothing_is_written_to_what_is_not_here(
    values: Values, here: dict[str, torch.Tensor]
) -> None:
    a = pending(values, "a")
    for write in (
        a.zero_,
        lambda: a[0].fill_(1),
        lambda: torch.nn.init.normal_(a),
        lambda: a.__setitem__(0, 1.0),
        lambda: a.T.add_(1),
    ):
        with pytest.raises(NotImplementedError, match="writes to a tensor"):
            write()
    own = a * 2
    own.add_(1)  # what was computed may be written to
    assert torch.equal(own.mx_value.make(here), here["a"] * 2 + 1)  # type: ignore[attr-defined]
    scale = torch.arange(6.0)
    assert torch.equal((scale * a).mx_value.make(here), scale * here["a"])  # type: ignore[attr-defined]
    part = torch.zeros_like(a)
    part[1:] = 3.0
    part[:1] = a[2:3]
    made = part.mx_value.make(here)  # type: ignore[attr-defined]
    assert torch.equal(made, torch.cat([here["a"][2:3], torch.full((3, 6), 3.0)]))
    a.data = a.data * 3  # as tying pads biases
    assert torch.equal(a.mx_value.make(here), here["a"] * 3)


def test_a_forked_child_does_not_wait(values: Values) -> None:
    values.building = False
    values.changed.acquire()  # as a thread of the parent may have, when it was forked
    values.forked(ForkError("this process was forked"))
    with pytest.raises(ForkError):
        pending(values, "a").sum()
