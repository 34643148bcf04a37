"""Memory that an engine holds and computes with: lent where it is, or filled where it is.

mx allocates nothing here and copies nothing. It keeps the tensors' storages, so that the memory
stays while others read it or it is filled, and looks whether the engine still uses that memory:
an engine may replace a tensor, or resize or free its storage, without a word.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping

from mx.core.extents import ExtentMap
from mx.core.types import Layout, TableRow
from mx.errors import ConfigError, MxError
from mx.memory.arena import Arena, MakeHasher, host_hasher
from mx.memory.arrays import Array, array_of
from mx.memory.claims import claim
from mx.memory.describe import describe_arrays
from mx.text import listed
from mx.views import ScatteredView, Span, View

#: Returns the tensors of a module or mapping as they are at the moment.
Tensors = Callable[[], Mapping[str, object]]


class LiveMemory:
    """The memory of some tensors as the arena of a layout, with every tensor where it is.

    `view` is writable, in layer space; it, and every view of it, keeps the storages of its tensors.
    `extents` has a row for each tensor; `address` is that of their region: the lowest
    of any tensor. `arrays` are all tensors by name, those included that share others' memory.
    """

    hasher: MakeHasher = staticmethod(host_hasher)
    memfd: int | None = None

    def __init__(
        self,
        layout: Layout,
        arrays: Mapping[str, Array],
        tensors: Tensors,
        what: str,
        *,
        fills: bool = False,
    ) -> None:
        """
        Args:
            layout: The layout. Every tensor of it is in `arrays`, dense, with its size.
            arrays: The tensors, as they were when they were described.
            tensors: Returns them as they are now.
            what: Who uses the memory, for the error that another one gets.
            fills: Whether it is to be filled: then no other pull or source may use it.

        Raises:
            ConfigError: The memory is in use.
        """
        self._arrays: dict[str, Array] = dict(arrays)
        self._tensors: Tensors | None = tensors
        held = [t for t in layout.tensors if t.nbytes]
        ranges = [(a.address, a.address + a.span_nbytes) for a in (arrays[t.name] for t in held)]
        self._claim = claim(ranges, what, fills=fills)
        spans = [arrays[t.name].view() for t in held]
        begins = [layout.layers[t.layer].arena_offset + t.offset for t in held]
        self.view: ScatteredView | memoryview = ScatteredView.over(
            begins, spans, layout.arena_nbytes
        )
        self._by_address = sorted((arrays[t.name] for t in held), key=_address)
        addresses = [arrays[t.name].address for t in held]
        self.address = min(addresses, default=0)
        self.nbytes = max(
            (at + t.nbytes - self.address for at, t in zip(addresses, held, strict=True)), default=0
        )
        self.extents = ExtentMap.of_rows(
            layout,
            (
                TableRow(t.layer, t.offset, t.nbytes, 0, at - self.address)
                for at, t in zip(addresses, held, strict=True)
            ),
        )

    def renewed(self, layout: Layout) -> LiveMemory:
        """Return the memory of the same tensors where they are now.

        Args:
            layout: The layout of this memory.

        Raises:
            ConfigError: A tensor is gone, has no memory of its own, or another form than before.
        """
        if self._tensors is None:
            raise ConfigError("the memory was given back", hint="serve the tensors again")
        now = self._tensors()
        gone = [name for name in self._arrays if name not in now]
        if gone:
            raise ConfigError(f"{listed(gone)}: no longer there", hint="serve the tensors again")
        arrays = {name: array_of(name, now[name]) for name in self._arrays}
        found = describe_arrays(arrays)
        forms = {(t.name, t.dtype, t.shape, t.stride) for t in layout.tensors}
        ties = {(alias.name, alias.shape, alias.offset_bytes) for alias in layout.aliases}
        if forms != {(s.name, s.dtype, s.shape, s.stride) for s in found.specs} or ties != {
            (alias.name, alias.shape, alias.offset_bytes) for alias in found.aliases
        }:
            raise ConfigError(
                "the tensors have other shapes, dtypes or ties than before",
                hint="serve them again",
            )
        self._claim.release()
        return LiveMemory(layout, arrays, self._tensors, self._claim.what, fills=self._claim.fills)

    @property
    def released(self) -> bool:
        """True once the tensors are the caller's alone again."""
        return self._tensors is None

    def private_view(self) -> View:
        """Return the memory: here the tensors' own."""
        return self.view

    def span_at(self, offset: int, nbytes: int) -> Span:
        """Return bytes of the region that `extents` names, within one tensor."""
        at = self.address + offset
        array = self._by_address[bisect_right(self._by_address, at, key=_address) - 1]
        return array.view()[at - array.address : at - array.address + nbytes]

    def changed(self) -> str:
        """Say which tensors are no longer where they were: "" if all are."""
        tensors = self._tensors
        if tensors is None:
            return "the memory was given back"
        now = tensors()
        moved: list[str] = []
        for name, array in self._arrays.items():
            try:
                if name not in now or not array_of(name, now[name]).is_at(array):
                    moved.append(name)
            except MxError:
                moved.append(name)
        if not moved:
            return ""
        return f"{listed(moved)}: replaced, resized or freed since they were lent"

    def release(self) -> None:
        """Let go of the tensors. Idempotent."""
        self._claim.release()
        self.view = memoryview(b"")
        self._tensors = None
        self._arrays.clear()
        self._by_address.clear()


#: What a model's bytes are in.
Memory = Arena | LiveMemory


def _address(array: Array) -> int:
    return array.address
