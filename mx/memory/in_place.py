"""Tensors that a pull fills where they are: those of a module, or of a state dict."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from mx.core.layout import contiguous_strides, permuted_stride
from mx.core.types import Alias, Layout, Tensor
from mx.errors import ClosedError, ConfigError
from mx.memory.arrays import Array, all_are_now, arrays_and_errors
from mx.memory.collector import paused
from mx.memory.describe import describe_arrays
from mx.memory.live import LiveMemory, TensorColumns, Tensors, is_tied
from mx.text import listed

#: What errors call all tensors of a model.
WHOLE = "the model"


class InPlace:
    """Tensors to fill. Nothing is written before `arena` has found that all of them fit."""

    def __init__(self, tensors: Tensors, optional: Collection[str] = ()) -> None:
        """
        Args:
            tensors: Returns the tensors by name as they are at the moment.
            optional: The names of those that a model may lack, such as the buffers that a state
                dict leaves out.

        Raises:
            ConfigError: Some are not tensors with memory of their own.
        """
        self._tensors = tensors
        self._optional = frozenset(optional)
        self._arrays = _arrays(tensors())
        self._arena: LiveMemory | None = None

    @property
    def device(self) -> str:
        """Where the tensors are: "cpu" or "cuda:UUID". Of tensors on several devices it is one:
        `arena` refuses those."""
        devices = set(map(attrgetter("device"), self._arrays.values()))
        if devices != {"cpu"}:  # empty ones are nowhere
            devices = {array.device for array in self._arrays.values() if array.span_nbytes}
        return min(devices, default="cpu")

    def tensors(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the tensors of these names as they are at the moment. Raises ClosedError."""
        now = self._tensors()
        return {name: now[name] for name in names}

    @paused()
    def arena(self, layout: Layout, what: str = WHOLE) -> LiveMemory:
        """Return the tensors' memory as an arena of a layout.

        Args:
            layout: The layout.
            what: What errors call it.

        Raises:
            ConfigError: Names, shapes, dtypes or ties differ from the model's; the error has all
                differences. Or the memory is in use by another pull or source, or on several
                devices.
            CudaError: Work that the tensors' owner has queued on their GPU has failed.
        """
        now = self._tensors()
        if now.keys() != self._arrays.keys() or not all_are_now(self._arrays, now):
            self._arrays = _arrays(now)  # the pull may have waited long for a source
        found = list(map(self._arrays.get, layout.forms[0]))
        there = list(filter(None, found))  # an array is not an empty tuple
        held = TensorColumns(layout, there) if len(there) == len(found) else None
        apart = held is not None and held.apart
        overlapping = {} if apart else self._overlapping(layout, found)
        differences = [*self._differences(layout, found, what), *self._unlike(overlapping, what)]
        if differences:
            raise ConfigError(
                f"`into` does not fit {what}, and nothing was written: " + "; ".join(differences),
                hint="build it from the model's own configuration; pull.files() has that"
                if what == WHOLE
                else "give just the selected tensors, with the shapes of their slices",
            )
        arrays = self._arrays
        if len(arrays) > len(found) + len(layout.aliases):  # some are optional
            names = {*layout.forms[0], *(alias.name for alias in layout.aliases)}
            arrays = {name: each for name, each in arrays.items() if name in names}
        layers = {t.layer for t in layout.tensors if t.name in overlapping} if overlapping else ()
        self._arena = LiveMemory(
            layout,
            arrays,
            self._tensors,
            "another pull or broadcast fills it",
            fills=True,
            overlapping=frozenset(layers),
            held=held,
        )
        self._arena.wait_for_owner()
        return self._arena

    def release(self) -> None:
        """Release the tensors and the arena. Idempotent."""
        if self._arena is not None:
            self._arena.release()
            self._arena = None
        self._arrays.clear()
        self._tensors = _released

    def _differences(
        self, layout: Layout, found_here: Sequence[Array | None], what: str
    ) -> list[str]:
        arrays = self._arrays
        aliases = {alias.name: alias for alias in layout.aliases}
        fit = len(arrays) == len(found_here) + len(aliases) and _fit(layout, found_here)
        wanted = {} if fit else {tensor.name: tensor for tensor in layout.tensors}
        names = [*wanted, *aliases]
        missing = [name for name in names if name not in arrays]
        extra: list[str] = []
        if not fit:
            extra = sorted(arrays.keys() - wanted.keys() - aliases.keys() - self._optional)
        found = []
        if missing:
            found.append(f"missing here: {listed(missing)}")
        if extra:
            found.append(f"not in {what}: {listed(extra)}")
        here = [name for name in names if name in arrays]
        for name in here:
            form: Tensor | Alias = wanted[name] if name in wanted else aliases[name]
            array = arrays[name]
            if (array.dtype, array.shape) != (form.dtype, form.shape):
                found.append(
                    f"{name} is {array.dtype} {list(array.shape)} here, "
                    f"{form.dtype} {list(form.shape)} in {what}"
                )
            elif not array.writable:
                found.append(f"{name} is read-only")
            elif name in wanted and array.span_nbytes and array.order != wanted[name].stride:
                found.append(
                    f"{name} has the strides {list(array.stride)} here, "
                    f"{_strides(wanted[name])} in the model"
                )
        found += self._ties([aliases[name] for name in here if name in aliases])
        return found

    def _ties(self, aliases: Sequence[Alias]) -> list[str]:
        """Return what differs in which tensors are views of others."""
        found = []
        for alias in aliases:
            array, target = self._arrays[alias.name], self._arrays.get(alias.target)
            if target is None or 0 in alias.shape:
                continue
            tied = is_tied(alias, array, target)
            if not tied:
                found.append(
                    f"{alias.name} shares the memory of {alias.target} in the model, and not here "
                    "(module.tie_weights() ties them in transformers)"
                )
        return found

    def _overlapping(self, layout: Layout, arrays: Sequence[Array | None]) -> dict[str, str]:
        """Return which tensors of a layout share memory, and for each another one that it does with
        (the first of them: with itself)."""
        sizes = [nbytes for layer in layout.layers for _, nbytes in layer.extents]
        places = sorted(
            (array.address, array.address + array.span_nbytes, name)
            for name, array, nbytes in zip(layout.forms[0], arrays, sizes, strict=True)
            if nbytes and array is not None
        )
        found: dict[str, str] = {}
        reached, last = -1, ""  # the highest end so far, and whose it is
        for begin, end, name in places:
            if begin < reached:
                found.setdefault(last, last)
                found[name] = last
            if end > reached:
                reached, last = end, name
        return found

    def _unlike(self, overlapping: Mapping[str, str], what: str) -> list[str]:
        """Return which of the tensors that share memory do not in the model.

        What would be lent as tensors of their own, although they share memory, may be filled: such
        as the same memory in two dtypes. What would be lent as a view of another one is none in
        the model. Slices could not be compared with the model's digests.
        """
        if what != WHOLE:
            pairs = {name: other for name, other in overlapping.items() if name != other}
        else:
            dense = {n: self._arrays[n] for n in overlapping if self._arrays[n].order is not None}
            pairs = {alias.name: alias.target for alias in describe_arrays(dense).aliases}
        return [
            f"{name} shares memory with {other} here, and not in the model"
            for name, other in pairs.items()
        ]


