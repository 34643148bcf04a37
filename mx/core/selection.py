"""Which tensors of a model a pull wants, and which slices of them. Pure.

A `Selection` is what the caller names. Applied to a layout it is a `Subset`: the tensors as they
will be here, with their sliced shapes, and for each the bytes of the model's tensor that it is made
of. Which of them ranks on one host read for each other, `mx.core.local_ranks` says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property
from math import prod
from typing import NamedTuple

from mx.core.cuts import Cut, cut_of
from mx.core.grid import ChunkGrid, Layer
from mx.core.layout import contiguous_strides
from mx.core.types import (
    DTYPE_BITS,
    LAYER_ALIGNMENT_BYTES,
    TENSOR_ALIGNMENT_BYTES,
    Alias,
    Layout,
    Tensor,
)
from mx.core.wanted import BlockRange, WantedBlocks, wanted_of
from mx.errors import ConfigError
from mx.text import listed
from mx.units import align_up, format_bytes

_WILDCARDS = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's even share of a dimension: part `rank` of `size`. A negative `dim` counts from the
    last dimension."""

    dim: int
    rank: int
    size: int


#: (dim, begin, end), half-open, or a rank's share.
Slice = tuple[int, int, int] | Shard


class _DimensionRange(NamedTuple):
    """Elements `begin` to `end` of dimension `dim`."""

    dim: int
    begin: int
    end: int


class Subset:
    """Some tensors of a layout, or slices of them.

    `model` is the layout of all tensors. `layout` has the selected ones with their sliced shapes,
    in the model's layers (of which some are then empty). `members` says what each tensor of
    `layout` is made of: a tensor of `model`, and its cut.
    """

    def __init__(
        self, model: Layout, layout: Layout, members: Sequence[tuple[Tensor, Cut]]
    ) -> None:
        """Use `Selection.of`."""
        self.model = model
        self.layout = layout
        self.members = tuple(members)

    @property
    def own_nbytes(self) -> int:
        """The bytes of the selected tensors."""
        return self.layout.payload_nbytes

    @cached_property
    def moved_nbytes(self) -> int:
        """The bytes of all blocks that hold some of them, which a pull moves."""
        return sum(cut.moved_nbytes() for _, cut in self.members)

    @property
    def amplification(self) -> float:
        """How many bytes are moved for each own one."""
        return self.moved_nbytes / self.own_nbytes if self.own_nbytes else 1.0

    def __repr__(self) -> str:
        """One line: tensors, own and moved bytes."""
        return (
            f"<Subset: {len(self.members)} tensors, {format_bytes(self.own_nbytes)}, "
            f"{format_bytes(self.moved_nbytes)} moved>"
        )

    def wanted(self, grid: ChunkGrid) -> WantedBlocks:
        """Return the blocks that are needed, by the chunks of `grid`, a grid of `model`."""
        layers: dict[int, list[tuple[int, list[BlockRange]]]] = {}
        for tensor, cut in self.members:
            layers.setdefault(tensor.layer, []).append((tensor.offset, cut.block_ranges()))
        return wanted_of(grid, layers)


