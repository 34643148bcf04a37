"""The layout of tensors in layers. Every number is checked, since the input may be hostile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from operator import itemgetter
from typing import NamedTuple

from mx.core.grid import Layer
from mx.core.layout_rules import RULES, newest
from mx.core.packaging import MAX_NAME_CHARS, bad_tensor_name
from mx.core.types import (
    DTYPE_BITS,
    LAYER_ALIGNMENT_BYTES,
    TENSOR_ALIGNMENT_BYTES,
    Alias,
    Layout,
    Tensor,
)
from mx.errors import ManifestError
from mx.text import shown
from mx.units import align_up

#: Larger values are refused: an arena of a quarter of a petabyte, 64 dimensions (as in torch).
MAX_ARENA_BYTES = 1 << 48
MAX_DIMENSIONS = 64
MAX_TENSORS = 1_000_000

#: A dtype, a shape, and the strides in elements, () for row-major order. Models have many tensors
#: and few kinds, so kinds are checked once each.
Kind = tuple[str, tuple[int, ...], tuple[int, ...]]

#: The arguments of `build_layout`: a layout as its document spells it.
Columns = tuple[list[tuple[str, int]], list[str], list[Kind], list[int], list[Alias]]


class TensorSpec(NamedTuple):
    """A tensor's name and form: `dtype` as safetensors spells it, `shape` and `stride` in elements.

    `stride` is () for row-major order, else what `permuted_stride` returns.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """The size of its data in bytes.

        Raises:
            ManifestError: As `kind_nbytes`.
        """
        return kind_nbytes((self.dtype, self.shape, self.stride))


def kind_nbytes(kind: Kind) -> int:
    """Return the number of bytes that a tensor of this dtype and shape takes.

    Sub-byte dtypes are packed without a gap. As in safetensors, a shape whose bits do not fill
    whole bytes is an error, not rounded up.

    Raises:
        ManifestError: The bits do not fill whole bytes, the dtype is unknown, a dimension is
            negative or larger than any memory, or the strides are not those of a dense tensor.
    """
    dtype, shape, stride = kind
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        raise ManifestError(f"{shown(dtype)} is not a safetensors dtype")
    if len(shape) > MAX_DIMENSIONS:
        raise ManifestError(f"a shape has {len(shape)} dimensions, more than {MAX_DIMENSIONS}")
    for dimension in shape:
        if not 0 <= dimension <= MAX_ARENA_BYTES:
            raise ManifestError("a dimension is negative or larger than any memory")
    # Without its zeros: torch computes the strides of an empty tensor too, and they may overflow.
    if prod(filter(None, shape)) * bits > 8 * MAX_ARENA_BYTES:
        raise ManifestError(f"a tensor of shape {list(shape)} is larger than any memory")
    total_bits = prod(shape) * bits
    if total_bits % 8:
        raise ManifestError(f"{dtype} of shape {list(shape)} does not fill whole bytes")
    if stride and (bits < 8 or permuted_stride(shape, stride) != stride):
        raise ManifestError(
            f"the strides of a tensor of shape {list(shape)} are not those of a dense tensor in "
            "another order"
        )
    return total_bits // 8


def permuted_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...] | None:
    """Return the canonical strides of a dense tensor: its elements fill its memory, each once.

    Args:
        shape: The shape, in elements.
        stride: A stride in elements for each dimension.

    Returns:
        () for row-major order; the strides for another order of dimensions, 1 where a dimension has
        one element; None if the tensor is not dense.
    """
    if len(shape) != len(stride):
        return None
    if 0 in shape:
        return ()
    wide = [d for d in range(len(shape)) if shape[d] > 1]
    order = sorted(wide, key=lambda d: stride[d], reverse=True)
    step = 1
    for d in reversed(order):
        if stride[d] != step:
            return None
        step *= shape[d]
    if order == wide:
        return ()
    return tuple(s if n > 1 else 1 for n, s in zip(shape, stride, strict=True))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a row-major tensor without gaps."""
    strides = [1]
    for dimension in reversed(shape[1:]):
        strides.append(strides[-1] * max(dimension, 1))
    return tuple(reversed(strides)) if shape else ()


def alias_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return a view's strides with one spelling for all that view the same elements.

    The stride of a dimension with one element means nothing, and differs with how it was made.
    """
    dense = permuted_stride(shape, stride)
    if dense is not None:
        return dense or contiguous_strides(shape)
    return tuple(s if n > 1 else 1 for n, s in zip(shape, stride, strict=True))


