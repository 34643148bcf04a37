"""torch's tensors in the memory of a stand-in GPU.

torch is built for CPUs here. Its tensors lie in the stand-in's device memory, which a setting makes
accessible, and so everything computes; to mx alone they say that they are on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from mx.buffers import memory_at
from mx.cuda.device import Device, DeviceMemory
from mx.cuda.driver import load
from mx.memory import tensors

#: The GPU that all are on.
DEVICE = torch.device("cuda:1")
#: Samples and digests are smaller, weights are larger.
_SMALL_BYTES = 4096


class Owner:
    """Device memory at an address, freed with this object."""

    def __init__(self, address: int, memory: object = None) -> None:
        self.address, self._memory = address, memory


class Gpu:
    """A GPU as mx sees it. `host_copies` are the calls that copied tensors of it to the host;
    `allocate` gives tensors their memory."""

    def __init__(self) -> None:
        self.host_copies: list[str] = []
        self.device = Device(load(), DEVICE.index)
        self.allocate: Callable[[int], Owner] = self._own
        self._ranges: list[tuple[int, int]] = []

    def _own(self, nbytes: int) -> Owner:
        memory = DeviceMemory(self.device, max(1, nbytes))
        return Owner(memory.address, memory)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return True for a tensor in this GPU's memory."""
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return False  # one that has no memory
        at = tensor.data_ptr() if tensor.layout is torch.strided else 0
        return any(begin <= at < end for begin, end in self._ranges)

    def _at(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        self._ranges.append((address, address + nbytes))
        return torch.frombuffer(memory_at(address, nbytes, owner), dtype=torch.uint8)

    def _new(self, nbytes: int) -> torch.Tensor:
        owner = self.allocate(nbytes)
        return self._at(owner.address, max(1, nbytes), owner)[:nbytes]

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in the GPU's memory."""
        flat = self._new(tensor.nbytes)
        return flat.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def install(self) -> None:
        """Have mx, and what moves tensors to this GPU, see it from now on."""
        owner: Any = torch.Tensor
        views: Any = tensors
        found, is_cpu, move = owner.device, owner.is_cpu, owner.to

        def device_of(tensor: Any) -> Any:
            return DEVICE if _asks() and self.holds(tensor) else found.__get__(tensor)

        def is_on_cpu(tensor: Any) -> Any:
            return is_cpu.__get__(tensor) and not (_asks() and self.holds(tensor))

        def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            known = {name: value for name, value in kwargs.items() if name != "copy"}
            device, dtype, *_ = torch._C._nn._parse_to(*args, **known)
            if device is None or device.type != "cuda":
                if _asks() and device is not None:
                    self._copied(tensor, "to")
                return move(tensor, *args, **kwargs)
            cast = tensor if dtype is None else move(tensor, dtype)
            return cast if self.holds(cast) else self.moved(cast)

        maker: Any = torch
        empty = maker.empty_strided

        def empty_strided(size: Any, stride: Any, *, device: Any = None, **named: Any) -> Any:
            if device is None or torch.device(device).type != "cuda":
                return empty(size, stride, device=device, **named)
            like = empty(size, stride, device="meta", **named)
            return self._new(like.nbytes).view(like.dtype).as_strided(size, stride)

        for name in ("cpu", "numpy", "tolist", "clone"):
            self._watch(name)
        maker.empty_strided = empty_strided
        owner.device, owner.is_cpu, owner.to = property(device_of), property(is_on_cpu), to
        views._on_device = lambda array, _: self._at(
            array.view.address, len(array.view), array.view
        )

    def _watch(self, name: str) -> None:
        original = getattr(torch.Tensor, name)

        def watched(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not (_asks() and self.holds(tensor)):
                return original(tensor, *args, **kwargs)
            if name == "clone":
                return self.moved(tensor)  # it stays where the tensor is
            self._copied(tensor, name)
            return tensor + 0 if name == "cpu" else original(tensor, *args, **kwargs)

        setattr(torch.Tensor, name, watched)

    def _copied(self, tensor: torch.Tensor, how: str) -> None:
        if tensor.nbytes >= _SMALL_BYTES and self.holds(tensor):
            self.host_copies.append(f"{how} of {list(tensor.shape)}")


def _asks() -> bool:
    """Return True if the caller of the caller is mx."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("mx.")
