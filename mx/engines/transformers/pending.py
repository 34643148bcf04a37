"""Pending tensors: a module's parameters while their layers arrive.

A `Pending` takes a parameter's place. Its form (shape, dtype, device) is known at once. An operator
that uses it waits until its value has arrived, and computes with that. While a model is being built
operators do not wait either: their result is pending, too, and is computed once the tensors that it
is made of have arrived.

`mx.engines.transformers.arrival` makes the values and puts them in place.
"""

from __future__ import annotations

import copy
import operator
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_iter, tree_map_only

from mx.errors import MxError, another

#: What makes a value: its tensor, or several of them.
Made = Any


class Values:
    """The values of one model's pending tensors, for the threads that wait for them.

    One thread makes them (`mx.engines.transformers.arrival`): a `Pending` only waits.
    """

    def __init__(self, same: Callable[[str, str], bool], device: str = "cpu") -> None:
        """
        Args:
            same: Returns whether two tensors of the model, by name, have the same bytes.
            device: Where they will be, as torch names it.
        """
        self.device = torch.device(device)
        #: While the model is built, operators don't wait.
        self.building = True
        self.same = same
        self.changed = threading.Condition()
        self.error: MxError | None = None

    def wait(self, value: Value) -> Made:
        """Return the tensors of a value, as soon as they have arrived.

        Raises:
            MxError: Why it will not come.
        """
        if not value.here:
            with self.changed:
                while not value.here:
                    if self.error is not None:
                        raise another(self.error)
                    self.changed.wait()
        return value.made

    def failed(self, error: MxError) -> None:
        """Raise this error in all threads that wait, or will wait, for a value that has not
        arrived."""
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    def forked(self, error: MxError) -> None:
        """Fail in a forked child, without the lock, which a thread of the parent may have held."""
        self.changed = threading.Condition()
        self.error = error


class Value:
    """One value: the tensor of this name, or what an operator makes of others."""

    __slots__ = ("here", "made", "meta", "name", "needs", "own", "source")

    def __init__(
        self,
        meta: Any,
        needs: frozenset[str],
        name: str = "",
        source: tuple[Callable[..., Any], Any, Any] | None = None,
    ) -> None:
        """
        Args:
            meta: The form of the value: a tensor on the meta device, or several.
            needs: The names of the tensors that it is made of.
            name: The name of the tensor that the value is, unchanged; "" if it is made of others.
            source: The operator that makes it, and its arguments, values in the place of tensors.
        """
        self.meta = meta
        self.needs = needs
        self.name = name
        self.source = source
        #: Whether its memory will be its own, not that of a tensor that it is a view of.
        self.own = False
        self.here = False
        self.made: Made = None

    def make(self, tensors: Mapping[str, torch.Tensor]) -> Made:
        """Make the value from tensors that have arrived, once.

        Args:
            tensors: The tensors by name, at least those in `needs`.
        """
        if not self.here and self.made is None:
            if self.source is None:
                self.made = tensors[self.name]
            else:
                operate, args, kwargs = self.source
                args, kwargs = tree_map_only(Value, lambda each: each.make(tensors), (args, kwargs))
                self.made = operate(*args, **kwargs)
                self.source = None  # releases what it was made of
        return self.made

    def settle(self, made: torch.Tensor) -> None:
        """Set the tensors that take the value's place, and wake those that wait."""
        self.made = made
        self.here = True