def plan_layout(
    specs: Iterable[TensorSpec], aliases: Sequence[Alias] = (), version: int | None = None
) -> Layout:
    """Return the layout of these tensors, the same for any order of `specs` and `aliases`.

    Layers are in execution order. A tensor lies in the earliest layer of itself and its aliases,
    so that a tie never makes the first layer wait for the last. Of several names that view all of
    a tensor the least one is the tensor's, and the others are its aliases.

    Args:
        specs: The tensors.
        aliases: Views of them.
        version: A layout version that `mx.core.layout_rules` has; None: the newest.

    Raises:
        ManifestError: There are no tensors, a name is duplicate or bad, a tensor has no valid
            size, or an alias reaches outside its target.
    """
    kind_of: dict[str, int] = {}
    index_of: dict[Kind, int] = {}
    for spec in specs:
        if spec.name in kind_of:
            raise ManifestError(f"there are two tensors {spec.name!r}")
        each = (spec.dtype, tuple(spec.shape), tuple(spec.stride))
        kind_of[spec.name] = index_of.setdefault(each, len(index_of))
    version = newest() if version is None else version
    return build_layout(*_planned(kind_of, list(index_of), aliases, version), version=version)


def planned_again(columns: Columns, version: int) -> Columns:
    """Return the columns of the layout that `plan_layout` returns for the same tensors.

    Args:
        columns: Columns that `build_layout` has taken.
        version: As for `plan_layout`.
    """
    _, names, kinds, kind, aliases = columns
    index_of = {each: index for index, each in enumerate(dict.fromkeys(kinds))}
    if len(index_of) < len(kinds):
        kind = [index_of[kinds[k]] for k in kind]
    return _planned(dict(zip(names, kind, strict=True)), list(index_of), aliases, version)


def _planned(
    kind_of: dict[str, int], kinds: list[Kind], aliases: Sequence[Alias], version: int
) -> Columns:
    """`kind_of` has the index into `kinds`, which are all different, of each tensor by name: with
    many tensors, hashing a dtype and a shape for each takes as long as all else here."""
    if aliases:
        _check_ties(kind_of, aliases)
        kind_of, aliases = _canonical(kind_of, kinds, aliases)
    size_of = [kind_nbytes(each) for each in kinds]
    sizes = dict(zip(kind_of, map(size_of.__getitem__, kind_of.values()), strict=True))
    target_of = {alias.name: alias.target for alias in aliases}
    sizes.update(dict.fromkeys(target_of, 0))
    names: list[str] = []
    layers: list[tuple[str, int]] = []
    moved: set[str] = set()
    tied = set(target_of.values())
    for label, members in RULES[version].layers(sizes, sizes):
        if tied:
            members = [target_of.get(name, name) for name in members]
            members = [name for name in dict.fromkeys(members) if name not in moved]
            moved.update(tied.intersection(members))
        if members:
            layers.append((label, len(members)))
            names += members
    kind = list(map(kind_of.__getitem__, names))
    used = list(dict.fromkeys(kind))
    if used != list(range(len(kinds))):
        number_of = {old: new for new, old in enumerate(used)}
        kinds, kind = [kinds[k] for k in used], [number_of[k] for k in kind]
    return layers, names, kinds, kind, sorted(aliases, key=lambda a: a.name)


def _check_ties(kind_of: Mapping[str, int], aliases: Sequence[Alias]) -> None:
    unknown = {alias.target for alias in aliases} - kind_of.keys()
    if unknown:
        raise ManifestError(f"an alias names {min(unknown)!r}, which is not a tensor")
    for alias in aliases:
        if len(alias.stride) != len(alias.shape):
            raise ManifestError(f"alias {alias.name!r} has strides that do not fit its shape")
    both = {alias.name for alias in aliases} & kind_of.keys()
    if both:
        raise ManifestError(f"{min(both)!r} is both a tensor and an alias")


def _canonical(
    kind_of: Mapping[str, int], kinds: Sequence[Kind], aliases: Sequence[Alias]
) -> tuple[dict[str, int], list[Alias]]:
    """Return the same tensors and views, each tensor under the least name that views all of it, and
    each view with the canonical strides.

    Which of several tied names holds the bytes is an accident of how a checkpoint was saved.
    """
    least: dict[str, str] = {}
    for a in aliases:
        dtype, shape, stride = kinds[kind_of[a.target]]
        whole = a.offset_bytes == 0 and (a.dtype, a.shape) == (dtype, shape)
        if whole and alias_stride(shape, a.stride) == (stride or contiguous_strides(shape)):
            least[a.target] = min(a.name, least.get(a.target, a.target))
    found = []
    for a in aliases:
        target = least.get(a.target, a.target)
        name = a.target if a.name == target else a.name
        stride = alias_stride(a.shape, a.stride)
        found.append(a._replace(name=name, target=target, stride=stride))
    return {least.get(name, name): kind for name, kind in kind_of.items()}, found