class Selection:
    """Which tensors of any model are wanted, and which slices of them."""

    def __init__(
        self, only: str | Iterable[str] | None = None, slices: Mapping[str, Slice] | None = None
    ) -> None:
        """
        Args:
            only: Names or shell-style patterns of tensors; None: all.
            slices: Slices by names or patterns of tensors. A name counts before patterns.

        Raises:
            ConfigError: One of them is malformed.
        """
        entries = [only] if isinstance(only, str) else only
        self.only = None if entries is None else tuple(_texts(entries))
        self.slices = dict(slices or {})
        if self.only == ():
            raise ConfigError("`only` names no tensor", hint="leave it out to pull all of them")
        _texts(self.slices)
        for name, slice_ in self.slices.items():
            _check_slice(name, slice_)

    @property
    def everything(self) -> bool:
        """True if it selects every tensor of any model, whole."""
        return not self.slices and (self.only is None or set(self.only) == {"*"})

    def of(self, layout: Layout) -> Subset:
        """Apply the selection to a model.

        Args:
            layout: The model's layout.

        Returns:
            The tensors and their bytes. An alias that is selected comes with the tensor whose bytes
            it shows; one that shows a whole tensor, which is not selected itself, takes its place.

        Raises:
            ConfigError: A name or pattern fits no tensor; a slice does not fit its tensor, or the
                tensor can't be sliced.
        """
        forms: dict[str, Tensor | Alias] = {tensor.name: tensor for tensor in layout.tensors}
        forms |= {alias.name: alias for alias in layout.aliases}
        wanted = self._names(forms)
        ranges = self._ranges({name: forms[name] for name in forms if name in wanted})
        aliases: dict[str, list[Alias]] = {}
        for alias in layout.aliases:
            if alias.name in wanted:
                aliases.setdefault(alias.target, []).append(alias)
        members: list[tuple[Tensor, str, _DimensionRange | None]] = []
        ties: list[Alias] = []
        for tensor in layout.tensors:
            tied = aliases.get(tensor.name, [])
            if tensor.name in wanted or tied:
                holder, found = _holder(tensor, tied, ranges, chosen=tensor.name in wanted)
                members.append((tensor, holder, ranges.get(holder)))
                ties += found
        return _subset(layout, members, ties)

    def _names(self, forms: Mapping[str, Tensor | Alias]) -> set[str]:
        if self.only is None:
            return set(forms)
        found: set[str] = set()
        unknown: list[str] = []
        for entry in self.only:
            matched = _matching(entry, forms)
            found.update(matched)
            if not matched:
                unknown.append(entry)
        if unknown:
            raise ConfigError(
                f"`only`: the model has no tensor {listed([repr(each) for each in unknown])}",
                hint=f"its tensors are named like {listed(list(forms)[:3])}",
            )
        return found

    def _ranges(self, forms: Mapping[str, Tensor | Alias]) -> dict[str, _DimensionRange]:
        """Return the cut of each selected tensor that is not wanted whole."""
        by: dict[str, str] = {}  # tensor -> what in `slices` selects it
        for entry in sorted(self.slices, key=lambda entry: entry in forms):
            matched = _matching(entry, forms)
            if not matched:
                raise ConfigError(
                    f"`slices`: no selected tensor is named {entry!r}",
                    hint=f"selected are {listed(list(forms)[:3])}",
                )
            for name in matched:
                other = by.get(name)
                if other is not None and entry != name and self.slices[other] != self.slices[entry]:
                    raise ConfigError(
                        f"`slices`: {other!r} and {entry!r} both select {name}, and differ"
                    )
                by[name] = entry
        found = {}
        for name, entry in by.items():
            range_ = _range_of(forms[name], self.slices[entry])
            if range_ is not None:
                found[name] = range_
        return found


def _texts(entries: Iterable[object]) -> list[str]:
    found = []
    for entry in entries:
        if not isinstance(entry, str) or not entry:
            raise ConfigError(f"{entry!r} is not the name or pattern of a tensor")
        found.append(entry)
    return found


def _check_slice(name: str, slice_: object) -> None:
    """Raise ConfigError for what can be no slice of any tensor."""
    numbers: tuple[object, ...] = ()
    if isinstance(slice_, Shard):
        numbers = (slice_.dim, slice_.rank, slice_.size)
    elif isinstance(slice_, tuple) and len(slice_) == 3:
        numbers = slice_
    if not numbers or not all(type(number) is int for number in numbers):
        raise ConfigError(
            f"`slices`: {slice_!r} for {name!r} is not a slice",
            hint="give (dim, begin, end), or mx.Shard(dim, rank, size)",
        )
    if isinstance(slice_, Shard) and not 0 <= slice_.rank < slice_.size:
        raise ConfigError(
            f"`slices`: there is no rank {slice_.rank} of {slice_.size} for {name!r}",
            hint="ranks count from 0",
        )


def _matching(entry: str, names: Mapping[str, object]) -> list[str]:
    """Return the names that an entry means: the one that it is, or those that fit its pattern."""
    if entry in names:
        return [entry]
    if not _WILDCARDS & set(entry):
        return []
    fits = re.compile(translate(entry)).match
    return [name for name in names if fits(name)]


