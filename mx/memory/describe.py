"""Describes tensors as they lie in memory: which have bytes of their own, and which share them."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mx.core.layout import TensorSpec, alias_stride
from mx.core.types import Alias
from mx.errors import ConfigError
from mx.memory.arrays import Array
from mx.memory.collector import paused
from mx.text import listed
from mx.views import host_view

#: The first byte, the end and the name of each tensor with bytes of its own, ascending. None lies
#: within another one, so the ends ascend too.
_Owners = list[tuple[int, int, str]]


@dataclass(frozen=True, slots=True)
class DescribedTensors:
    """The form of some tensors. `arrays` has those with bytes of their own, by name."""

    specs: list[TensorSpec]
    aliases: list[Alias]
    arrays: dict[str, Array]

    def views(self) -> dict[str, memoryview]:
        """Return the bytes of `arrays`, in storage order. Raises LocalError for those of a GPU."""
        return {name: host_view(array.view()) for name, array in self.arrays.items()}


@paused()
def describe_arrays(
    arrays: Mapping[str, Array], dense: Callable[[str], Array] | None = None
) -> DescribedTensors:
    """Describe tensors.

    A dense tensor, whatever the order of its dimensions (a transposed weight, channels last), is
    described in storage order: its bytes are its memory, its strides are in its spec. Any view that
    lies within the memory of a dense tensor and has its dtype is an alias of that one, be it a
    slice, a transpose or an expanded view. What is neither (a slice with gaps, or an expanded view,
    of memory that no dense tensor here covers) has no bytes of its own in storage order.

    The same tensors, sharing memory in the same way, have the same description whatever their order
    in the mapping.

    Args:
        arrays: The tensors by name.
        dense: Returns a dense, row-major copy of the tensor with this name; None: there may be no
            copy.

    Raises:
        ConfigError: Some tensors are neither dense nor within dense ones, and may not be copied.
    """
    specs: list[TensorSpec] = []
    aliases: list[Alias] = []
    found: dict[str, Array] = {}
    gappy: list[str] = []
    alone, others = _parted(arrays)
    for name in alone:
        array, order = arrays[name], arrays[name].order
        assert order is not None
        specs.append(TensorSpec(name, array.dtype, array.shape, order))
        found[name] = array
    # By device, dtype, and the place of elements in memory.
    owners_of: dict[tuple[str, str, int], _Owners] = {}
    orders = {name: arrays[name].order for name in others}
    # Dense before others and large before small, so that an alias always comes after its owner. Of
    # dense ones that share all their memory a row-major one is the owner, since checkpoints hold
    # that order. Then by name, so that one model always gives one identity.
    by_size = sorted(
        others,
        key=lambda n: (orders[n] is None, -arrays[n].span_nbytes, bool(orders[n]), n),
    )
    for name in by_size:
        array, order = arrays[name], orders[name]
        start, nbytes = array.address, array.span_nbytes
        key = (array.device, array.dtype, start % array.item_nbytes)
        owners = owners_of.setdefault(key, [])
        owner = _owner(owners, start, start + nbytes) if nbytes else None
        if owner is not None:
            stride = alias_stride(array.shape, array.stride)
            begin = start - owner[0]
            aliases.append(Alias(name, owner[2], array.dtype, array.shape, begin, stride))
            continue
        if order is None:
            if dense is None:
                gappy.append(name)
                continue
            array, order = dense(name), ()
        elif nbytes:
            insort(owners, (start, start + nbytes, name))
        specs.append(TensorSpec(name, array.dtype, array.shape, order))
        found[name] = array
    if gappy:
        raise ConfigError(
            f"{listed(gappy)}: memory with gaps or overlaps, which no other tensor here fills",
            hint="make it contiguous, or serve a copy with `copy=True`",
        )
    return DescribedTensors(specs, aliases, found)


def _parted(arrays: Mapping[str, Array]) -> tuple[list[str], list[str]]:
    """Return the names of the dense tensors whose memory no other one shares, and of the others.

    Both are in the order of names. Only the others need to be compared with each other.
    """
    places = sorted([(each.address, each.span_nbytes, name) for name, each in arrays.items()])
    shared: set[str] = set()
    reached, last = -1, ""  # the highest end so far, and whose it is
    for begin, nbytes, name in places:
        if begin < reached:
            shared.update((name, last))
        if begin + nbytes > reached:
            reached, last = begin + nbytes, name
    alone: list[str] = []
    others: list[str] = []
    for name in sorted(arrays):
        array = arrays[name]
        fits = name not in shared and array.span_nbytes and array.order is not None
        (alone if fits else others).append(name)
    return alone, others


def _owner(owners: _Owners, start: int, end: int) -> tuple[int, int, str] | None:
    """Return the owner that bytes [start, end) lie within."""
    # The last to begin by `start` is the last to end, too: if it does not hold them, none does.
    at = bisect_right(owners, start, key=lambda owner: owner[0])
    return owners[at - 1] if at and owners[at - 1][1] >= end else None
