"""The tensors that an engine's model holds: looked up by name, filled, and replaced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from mx.core.layout import contiguous_strides
from mx.core.types import Layout, Manifest
from mx.cuda import driver
from mx.errors import ConfigError
from mx.memory.tensors import alias_view, torch_form
from mx.text import listed
from mx.transport import Unavailable


@dataclass(frozen=True)
class ParameterSlot:
    """A model's place for a parameter or buffer, whatever tensor is there at the moment."""

    module: torch.nn.Module
    leaf: str
    parameter: bool

    def get(self) -> torch.Tensor | None:
        """Return the parameter or buffer, or None."""
        inside = self.module._parameters if self.parameter else self.module._buffers
        found: torch.Tensor | None = inside.get(self.leaf)
        return found

    def put(self, tensor: torch.Tensor) -> None:
        """Put a tensor in place of the parameter or buffer. A buffer stays persistent or not."""
        if self.parameter:
            self.module._parameters[self.leaf] = _as_parameter(tensor)
        else:
            self.module._buffers[self.leaf] = tensor


def _as_parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    if isinstance(tensor, torch.nn.Parameter):
        return tensor
    return torch.nn.Parameter(tensor, requires_grad=False)


def slots_of(model: torch.nn.Module, *, non_persistent: bool) -> dict[str, ParameterSlot]:
    """Return the slots of a model by name; tied tensors have one under each name.

    Args:
        model: The model.
        non_persistent: Whether to return the buffers that a state dict leaves out, too.
    """
    found = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                found[start + leaf] = ParameterSlot(module, leaf, True)
        for leaf, buffer in module._buffers.items():
            if buffer is not None and (
                non_persistent or leaf not in module._non_persistent_buffers_set
            ):
                found[start + leaf] = ParameterSlot(module, leaf, False)
    return found


class LiveTensors(Mapping[str, torch.Tensor]):
    """The tensors that slots hold at the moment, for `mx.serve(copy=False)`.

    Wrappers that an engine puts around modules later, as for LoRA, change nothing: a slot belongs
    to the inner module.
    """

    def __init__(self, slots: Mapping[str, ParameterSlot]) -> None:
        self._slots = {name: slot for name, slot in slots.items() if slot.get() is not None}

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._slots[name].get()
        if tensor is None:
            raise KeyError(name)
        return plain(tensor)

    def __iter__(self) -> Iterator[str]:
        return (name for name, slot in self._slots.items() if slot.get() is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of an engine's own class as a plain tensor of the same memory."""
    return tensor.detach().as_subclass(torch.Tensor)


def cannot_move(slots: Mapping[str, ParameterSlot]) -> str:
    """Return the names of tensors without values that could be copied, or ""."""
    bad = [
        name
        for name, slot in slots.items()
        if (tensor := slot.get()) is not None
        and (
            tensor.is_meta
            or torch.nn.parameter.is_lazy(tensor)
            or tensor.layout is not torch.strided
        )
    ]
    return listed(bad)


def check(manifest: Manifest, slots: Mapping[str, ParameterSlot]) -> None:
    """Check that the tensors of a manifest fit the model that they are to fill.

    Args:
        manifest: The manifest that describes the tensors.
        slots: The model's.

    Raises:
        ConfigError: Names, shapes or dtypes differ. All differences are in the message.
    """
    layout = manifest.layout
    coming = {t.name: (t.dtype, tuple(t.shape)) for t in layout.tensors}
    coming |= {a.name: (a.dtype, tuple(a.shape)) for a in layout.aliases}
    wrong = []
    if missing := sorted(slots.keys() - coming.keys()):
        wrong.append(f"not there: {listed(missing)}")
    if extra := sorted(coming.keys() - slots.keys()):
        wrong.append(f"not in this model: {listed(extra)}")
    for name in sorted(slots.keys() & coming.keys()):
        tensor, (torch_dtype, shape) = slots[name].get(), torch_form(*coming[name])
        if tensor is None or tuple(tensor.shape) != shape:
            here = "none" if tensor is None else list(tensor.shape)
            wrong.append(f"{name}: {list(shape)} there, {here} here")
        elif torch_dtype != tensor.dtype:
            wrong.append(f"{name}: {coming[name][0]} there, {tensor.dtype} here")
    if wrong:
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ConfigError(f"the weights do not fit this model: {'; '.join(wrong[:8])}{more}")


def made_for(layout: Layout, device: torch.device) -> dict[str, torch.Tensor]:
    """Return new tensors for a pull to fill, from torch's allocator: in the memory pool that the
    caller's thread uses, such as the one that an engine frees when it sleeps.

    Args:
        layout: What the tensors are to hold. Those that are tied in it share memory.
        device: Where to make them.
    """
    found = {}
    for tensor in layout.tensors:
        dtype, shape = torch_form(tensor.dtype, tensor.shape)
        stride = tensor.stride or contiguous_strides(shape)
        found[tensor.name] = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    for alias in layout.aliases:
        found[alias.name] = alias_view(found[alias.target], alias)
    return found


def device_of(device: torch.device) -> str:
    """Return `device` as `mx.pull` takes it: "cuda:N", or "cpu" for whatever mx can't fill, as
    where cuda-bindings are not installed."""
    if device.type != "cuda" or isinstance(driver.probe(), Unavailable):
        return "cpu"
    return f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"


def common_device(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the device where mx can lend or fill all tensors: "cpu" or "cuda:N"; "" for none."""
    devices = {tensor.device for tensor in tensors.values() if tensor.numel()}
    if len(devices) > 1:
        return ""
    one = next(iter(devices), torch.device("cpu"))
    found = device_of(one)
    return found if found.partition(":")[0] == one.type else ""


@torch.no_grad()
def copy_into(
    slots: Mapping[str, ParameterSlot], tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Copy tensors into those of a model, on any device. Names and shapes have to fit."""
    done: set[int] = set()
    for name, tensor in tensors:
        there = slots[name].get()
        assert there is not None
        if id(there) not in done:  # tied
            done.add(id(there))
            plain(there).copy_(tensor)


def replace(
    model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], device: torch.device
) -> None:
    """Put tensors into a model on the meta device, by name. Those that share memory become one.

    Args:
        model: On the meta device. Slots that hold one tensor get one.
        tensors: The tensors by name. Those that the model has no slot for become parameters.
        device: Where the engine computes.

    Raises:
        ConfigError: The model has no module for a tensor. Then nothing was replaced.
    """
    slots = slots_of(model, non_persistent=True)
    modules = dict(model.named_modules(remove_duplicate=False))
    homeless = [name for name in tensors if name.rpartition(".")[0] not in modules]
    if homeless:
        raise ConfigError(f"this model has no module for {listed(homeless)}")
    tied: dict[int, list[str]] = {}
    for name, slot in slots.items():
        tied.setdefault(id(slot.get()), []).append(name)
    groups = {name: tied[id(slot.get())] for name, slot in slots.items()}
    made: dict[tuple[object, ...], torch.Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, leaf = name.rpartition(".")
        slot = slots.get(name) or ParameterSlot(modules[prefix], leaf, True)
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, slot.parameter)
        one = made.get(place) if tensor.numel() else None
        if one is None:
            moved = tensor.to(device)
            one = made[place] = _as_parameter(moved) if slot.parameter else moved
        slot.put(one)
        for other in groups.get(name, ()):
            if other not in tensors:
                slots[other].put(one)