def _range_of(form: Tensor | Alias, slice_: Slice) -> _DimensionRange | None:
    """Return what a slice cuts out of a tensor; None if that is all of it."""
    name, shape = form.name, form.shape
    given = slice_.dim if isinstance(slice_, Shard) else slice_[0]
    dim = given + len(shape) if given < 0 else given
    if not 0 <= dim < len(shape):
        raise ConfigError(
            f"`slices`: {name} has the shape {list(shape)}, and no dimension {given}",
            hint="dimensions count from 0, or from the last, which is -1",
        )
    length = shape[dim]
    if isinstance(slice_, Shard):
        share, rest = divmod(length, slice_.size)
        if rest or not share:
            raise ConfigError(
                f"`slices`: dimension {dim} of {name} has {length} elements, of which "
                f"{slice_.size} ranks can't have equal shares",
                hint="give the begin and the end of each for uneven ones",
            )
        begin, end = slice_.rank * share, (slice_.rank + 1) * share
    else:
        begin, end = slice_[1:]
        if not 0 <= begin < end <= length:
            raise ConfigError(
                f"`slices`: {begin} to {end} is not a part of dimension {dim} of {name}, which has "
                f"{length} elements",
                hint="elements count from 0, and the end is not part of it",
            )
    if (begin, end) == (0, length):
        return None
    if DTYPE_BITS[form.dtype] < 8:
        raise ConfigError(
            f"`slices`: {name} is {form.dtype}, several elements in a byte: whole only"
        )
    if isinstance(form, Tensor) and form.stride:
        raise ConfigError(
            f"`slices`: {name} is stored with the strides {list(form.stride)}: whole only",
            hint="slice it here, or serve it row-major",
        )
    return _DimensionRange(dim, begin, end)


def _holder(
    tensor: Tensor, tied: Sequence[Alias], ranges: Mapping[str, _DimensionRange], *, chosen: bool
) -> tuple[str, list[Alias]]:
    """Return under which name a tensor's bytes come, and the other names that show them.

    Args:
        tensor: The tensor.
        tied: The selected aliases of it.
        ranges: What is cut out of which tensor or alias.
        chosen: Whether the tensor is selected itself.
    """
    whole = [alias for alias in tied if _is_all_of(alias, tensor)]
    parts = [alias for alias in tied if alias not in whole]
    holder = tensor.name if chosen or parts else whole[0].name
    cut = ranges.get(holder)
    for alias in tied:
        if (alias in parts and (cut or alias.name in ranges)) or ranges.get(alias.name) != cut:
            what = "shows a part" if alias in parts else "has the bytes"
            raise ConfigError(
                f"`slices`: {alias.name} {what} of {tensor.name}: slices of the two must be equal, "
                "and of a part there are none",
                hint="slice neither or both alike, or leave one out with `only`",
            )
    found = []
    for alias in tied:
        if alias.name == holder:
            continue
        if cut is None:
            found.append(Alias(alias.name, holder, *_form(alias)))
        else:
            shape = _cut_shape(tensor.shape, cut)
            stride = contiguous_strides(shape)
            found.append(Alias(alias.name, holder, alias.dtype, shape, 0, stride))
    return holder, found


def _form(alias: Alias) -> tuple[str, tuple[int, ...], int, tuple[int, ...]]:
    return alias.dtype, alias.shape, alias.offset_bytes, alias.stride


def _is_all_of(alias: Alias, tensor: Tensor) -> bool:
    """Return True if the alias is the tensor under another name."""
    same = (alias.shape, alias.offset_bytes) == (tensor.shape, 0)
    return same and alias.stride == (tensor.stride or contiguous_strides(tensor.shape))


def _cut_shape(shape: tuple[int, ...], cut: _DimensionRange) -> tuple[int, ...]:
    return (*shape[: cut.dim], cut.end - cut.begin, *shape[cut.dim + 1 :])


def _subset(
    model: Layout,
    chosen: Sequence[tuple[Tensor, str, _DimensionRange | None]],
    ties: Sequence[Alias],
) -> Subset:
    """Lay the selected tensors out as `mx.core.layout` does, in the model's layers."""
    layers: list[Layer] = []
    tensors: list[Tensor] = []
    members: list[tuple[Tensor, Cut]] = []
    at = arena_offset = 0
    for layer in model.layers:
        extents: list[tuple[int, int]] = []
        first, end = len(tensors), 0
        while at < len(chosen) and chosen[at][0].layer == layer.index:
            tensor, name, range_ = chosen[at]
            at += 1
            offset = align_up(end, TENSOR_ALIGNMENT_BYTES)
            cut = cut_of(tensor, range_)
            shape, nbytes = tensor.shape, tensor.nbytes
            if range_ is not None:
                shape = _cut_shape(shape, range_)
                nbytes = prod(shape) * DTYPE_BITS[tensor.dtype] // 8
            end = offset + nbytes
            extents.append((offset, nbytes))
            members.append((tensor, cut))
            tensors.append(
                Tensor(name, tensor.dtype, shape, layer.index, offset, nbytes, tensor.stride)
            )
        layers.append(Layer(layer.index, layer.name, end, arena_offset, tuple(extents), first))
        arena_offset = align_up(arena_offset + end, LAYER_ALIGNMENT_BYTES)
    return Subset(model, Layout(layers, tensors, ties, model.version), members)
