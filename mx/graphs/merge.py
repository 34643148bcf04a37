"""Joins what two processes captured of one graph into what a publisher signs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from mx.errors import ConfigError
from mx.graphs.addresses import GraphRefusedError, inside, windows
from mx.graphs.message import Capture, decode, encode
from mx.graphs.package import (
    SHARED,
    Graph,
    Kernel,
    KernelNode,
    Library,
    Node,
    RegionSpec,
    TriedBytes,
)
from mx.graphs.structures import unread
from mx.graphs.trial import Trial, try_bytes

_SAME = (*SHARED, "name", "regions", "inputs", "outputs", "edges")


@dataclass(frozen=True, slots=True)
class Package:
    """What a publisher signs: the message of one graph or of several. `images` are by their blake3
    in hexadecimal; `environment` is that of the graphs, by the names of fields."""

    graph: bytes
    images: dict[str, bytes]
    environment: dict[str, str]
    pin: str


def combine(first: Capture, second: Capture, *, trial: Trial | None = None) -> Package:
    """Return the package of a graph that two processes captured at the same addresses.

    Args:
        first: One capture.
        second: The other one, in a region with `decoys=True`.
        trial: With it the publisher vouches for bytes that differ, and that no table explains, as
            far as a trial goes: they travel as zeros if a child process sees no difference with
            other bytes there. The package names them.

    Raises:
        GraphRefusedError: The captures differ, but for bytes that are not read; the message names
            the node, the kernel and the parameter.
        ConfigError: An argument of the trial is wrong.
    """
    one, other = first.graph, second.graph
    for what in _SAME:
        if getattr(one, what) != getattr(other, what):
            raise GraphRefusedError(f"the two captures differ in their {what}")
    if len(one.nodes) != len(other.nodes):
        raise GraphRefusedError(
            f"one capture has {len(one.nodes)} nodes, the other one {len(other.nodes)}"
        )
    if not first.outside or set(first.outside) & set(second.outside):
        raise GraphRefusedError(
            "memory outside the region is at the same addresses in both captures, so that they "
            "don't show which bytes are such addresses",
            hint="make one of the captures in a region with `decoys=True`, opened before anything "
            "else is allocated",
        )
    words = (frozenset(first.halves), frozenset(second.halves))
    nodes: list[Node] = []
    others: list[Node] = []
    free: list[TriedBytes] = []
    for at, (node, again) in enumerate(zip(one.nodes, other.nodes, strict=True)):
        if isinstance(node, KernelNode) and isinstance(again, KernelNode):
            kernel = one.kernels[node.kernel]
            what = f"node {at}, kernel {kernel.name}"
            if replace(node, values=again.values) != again:
                raise GraphRefusedError(f"{what}: the two captures launch it differently")
            if node.values != again.values or words[0] & words[1]:
                joined = _Joined(what, kernel, _library(one, kernel), one.regions, words)
                node, again, spans = joined.of(node, again)
                if spans and trial is None:
                    raise joined.unexplained(spans[0][0])
                free += [TriedBytes(at, begin, end - begin) for begin, end in spans]
        elif node != again:
            raise GraphRefusedError(f"node {at}: the two captures differ in it")
        nodes.append(node)
        others.append(again)
    graph = replace(one, nodes=tuple(nodes))
    images = {
        image.digest.hex(): data for image, data in zip(one.images, first.images, strict=True)
    }
    if trial is not None and free:
        graph = try_bytes(trial, graph, others, free, images)
    return Package(encode(graph), images, dict(one.environment), one.pin)


def join(packages: Iterable[Package]) -> Package:
    """Return one package of the graphs of several: of other sizes, which have other names, and at
    other addresses, where names are the same.

    What kernels are of is loaded once for all of them, and what graphs have in common is stored
    once.

    Args:
        packages: The packages, of the same environment, pin, weights and work memory. Addresses are
            tried in their order.

    Raises:
        GraphError: They differ in those, two graphs have one name at the same addresses, or there
            are more than a package may have.
        ConfigError: There is none.
    """
    parts = list(packages)
    if not parts:
        raise ConfigError("there is no package to be joined", hint="give one or more")
    graphs = _with_shared_tables([graph for part in parts for graph in decode(part.graph)])
    images = {digest: image for part in parts for digest, image in part.images.items()}
    message = encode(*graphs)
    decode(message)  # it is one that a target takes
    return replace(parts[0], graph=message, images=images)


def _with_shared_tables(graphs: Sequence[Graph]) -> list[Graph]:
    """Return graphs whose indices all refer to the same tables of kernels, and of what those are
    of."""
    tables: dict[str, dict[Any, int]] = defaultdict(dict)

    def moved(each: Any, field: str, what: str, there: Sequence[Any]) -> Any:
        """Return something whose index in a field is that of a table, where it is added."""
        index = getattr(each, field, None)
        if index is None:
            return each
        place = tables[what].setdefault(there[index], len(tables[what]))
        return replace(each, **{field: place})

    found = []
    for graph in graphs:
        of: dict[str, tuple[str, Sequence[Any]]] = {"image": ("images", graph.images)}
        for field, what in (("call", "calls"), ("fatbin", "fatbins")):
            parts = getattr(graph, what)
            of[field] = (what, [moved(e, "library", "libraries", graph.libraries) for e in parts])
        kernels: Sequence[Any] = graph.kernels
        for field, (what, there) in of.items():
            kernels = [moved(kernel, field, what, there) for kernel in kernels]
        found.append(tuple(moved(node, "kernel", "kernels", kernels) for node in graph.nodes))
    names = ("images", "libraries", "calls", "fatbins", "kernels")
    shared: dict[str, Any] = {what: tuple(tables[what]) for what in names}
    return [replace(graph, nodes=own, **shared) for graph, own in zip(graphs, found, strict=True)]


def _library(graph: Graph, kernel: Kernel) -> Library | None:
    if kernel.fatbin is not None:
        return graph.libraries[graph.fatbins[kernel.fatbin].library]
    return None if kernel.call is None else graph.libraries[graph.calls[kernel.call].library]


class _Joined:
    """Explains the bytes that differ between two launches of a kernel."""

    def __init__(
        self,
        what: str,
        kernel: Kernel,
        library: Library | None,
        regions: Sequence[RegionSpec],
        halves: tuple[frozenset[int], frozenset[int]],
    ) -> None:
        self._what, self._kernel, self._library = what, kernel, library
        self._regions, self._halves = regions, halves

    def of(
        self, one: KernelNode, other: KernelNode
    ) -> tuple[KernelNode, KernelNode, list[tuple[int, int]]]:
        """Return both launches with zeros where the kernel is known not to read, and the spans
        (begin, end) of parameters that differ then.

        Raises:
            GraphRefusedError: Addresses differ.
        """
        values = (bytearray(one.values), bytearray(other.values))
        for number, (offset, size) in enumerate(self._kernel.parameters):
            found = [self._unread(number, bytes(v[offset : offset + size])) for v in values]
            for begin, end in found[0] if found[0] == found[1] else ():
                for value in values:
                    value[offset + begin : offset + end] = bytes(end - begin)
        first, second = map(bytes, values)
        differ = [at for at in range(len(first)) if first[at] != second[at]]
        self._require_no_address(first, second)
        self._require_no_half(first, second)
        runs = groupby(enumerate(differ), lambda each: each[1] - each[0])
        spans = [(run[0][1], run[-1][1] + 1) for run in (list(group) for _, group in runs)]
        return replace(one, values=first), replace(other, values=second), self._split(spans)

    def _unread(self, number: int, value: bytes) -> list[tuple[int, int]]:
        return unread(self._kernel, self._library, number, value, self._regions)

    def _split(self, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return spans that each are of one parameter."""
        return [
            (max(begin, offset), min(end, offset + size))
            for begin, end in spans
            for offset, size in self._kernel.parameters
            if begin < offset + size and offset < end
        ]

    def _require_no_address(self, first: bytes, second: bytes) -> None:
        for (at, number), (_, again) in zip(windows(first), windows(second), strict=True):
            if number != again and (inside(number, self._regions) or inside(again, self._regions)):
                raise self._error(at, "has another address of the region in one capture")

    def _require_no_half(self, first: bytes, second: bytes) -> None:
        """Refuse words that differ and may be half an address in one of the processes, and equal
        ones that may in both: addresses can differ in their upper halves alone."""
        for at in range(0, len(first) - 3, 4) if any(self._halves) else ():
            places = (int.from_bytes(value[at : at + 8], "little") for value in (first, second))
            hits = [
                (place & 0xFFFF_FFFF) in known and not inside(place, self._regions)
                for place, known in zip(places, self._halves, strict=True)
            ]
            if all(hits) or (any(hits) and first[at : at + 4] != second[at : at + 4]):
                raise self._error(at, "has half an address of memory outside the region")

    def unexplained(self, at: int) -> GraphRefusedError:
        """Return the error for bytes that nothing explains."""
        return self._error(at, "differs, and mx does not know that it is not read")

    def _error(self, at: int, says: str) -> GraphRefusedError:
        number = max(n for n, (offset, _) in enumerate(self._kernel.parameters) if offset <= at)
        byte = at - self._kernel.parameters[number][0]
        return GraphRefusedError(
            f"{self._what}: parameter {number} {says}: byte {byte}",
            hint="capture here, or vouch for the bytes by a trial (`combine(..., trial=...)`)"
            if says.startswith("differs")
            else "capture here",
        )
