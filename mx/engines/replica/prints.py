"""Notices writes to a model's weights that were not announced."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mx.core.digest import shortcut_digest
from mx.engines.replica.tensors import ParameterSlot, plain

#: Of a larger tensor this many pieces of this many bytes are looked at, its ends among them.
_PIECES, _PIECE_BYTES = 16, 64


@dataclass(frozen=True)
class _Print:
    """What is compared of one tensor."""

    place: tuple[object, ...]
    #: torch's counter of writes, which misses those through `.data`; -1 for an inference tensor.
    version: int
    sample: bytes


class Prints:
    """A record of tensors as they are now: their addresses, torch's counters, and samples.

    An update of a model, a merged adapter or another checkpoint is noticed, since nearly every
    element of some tensor changes. A write to a few elements of a large tensor may be missed.
    """

    def __init__(self, slots: Mapping[str, ParameterSlot]) -> None:
        """
        Args:
            slots: The slots of the tensors. Those on devices are read, too: make it on a thread
                that may use the device.
        """
        self._slots = slots
        self._prints = {
            name: _print(tensor, True)
            for name, slot in slots.items()
            if (tensor := slot.get()) is not None and not tensor.is_meta
        }

    def written(self, *, devices: bool) -> str:
        """Return which tensor has changed since, and how, or "".

        Args:
            devices: Whether to read tensors of devices, too: only on a thread that may use them.
        """
        for name, before in self._prints.items():
            tensor = self._slots[name].get()
            if tensor is None:
                return f"{name} was removed"
            now = _print(tensor, devices)
            if now.place != before.place:
                return f"{name} was replaced"
            if now.version != before.version or now.sample not in (b"", before.sample):
                return f"{name} was written to"
        return ""


@torch.no_grad()
def _print(tensor: torch.Tensor, devices: bool) -> _Print:
    found, version = plain(tensor), -1
    with contextlib.suppress(RuntimeError):
        version = found._version
    place = (found.data_ptr(), found.shape, found.stride(), found.dtype)
    read = found.device.type == "cpu" or devices
    return _Print(place, version, _sample(found) if read else b"")


def _sample(tensor: torch.Tensor) -> bytes:
    """Return a digest of pieces of a tensor's memory, from its first element to its last; b"" for a
    tensor without elements."""
    if not tensor.numel() or tensor.layout is not torch.strided:
        return b""
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.as_strided((reach + 1,), (1,)).view(torch.uint8)
    if len(memory) > _PIECES * _PIECE_BYTES:
        step = (len(memory) - _PIECE_BYTES) // (_PIECES - 1)
        pieces = memory.unfold(0, _PIECE_BYTES, step).reshape(-1)
        memory = torch.cat([pieces, memory[-_PIECE_BYTES:]])
    return shortcut_digest(memory.cpu().numpy().tobytes())