class Pending(torch.Tensor):
    """A tensor whose value has not arrived yet."""

    mx_value: Value
    mx_values: Values
    _is_param: bool
    _is_hf_initialized: bool

    @staticmethod
    def of(values: Values, value: Value, meta: torch.Tensor) -> Pending:
        """Return a tensor that stands for a value of this form."""
        made: Pending = torch.Tensor._make_wrapper_subclass(
            Pending,
            meta.size(),
            strides=meta.stride(),
            dtype=meta.dtype,
            layout=meta.layout,
            device=values.device,
        )
        made.mx_value, made.mx_values = value, values
        return made

    def here(self) -> torch.Tensor:
        """Wait for the value and return it.

        Raises:
            MxError: Why it will not come.
        """
        found: torch.Tensor = self.mx_values.wait(self.mx_value)
        return found

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self.mx_value.here:
            return repr(self.mx_value.made)
        return f"<not here yet: {tuple(self.shape)} {self.dtype}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = copy.deepcopy(self.here(), memo)
        found: torch.Tensor = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduce: Callable[[Any], Any] = self.here().__reduce_ex__
        return reduce(protocol)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FORM:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _GRADIENTS:
            return _about_gradients(func, args, kwargs)
        first = next(each for each in tree_iter((args, kwargs)) if isinstance(each, Pending))
        if first.mx_values.building:
            return _later(first.mx_values, func, args, kwargs)
        args, kwargs = tree_map_only(Pending, Pending.here, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is not a classmethod for mypy
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # Code in C++ that calls operators comes here, past `__torch_function__`.
        args, kwargs = tree_map_only(Pending, Pending.here, (args, kwargs or {}))
        return func(*args, **kwargs)


def _properties(*names: str) -> Iterator[Any]:
    for name in names:
        if hasattr(torch.Tensor, name):
            yield getattr(torch.Tensor, name).__get__


#: What is answered by a tensor's form, without its value.
_FORM = frozenset(
    [
        *_properties(
            "shape", "dtype", "device", "layout", "ndim", "names", "itemsize", "nbytes",
            "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_mkldnn", "is_mps", "is_mtia",
            "is_quantized", "is_sparse", "is_sparse_csr", "is_xpu", "is_xla", "is_ipu",
            "is_nested", "is_maia", "is_vulkan", "grad_fn", "_backward_hooks",
            "output_nr", "retains_grad",
        ),
        *(
            getattr(torch.Tensor, name, None)
            for name in (
                "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride",
                "is_floating_point", "is_complex", "is_contiguous", "is_signed", "is_conj",
                "is_inference", "get_device", "__len__", "is_same_size",
            )
        ),
        torch.is_floating_point,
        torch.is_complex,
        torch.is_signed,
        torch.is_conj,
        torch.is_inference,
        torch.is_same_size,
        torch.numel,
    ]
)  # fmt: skip

_REQUIRES_GRAD = torch.Tensor.requires_grad
_GRAD = torch.Tensor.grad
#: What is about gradients: a pending tensor keeps whether it wants them, and has none.
_GRADIENTS = frozenset(
    [
        _REQUIRES_GRAD.__get__,  # type: ignore[attr-defined]
        _REQUIRES_GRAD.__set__,  # type: ignore[attr-defined]
        torch.Tensor.requires_grad_,
        _GRAD.__get__,  # type: ignore[union-attr]
    ]
)


def _about_gradients(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call a function about gradients on a pending tensor, and on the tensor that replaced it."""
    pending = args[0]
    with pending.mx_values.changed:  # it is not put in place meanwhile
        if pending.mx_value.here:
            return func(pending.mx_value.made, *args[1:], **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _set_item(tensor: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    """Write to a part of a tensor, and return the tensor, as other in-place operators do."""
    tensor[index] = value
    return tensor


_GETITEM: Any = torch.Tensor.__getitem__
_SETITEM: Any = torch.Tensor.__setitem__
_TO: Any = torch.Tensor.to
_DETACH: Any = torch.Tensor.detach
_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_EQUAL: tuple[Any, ...] = (torch.equal, torch.Tensor.equal)


def _later(
    values: Values, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Return the pending result of an operator on tensors that have not arrived."""
    if func is _GETITEM and args[1] is Ellipsis:
        return args[0]
    if func in _EQUAL and (known := _equal(values, *args)) is not None:
        return known
    pending = [each for each in tree_iter((args, kwargs)) if isinstance(each, Pending)]
    meta: Any
    writes = _in_place(func)
    if func == _SET_DATA and isinstance(args[1], Pending) and args[0].shape == args[1].shape:
        args[0].mx_value = args[1].mx_value
        return None
    if func is _TO:
        kwargs, args = _conversion(*args, **kwargs), args[:1]
        meta = args[0].mx_value.meta.to(**kwargs)
        if meta is args[0].mx_value.meta:
            return args[0]
    elif writes and not _is_own(args[0] if args else kwargs.get("tensor")):
        raise NotImplementedError(f"{func} writes to a tensor that is not here yet")
    else:
        formal = tree_map_only(torch.Tensor, _form, (args, kwargs))
        with torch.no_grad():
            meta = func(*formal[0], **formal[1])
    if func is _SETITEM:
        func, meta = _set_item, pending[0].mx_value.meta  # it returns nothing itself
    needs = frozenset().union(*(each.mx_value.needs for each in pending))
    args, kwargs = tree_map_only(Pending, lambda each: each.mx_value, (args, kwargs))
    if isinstance(meta, torch.Tensor):
        name = pending[0].mx_value.name if func is _DETACH else ""
        value = Value(meta, needs, name, (func, args, kwargs))
        if writes:  # of what was computed before, such as the weight of a weight norm
            value.own, pending[0].mx_value = True, value
            return pending[0]
        value.own = _storage(meta) not in {_storage(each.mx_value.meta) for each in pending}
        return Pending.of(values, value, meta)
    if isinstance(meta, list | tuple) and all(isinstance(each, torch.Tensor) for each in meta):
        # The parts share one value, which is made once.
        every = Value(meta, needs, "", (func, args, kwargs))
        return tuple(
            Pending.of(values, Value(each, needs, "", (operator.itemgetter(i), (every,), {})), each)
            for i, each in enumerate(meta)
        )
    raise NotImplementedError(f"{func} needs values of tensors that are not here yet")


def _form(tensor: torch.Tensor) -> torch.Tensor:
    """Return a stand-in for an operand, on which the form of a result is computed."""
    if isinstance(tensor, Pending):
        meta: torch.Tensor = tensor.mx_value.meta
        return meta
    # Operators take no tensors of two devices; as an index they do, of which the values may count.
    return tensor.to("meta") if tensor.is_floating_point() else tensor


def _is_own(written: object) -> bool:
    """Return True if an operator may write to a tensor: it is not a view of one of the model's."""
    return isinstance(written, Pending) and written.mx_value.own


def _storage(meta: torch.Tensor) -> int:
    return int(meta.untyped_storage()._cdata)


def _in_place(func: Callable[..., Any]) -> bool:
    """Return True if an operator, by its name, writes to a tensor that it is given."""
    name = getattr(func, "__name__", "")
    return name in ("__set__", "__setitem__") or _IN_PLACE.fullmatch(name) is not None


_IN_PLACE = re.compile(
    r"[a-z0-9_]*[a-z0-9]_|__i(add|sub|mul|(true|floor)?div|mod|pow|and|or|xor)__"
)


def _conversion(tensor: Pending, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of `Tensor.to` except for the device: the model is built as if on the
    CPU."""
    kwargs.pop("copy", None)
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    if device is not None and device.type != "cpu":
        raise NotImplementedError(f"a tensor that is not here yet can't move to {device}")
    return {
        "dtype": dtype or tensor.mx_value.meta.dtype,
        "memory_format": memory_format or torch.preserve_format,
    }


def _equal(values: Values, one: object, other: object) -> bool | None:
    """Return whether two tensors of the model have equal values; None if that is not known yet."""
    if isinstance(one, Pending) and isinstance(other, Pending):
        names = one.mx_value.name, other.mx_value.name
        if all(names):
            same = one.shape == other.shape and one.dtype == other.dtype
            return same and (names[0] == names[1] or values.same(*names))
    return None
