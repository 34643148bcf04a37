"""Puts a trainer's weights into the parameters of a model that vLLM runs.

A module whose parameters are copies of a checkpoint's tensors, or of slices of them, is written to
where it is. Others go through vLLM's own reload, module by module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from mx.engines.replica.regions import Region, are_disjoint, box_of, slice_of, within
from mx.engines.vllm.processed import on_cpu
from mx.engines.vllm.tracing import TracedCopy, tensors_of, trace
from mx.errors import ConfigError, LocalError
from mx.text import listed

Slice = tuple[int, int, int]


class Installation:
    """How one model takes the tensors of one checkpoint's form: found once, used at each update."""

    def __init__(
        self,
        model: torch.nn.Module,
        tensors: Mapping[str, torch.Tensor],
        *,
        by_values: bool = False,
    ) -> None:
        """Find out. Nothing is written to the model.

        Args:
            model: vLLM's, with its weights.
            tensors: The checkpoint's tensors by name, on the meta device.
            by_values: They have their values, which `load_weights` looks at: all goes through
                vLLM's reload, and this is for this update alone.

        Raises:
            ConfigError: Some parameters would not be written.
            UntraceableError: That takes the tensors' values.
            Exception: What the model's `load_weights` raises.
        """
        self.by_values = by_values
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        self._model, self._trace = model, trace(model, tensors.items())
        self._parameters = tensors_of(model)
        self._copies: dict[str, list[TracedCopy]] = {}
        for copy in self._trace.copies:
            self._copies.setdefault(copy.parameter, []).append(copy)
        self._require_all()

    @cached_property
    def _shared(self) -> dict[int, set[str]]:
        """By the memory of tensors with elements, the names of those that have it."""
        found: dict[int, set[str]] = {}
        for name, tensor in self._parameters.items():
            if tensor.numel():
                found.setdefault(tensor.data_ptr(), set()).add(name)
        return found

    def _ties(self, name: str) -> set[str]:
        tensor = self._parameters.get(name)
        return {name} if tensor is None else self._shared.get(tensor.data_ptr(), {name})

    def _require_all(self) -> None:
        """Refuse weights that leave a parameter as it was."""
        from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

        missing = []
        for name, form in self._trace.forms.items():
            if not isinstance(form, torch.nn.Parameter):
                continue  # a buffer, which checkpoints need not have
            if name in self._trace.computed or not form.numel():
                continue
            if any(each in self._trace.computed for each in self._ties(name)):
                continue
            written = max(self._written_numel(each) for each in self._ties(name))
            module = self._module_of(name)
            if written == 0 and _is_computed(module):  # a scale, made of the module's weights
                if not any(map(self._written_numel, self._names_in(module))):
                    missing.append(name)
            elif written < get_tensor_load_numel(form):
                missing.append(name)
        if missing:
            raise ConfigError(
                f"these weights leave {listed(sorted(missing))} as they were",
                hint="serve all parameters of the model, by the names of its checkpoint",
            )

    def _written_numel(self, name: str) -> int:
        regions = [copy.target for copy in self._copies.get(name, ())]
        return sum(each.numel for each in regions + self._trace.fills.get(name, []))

    def _module_of(self, name: str) -> torch.nn.Module:
        return self._model.get_submodule(name.rpartition(".")[0])

    @cached_property
    def _names(self) -> dict[torch.nn.Module, list[str]]:
        """By module the names of its tensors, as they are loaded."""
        found: dict[torch.nn.Module, list[str]] = {}
        for name in self._trace.forms:
            found.setdefault(self._module_of(name), []).append(name)
        return found

    def _names_in(self, module: torch.nn.Module) -> Sequence[str]:
        return self._names.get(module, ())

    # -- which modules are written to where they are

    @cached_property
    def written_in_place(self) -> tuple[torch.nn.Module, ...]:
        """The modules that are written to where they are."""
        return tuple(each for each in self._names if self._is_direct(each))

    @cached_property
    def reloaded(self) -> tuple[torch.nn.Module, ...]:
        """The modules that go through vLLM's reload."""
        return tuple(
            module
            for module, names in self._names.items()
            if not self._is_direct(module)
            and any(name in self._copies or name in self._trace.computed for name in names)
        )

    def _is_direct(self, module: torch.nn.Module) -> bool:
        names = self._names_in(module)
        held = {name for name, tensor in self._own(module)}
        loaded = [name for name in names if self._copies.get(name)]
        return (
            bool(loaded)
            and not self.by_values
            and not _is_computed(module)
            and held == set(names)
            and all(map(self._is_copied, names))
        )

    def _own(self, module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        place = next(name.rpartition(".")[0] for name in self._names_in(module))
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    yield (f"{place}.{name}" if place else name), tensor

    def _is_copied(self, name: str) -> bool:
        """Return True if a tensor has the form that it is loaded in, and nothing, or copies alone,
        are put there."""
        form, tensor = self._trace.forms[name], self._parameters.get(name)
        if (
            tensor is None
            or name in self._trace.computed
            or (tensor.shape, tensor.dtype) != (form.shape, form.dtype)
            or (tensor.numel() and tensor.stride() != form.stride())
        ):
            return False
        copies, fills = self._copies.get(name, []), self._trace.fills.get(name, [])
        if any(copy.tensor in self._trace.used for copy in copies):
            return False
        if not copies and not fills:
            return True
        regions = [each for each in (*(c.target for c in copies), *fills) if each.numel]
        boxes = [box_of(each, tuple(form.shape)) for each in regions]
        whole = sum(each.numel for each in regions) == form.numel()
        return whole and all(boxes) and are_disjoint(box for box in boxes if box is not None)

    # -- which tensors are needed

    @cached_property
    def _reloading(self) -> set[str]:
        """The checkpoint's tensors that vLLM's reload is given."""
        found = set(self.shapes if self.by_values else self._trace.used)
        for name in (name for module in self.reloaded for name in self._names_in(module)):
            found |= self._trace.computed.get(name, set())
            found |= {copy.tensor for copy in self._copies.get(name, ())}
        return found

    @cached_property
    def _placed(self) -> list[TracedCopy]:
        """The copies to modules that are written to where they are."""
        names = [name for module in self.written_in_place for name in self._names_in(module)]
        return [copy for name in names for copy in self._copies.get(name, ())]

    @cached_property
    def wanted(self) -> dict[str, Slice | None]:
        """By the checkpoint's tensors that are needed, the slice of each: (dim, begin, end), or
        None for all of it."""
        found: dict[str, Slice | None] = dict.fromkeys(self._reloading)
        regions: dict[str, list[Region]] = {}
        for copy in self._placed:
            regions.setdefault(copy.tensor, []).append(copy.source)
        for name, parts in regions.items():
            found.setdefault(name, slice_of(parts, self.shapes[name]))
        return found

    @property
    def is_sliced(self) -> bool:
        """Whether less than all tensors is needed, or slices of them."""
        return len(self.wanted) < len(self.shapes) or any(self.wanted.values())

    def fits(self, forms: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> bool:
        """Return True if this was found for tensors of these types and shapes."""
        return {n: (self.dtypes[n], self.shapes[n]) for n in self.shapes} == dict(forms)

    # -- the update itself

    def write(
        self, tensors: Mapping[str, torch.Tensor], model_config: Any, device: torch.device
    ) -> None:
        """Write an update's weights to the model.

        If this raises, the model holds a part of them.

        Args:
            tensors: By name, what is wanted of the checkpoint's tensors, whole or sliced,
                contiguous. Read until this returns.
            model_config: The engine's, for vLLM's reload.
            device: Where vLLM builds modules.
        """
        with torch.no_grad():
            for copy in self._placed:
                target = _view(self._parameters[copy.parameter], copy.target)
                target.copy_(self._source(tensors[copy.tensor], copy))
            again = [*self.written_in_place, *self._tied]
            if self.reloaded:
                self._reload(tensors, model_config, device)
            for module in dict.fromkeys(again):
                _process_in_place(module)
            if not self.reloaded:  # else vLLM's reload has done it
                for layer in _attention(self._model):
                    layer.process_weights_after_loading(model_config.dtype)
            hook: Any = getattr(self._model, "process_weights_after_loading", None)
            if hook is not None:  # as after loading
                hook()

    def _source(self, tensor: torch.Tensor, copy: TracedCopy) -> torch.Tensor:
        part = self.wanted[copy.tensor]
        if part is None or tuple(tensor.shape) == self.shapes[copy.tensor]:
            return _view(tensor, copy.source)
        return _view(tensor, within(copy.source, self.shapes[copy.tensor], part))

    @cached_property
    def _tied(self) -> list[torch.nn.Module]:
        """Modules to which nothing is written, and which have a tensor of another that is."""
        written = {n for m in (*self.written_in_place, *self.reloaded) for n in self._names_in(m)}
        return [
            module
            for module, names in self._names.items()
            if not written & set(names) and any(self._ties(name) & written for name in names)
        ]

    def _reload(
        self, tensors: Mapping[str, torch.Tensor], model_config: Any, device: torch.device
    ) -> None:
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )
        from vllm.model_executor.model_loader.reload.layerwise import (
            _place_kernel_tensors,
            get_layerwise_info,
        )

        modules = list(dict.fromkeys([*self.reloaded, *_attention(self._model)]))
        for module in modules:
            info = get_layerwise_info(module)
            if info.restore_device.type == "meta":  # it was built without memory
                info.restore_device = device
            method = getattr(module, "quant_method", None)
            if on_cpu() and getattr(method, "moe_kernel", None) is not None:
                # vLLM 0.32 for CPUs packs experts only while it makes their kernel, and computes
                # with what an update has not packed.
                method.moe_kernel = None  # type: ignore[union-attr]
        some: Any = _Modules(modules)
        try:
            with device:
                initialize_layerwise_reload(some)
                self._model.load_weights(  # type: ignore[operator]
                    (name, tensors[name]) for name in self.shapes if name in self._reloading
                )
                for module in self.reloaded:
                    info = get_layerwise_info(module)
                    if info.can_load() and not info.load_numel:
                        lacks = next(iter(self._names_in(module)))
                        raise LocalError(f"vLLM's reload has not taken {lacks}")
                finalize_layerwise_reload(some, model_config)
        except BaseException:
            for module in modules:  # else the next reload goes on with what this one has taken
                info = get_layerwise_info(module)
                if info.kernel_tensors is not None:
                    _place_kernel_tensors(module, info)
                info.reset()
            raise


class _Modules:
    """What vLLM's reload takes for a model: some modules of one."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._modules = modules

    def modules(self) -> Sequence[torch.nn.Module]:
        """Return them."""
        return self._modules


def _view(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    plain = tensor.detach().as_subclass(torch.Tensor)
    offset = plain.storage_offset() + region.offset
    return plain.as_strided(region.shape, region.strides, offset)


def _is_computed(module: torch.nn.Module) -> bool:
    """Return True if vLLM makes a module's weights of those that it loads: quantised, or fused."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    method = getattr(module, "quant_method", None)
    plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    return isinstance(method, QuantizeMethodBase) and not isinstance(method, plain)


def _attention(model: torch.nn.Module) -> Iterator[Any]:
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    return filter(is_deferred_attention_layer, model.modules())


def _process_in_place(module: Any) -> None:
    """Have vLLM process a module's weights, as after loading. What it makes anew is put where the
    module's tensors were: CUDA graphs read there."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    method = getattr(module, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase):
        return
    held = {
        name: (tensor, tensor.data)
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    }
    vars(module).pop("_already_called_process_weights_after_loading", None)
    try:
        method.process_weights_after_loading(module)
        if hasattr(module, "update_param_tp_status"):
            module.update_param_tp_status()
        for name, (_, memory) in held.items():
            if (new := getattr(module, name)).data_ptr() != memory.data_ptr():
                memory.copy_(new.data)
    finally:  # also of one that failed: the next update writes there
        _put_back(module, held)


def _put_back(module: Any, held: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    for name, (tensor, memory) in held.items():
        tensor.data = memory
        group = module._parameters if name in module._parameters else module._buffers
        group[name] = tensor