def _fit(layout: Layout, arrays: Sequence[Array | None]) -> bool:
    """Return True if all tensors are there, with the model's forms. Models have many tensors and
    few forms: each pair of forms is compared once."""
    if not all(arrays):  # an array is not an empty tuple
        return False
    _, kinds, kind = layout.forms
    forms = map(attrgetter("dtype", "shape", "stride", "writable"), arrays)
    return all(
        (dtype, shape) == kinds[wanted][:2]
        and writable
        and (0 in shape or permuted_stride(shape, stride) == kinds[wanted][2])
        for (dtype, shape, stride, writable), wanted in set(zip(forms, kind, strict=True))
    )


def _released() -> Mapping[str, object]:
    raise ClosedError("the pull was closed")


def _strides(tensor: Tensor) -> list[int]:
    return list(tensor.stride or contiguous_strides(tensor.shape))


def _arrays(tensors: Mapping[str, object]) -> dict[str, Array]:
    """Return all tensors as arrays. Raises ConfigError that names all that can't be filled."""
    found, errors = arrays_and_errors(tensors)
    refused: dict[tuple[str, str], list[str]] = {}  # what is wrong, and what to do -> names
    for name, error in errors.items():
        what = error.message.removeprefix(name).strip()
        refused.setdefault((what, error.hint), []).append(name)
    if refused:
        raise ConfigError(
            "`into` can't be filled, and nothing was written: "
            + "; ".join(f"{listed(names)} {what}" for (what, _), names in refused.items()),
            hint="; ".join(dict.fromkeys(hint for _, hint in refused if hint)),
        )
    return found