def build_layout(
    layers: Sequence[tuple[str, int]],
    names: list[str],
    kinds: Sequence[Kind],
    kind: list[int],
    aliases: Sequence[Alias],
    *,
    version: int | None = None,
) -> Layout:
    """Check the columns of a layout and compute every place.

    Places follow from the order alone: each tensor is at the next multiple of 256 in its layer,
    each layer at the next multiple of 4096 in the arena.

    Args:
        layers: (name, number of tensors) of each layer, in order.
        names: The name of each tensor, in layout order.
        kinds: The dtypes and shapes that tensors have.
        kind: The index into `kinds` of each tensor.
        aliases: Views of these tensors.
        version: As for `plan_layout`.

    Returns:
        The layout. It refers to the arguments; do not change them afterwards.

    Raises:
        ManifestError: An argument is malformed, or they contradict each other.
    """
    _check_names(layers, names, aliases)
    if len(kind) != len(names) or sum(map(itemgetter(1), layers)) != len(names):
        raise ManifestError("the layout's columns differ in length")
    if min(kind) < 0 or max(kind) >= len(kinds):
        raise ManifestError("a tensor names a kind that is not there")
    size_of = list(map(kind_nbytes, kinds))
    space_of = [align_up(size, TENSOR_ALIGNMENT_BYTES) for size in size_of]
    nbytes = list(map(size_of.__getitem__, kind))
    places: list[int] = []
    built: list[Layer] = []
    arena_offset = first = 0
    for index, (label, count) in enumerate(layers):
        end = first + count
        *offsets, _ = accumulate([space_of[k] for k in kind[first:end]], initial=0)
        layer_nbytes = offsets[-1] + nbytes[end - 1]
        extents = tuple(zip(offsets, nbytes[first:end], strict=True))
        built.append(Layer(index, label, layer_nbytes, arena_offset, extents, first))
        arena_offset = align_up(arena_offset + layer_nbytes, LAYER_ALIGNMENT_BYTES)
        if arena_offset > MAX_ARENA_BYTES:
            raise ManifestError("the layout is larger than any memory")
        places += offsets
        first = end

    def tensors() -> list[Tensor]:
        # In columns, without a call in Python for each of many tensors.
        columns = (
            names,
            [kinds[k][0] for k in kind],
            [kinds[k][1] for k in kind],
            [i for i, (_, count) in enumerate(layers) for _ in range(count)],
            places,
            nbytes,
            [kinds[k][2] for k in kind],
        )
        return list(map(partial(tuple.__new__, Tensor), zip(*columns, strict=True)))

    if aliases:
        _check_aliases(aliases, dict(zip(names, kind, strict=True)), kinds, size_of)
    return Layout(built, tensors, aliases, version, (names, kinds, kind))


def _check_names(
    layers: Sequence[tuple[str, int]], names: list[str], aliases: Sequence[Alias]
) -> None:
    if not names:
        raise ManifestError("there are no tensors")
    if len(names) + len(aliases) > MAX_TENSORS:
        raise ManifestError(f"there are more than {MAX_TENSORS} tensors and aliases")
    if not layers or min(count for _, count in layers) < 1:
        raise ManifestError("a layer has no tensors")
    labels = [label for label, _ in layers]
    every = names + [alias.name for alias in aliases]
    for group, what in ((labels, "layer"), (every, "tensor")):
        joined = "".join(group)
        try:
            joined.encode()
        except UnicodeEncodeError:
            raise ManifestError(f"a {what}'s name holds half a surrogate pair") from None
        # One check of all names at once is fast; each is checked only if that one fails.
        lengths = set(map(len, group))
        suspicious = min(lengths) == 0 or max(lengths) > MAX_NAME_CHARS or ".." in joined
        if suspicious or not joined.isprintable() or "__metadata__" in joined:
            for name in group:
                reason = bad_tensor_name(name)
                if reason is not None:
                    raise ManifestError(f"the name of {what} {shown(name)} {reason}")
        if len(set(group)) != len(group):
            twice = next(name for name, count in Counter(group).items() if count > 1)
            raise ManifestError(f"there are two {what}s {twice!r}")


def _check_aliases(
    aliases: Sequence[Alias],
    kind_of: Mapping[str, int],
    kinds: Sequence[Kind],
    size_of: Sequence[int],
) -> None:
    for alias in aliases:
        kind = kind_of.get(alias.target)
        if kind is None:
            raise ManifestError(
                f"alias {alias.name!r} names {shown(alias.target)}, which is not a tensor"
            )
        if alias.dtype != kinds[kind][0]:
            raise ManifestError(f"alias {alias.name!r} and its target have different dtypes")
        kind_nbytes((alias.dtype, alias.shape, ()))
        bits = DTYPE_BITS[alias.dtype]
        strides = alias.stride
        if len(strides) != len(alias.shape) or not all(0 <= s <= MAX_ARENA_BYTES for s in strides):
            raise ManifestError(f"alias {alias.name!r} has strides that do not fit its shape")
        if bits < 8 and tuple(strides) != contiguous_strides(alias.shape):
            raise ManifestError(f"alias {alias.name!r} splits packed elements")
        if alias.offset_bytes < 0 or (alias.offset_bytes * 8) % max(bits, 8):
            raise ManifestError(f"alias {alias.name!r} starts inside an element")
        last = sum((d - 1) * s for d, s in zip(alias.shape, alias.stride, strict=True))
        span_bits = 0 if 0 in alias.shape else (last + 1) * bits
        if alias.offset_bytes * 8 + span_bits > size_of[kind] * 8:
            raise ManifestError(f"alias {alias.name!r} reaches beyond {alias.target!r}")
