"""What a model's `load_weights` does with a checkpoint's tensors, seen without any values.

vLLM says nowhere which part of which tensor goes where: its models' code knows. That code runs here
on the meta device, and each copy is noted as PyTorch dispatches it.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mx.engines.replica.regions import Region
from mx.errors import LocalError

Pairs = Iterable[tuple[str, torch.Tensor]]


class UntraceableError(LocalError):
    """`load_weights` does something that can't be done without the values, or writes elsewhere."""


class TracedCopy(NamedTuple):
    """A region of a checkpoint's tensor that is copied to one of a parameter."""

    tensor: str
    source: Region
    parameter: str
    target: Region


@dataclass
class Trace:
    """What became of a checkpoint's tensors. Parameters, and buffers, have their names in the
    model."""

    copies: list[TracedCopy] = field(default_factory=list)
    #: By parameter, what is set to one value.
    fills: defaultdict[str, list[Region]] = field(default_factory=lambda: defaultdict(list))
    #: By parameter that is computed, the tensors that it is computed from.
    computed: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    #: The tensors that anything is computed from.
    used: set[str] = field(default_factory=set)
    #: The load-time forms of the parameters and buffers.
    forms: dict[str, torch.Tensor] = field(default_factory=dict)


def trace(model: torch.nn.Module, pairs: Pairs) -> Trace:
    """Run a model's `load_weights` with parameters on the meta device.

    The model has its own parameters again afterwards, and nothing is written to them.

    Args:
        model: The model.
        pairs: The tensors: on the meta device, or with values where the code looks at them.

    Raises:
        UntraceableError: It can't be run so.
        Exception: What `load_weights` raises, such as KeyError for a name that it does not know.
    """
    found = Trace()
    with on_meta(model) as found.forms:
        sources = dict(pairs)
        with _CopyTracer(found, sources), torch.no_grad():
            try:
                model.load_weights(iter(sources.items()))  # type: ignore[operator]
            except (NotImplementedError, RuntimeError, TypeError) as error:
                # Of meta tensors: they have no values. A wrong shape is told with values, too.
                raise UntraceableError(f"load_weights needs the weights' values: {error}") from None
    return found


@contextlib.contextmanager
def on_meta(model: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Give a model the parameters and buffers that its weights are loaded into, on the meta device,
    until the block ends. Yields them by their names.

    What the block sets in modules is undone, too.
    """
    from vllm.model_executor.model_loader.reload.layerwise import (
        _get_original_loader,
        get_layerwise_info,
    )
    from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta, to_meta_tensor

    held = [(module, _state_of(module)) for module in model.modules()]
    try:
        for module, _ in held:
            restore_layer_on_meta(module, get_layerwise_info(module))
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():  # those that vLLM leaves where they are
                    if tensor is not None and not tensor.is_meta:
                        tensors[name] = to_meta_tensor(tensor)
        found = tensors_of(model)
        for tensor in found.values():  # a reload leaves loaders of its own, which load nothing now
            loader: Any = getattr(tensor, "weight_loader", None)
            if getattr(loader, "__name__", "") == "online_process_loader":
                tensor.weight_loader = _get_original_loader(tensor)  # type: ignore[attr-defined]
        yield found
    finally:
        for module, (attributes, members) in held:
            vars(module).clear()
            vars(module).update(attributes)
            for name, content in members.items():
                attributes[name].clear()
                attributes[name].update(content)


#: The attributes of modules that are collections, which are changed where they are.
_MEMBERS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def _state_of(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    attributes = dict(vars(module))
    return attributes, {name: attributes[name].copy() for name in _MEMBERS}


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's parameters and buffers by their names, also those that several have."""
    return {
        f"{place}.{name}" if place else name: tensor
        for place, module in model.named_modules()
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    }


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _CopyTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is done with the storages of checkpoint tensors and parameters."""

    def __init__(self, found: Trace, sources: dict[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found
        self._sources = {_key(each): name for name, each in sources.items()}
        self._dtypes = {name: each.dtype for name, each in sources.items()}
        self._targets = {_key(each): name for name, each in found.forms.items()}
        #: By storage that was made meanwhile, the tensors that it was computed from. The storages
        #: are kept, so that no other one gets their place.
        self._made: dict[int, set[str]] = {}
        self._kept: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        written = self._written(func, args, kwargs)
        for each in written:
            key = _key(each)
            if key not in self._targets and key not in self._made and each.numel():
                raise UntraceableError(f"load_weights writes beside the parameters ({func})")
        result = func(*args, **kwargs)
        if written:
            self._note_write(func, written[0], given)
        else:
            self._note_result(given, result)
        return result

    @staticmethod
    def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        found = []
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[number] if number < len(args) else kwargs.get(argument.name)
                found += [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
        return found

    def _note_write(self, func: Any, target: torch.Tensor, given: list[torch.Tensor]) -> None:
        """Note that `target` was written to, from the others of `given`."""
        key, others = _key(target), [each for each in given if each is not target]
        name = self._targets.get(key)
        if name is None:
            self._made[key] |= self._origins(others)
            self._found.used |= self._made[key]
        elif func is torch.ops.aten.copy_.default and (
            source := self._sources.get(_key(others[0])) if others else None
        ):
            self._found.copies += [TracedCopy(source, _region(others[0]), name, _region(target))]
            dtypes = (others[0].dtype, target.dtype)
            if others[0].shape != target.shape or dtypes != self._dtypes_of(source, name):
                self._compute(name, {source})  # one element for many, or the bits as another type
        elif not others and func.name().startswith(("aten::fill_", "aten::zero_")):
            if target.numel():
                self._found.fills[name].append(_region(target))
        elif target.numel():
            self._compute(name, self._origins(others))

    def _dtypes_of(self, source: str, name: str) -> tuple[torch.dtype, torch.dtype]:
        return self._dtypes[source], self._found.forms[name].dtype

    def _compute(self, name: str, origins: set[str]) -> None:
        self._found.computed[name] |= origins
        self._found.used |= origins

    def _note_result(self, given: list[torch.Tensor], result: Any) -> None:
        """Note what new tensors are made of; views have the storage of what they view."""
        known = {_key(each) for each in given}
        origins = self._origins(given)
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and (key := _key(each)) not in known:
                self._made[key] = origins
                self._kept.append(each)
                self._found.used |= origins

    def _origins(self, tensors: list[torch.Tensor]) -> set[str]:
        """Return the checkpoint's tensors that these are views of, or computed from."""
        found: set[str] = set()
        for key in map(_key, tensors):
            found |= self._made.get(key, set())
            if key in self._sources:
                found.add(self._sources[key])
            elif key in self._targets:
                found |= self._found.computed.get(self._targets[key], set())
                found |= {
                    copy.tensor
                    for copy in self._found.copies
                    if copy.parameter == self._targets[key]
                }
        return found


def _region(view: torch.Tensor) -> Region:
    return Region(int(view.storage_offset()), tuple(view.shape), tuple(view.stride()))
