"""The bounds that every CUDA graph keeps.

`check` is asked before anything of a graph is loaded. It takes time linear in the graph's size.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from math import prod

from mx.core.layout import MAX_TENSORS
from mx.core.types import DTYPE_BITS, NAME_CHARS
from mx.graphs.package import (
    Graph,
    GraphError,
    GraphPlace,
    Kernel,
    KernelNode,
    MemcpyNode,
    MemsetNode,
    Node,
    RegionSpec,
)
from mx.text import shown
from mx.units import GIB, KIB, MIB

DIGEST_BYTES = 32
MAX_MESSAGE_BYTES = 32 * MIB
MAX_FIELDS = 64
MAX_REGIONS = 8
MAX_NODES = 100_000
MAX_EDGES = 400_000
MAX_KERNELS = 10_000
MAX_IMAGES = 10_000
MAX_IMAGE_BYTES = 256 * MIB
#: Of all images of a graph.
MAX_IMAGES_BYTES = GIB
MAX_LIBRARIES = 64
MAX_CALLS = 1024
MAX_TRIED = 400_000
MAX_GRAPHS = 1024
#: Places that the graphs of a package are for.
MAX_BASES = 16
#: Of all graphs of a package: nodes, and edges.
MAX_ALL = 1_000_000
#: Of a library: the largest have a gigabyte.
MAX_FATBIN_BYTES = 4 * GIB
MAX_PARAMETERS = 4096
#: The parameters of one kernel, since CUDA 12.1.
MAX_PARAMETERS_BYTES = 32_764
MAX_SHARED_BYTES = 256 * KIB
#: C++ mangles templates into long names.
MAX_KERNEL_NAME = 16 * KIB
#: Of the golden inputs, all together.
MAX_GOLDEN_BYTES = 16 * MIB
MAX_OUTPUTS = 64
#: Of the name of a tensor.
MAX_TENSOR_NAME = 1024
#: Device addresses have at most so many bits.
ADDRESS_BITS = 57
MAX_GRID = ((1 << 31) - 1, 65_535, 65_535)
MAX_BLOCK = (1024, 1024, 64)
MAX_THREADS = 1024
MAX_DIMENSIONS = 16
#: The attributes of kernel nodes that travel, and the bytes of their values (CUlaunchAttributeID):
#: cooperative, cluster dimension, cluster scheduling, priority, domain map, domain, preferred
#: cluster dimension, shared memory carve-out.
ATTRIBUTES = {2: 4, 4: 12, 5: 4, 8: 4, 9: 2, 10: 4, 11: 12, 14: 4}
#: The attributes of kernels that have to agree (CUfunction_attribute): threads of a block, static
#: shared, constant and local memory, registers, versions, and the clusters that it needs.
COMPARED = frozenset({0, 1, 2, 3, 4, 5, 6, 10, 11, 12, 13})
#: Those that are set: dynamic shared memory, carve-out, non-portable clusters, their scheduling.
SETTABLE = frozenset({8, 9, 14, 15})
FUNCTION_ATTRIBUTES = COMPARED | SETTABLE
#: How many of each a message may have.
COUNTS = {
    "environment": MAX_FIELDS,
    "regions": MAX_REGIONS,
    "weights": MAX_TENSORS,
    "inputs": MAX_OUTPUTS,
    "outputs": MAX_OUTPUTS,
    "images": MAX_IMAGES,
    "libraries": MAX_LIBRARIES,
    "calls": MAX_CALLS,
    "kernels": MAX_KERNELS,
    "nodes": MAX_NODES,
    "edges": MAX_EDGES,
    "fatbins": MAX_KERNELS,
    "tried": MAX_TRIED,
    "work": MAX_TENSORS,
    "sizes": MAX_GRAPHS - 1,
}
_NAMES = re.compile(r"[A-Za-z_$.][A-Za-z0-9_$.@]*")
_BUILD_ID = re.compile(r"([0-9a-f]{2}){1,64}")


def check(graph: Graph, of: Graph | None = None, taken: Taken | None = None) -> None:
    """Check everything about a graph that can be known before something is loaded.

    Args:
        graph: The graph.
        of: Another graph of its package, which was checked, with the same tuples of `SHARED`: they
            are not checked again, and neither are nodes and edges that are the same objects.
        taken: Where weights and work memory are, by regions: what was checked is added to it.

    Raises:
        GraphError: Something is out of its bounds; the message says what and where.
    """
    taken = {} if taken is None else taken
    for what, most in COUNTS.items():
        least = what in ("regions", "outputs", "nodes")
        _count(what, getattr(graph, what, ()), most, int(least))
    _text("name", graph.name, NAME_CHARS)
    if of is None:
        _check_shared(graph)
    if graph.regions not in taken:
        _require(len(taken) < MAX_BASES, f"graphs at more than {MAX_BASES} addresses")
        _check_regions(graph.regions)
        taken[graph.regions] = _check_shared_places(graph)
    _check_places(graph, taken[graph.regions])
    spans = _Spans((r.base, r.nbytes) for r in graph.regions)
    known = of.nodes if of is not None and of.regions == graph.regions else ()
    for at, (node, same) in enumerate(zip_longest(graph.nodes, known[: len(graph.nodes)])):
        if node is not same:
            _check_node(graph, at, node, spans)
    if of is None or graph.edges is not of.edges or len(graph.nodes) != len(of.nodes):
        _check_edges(graph)
    _check_tried(graph)


def _check_shared(graph: Graph) -> None:
    _text("pin", graph.pin, NAME_CHARS)
    names = [name for name, _ in graph.environment]
    _require(names == sorted(set(names)), "environment: names are not in order")
    for name, value in graph.environment:
        _text("environment", name, 64)
        _text(f"environment {name}", value, NAME_CHARS)
    _check_images(graph)
    _check_kernels(graph)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise GraphError(f"CUDA graph: {message}")


def _count(what: str, items: Sequence[object], most: int, least: int = 0) -> None:
    _require(least <= len(items) <= most, f"{what}: {len(items)}, not {least} to {most}")


def _text(what: str, text: str, most: int) -> None:
    _require(len(text) <= most, f"{what}: more than {most} characters")
    _require(text.isprintable(), f"{what}: {shown(text)} has unprintable characters")


def _digest(what: str, digest: bytes) -> None:
    _require(len(digest) == DIGEST_BYTES, f"{what}: a digest of {len(digest)} bytes")


class _Spans:
    """Answers whether addresses are in spans (begin, nbytes), which do not overlap."""

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        ordered = sorted(spans)
        self._bases = [base for base, _ in ordered]
        self._ends = [base + nbytes for base, nbytes in ordered]

    def has(self, address: int, nbytes: int) -> bool:
        at = bisect_right(self._bases, address) - 1
        return at >= 0 and address + nbytes <= self._ends[at]

    def touch(self, address: int, nbytes: int) -> bool:
        """Return True if some of these bytes are in a span."""
        at = bisect_right(self._bases, address)
        within = at > 0 and address < self._ends[at - 1]
        return within or (at < len(self._bases) and self._bases[at] < address + nbytes)


#: Where weights and work memory are, by the regions of graphs.
Taken = dict[tuple[RegionSpec, ...], _Spans]


def _check_regions(regions: Sequence[RegionSpec]) -> None:
    for at, region in enumerate(regions):
        end = region.base + region.nbytes
        _require(region.nbytes > 0, f"region {at}: empty")
        _require(region.base > 0 and end < 1 << ADDRESS_BITS, f"region {at}: no such addresses")
    _require(_disjoint((r.base, r.nbytes) for r in regions), "regions overlap")


def _disjoint(spans: Iterable[tuple[int, int]]) -> bool:
    """Return True if no two of these (begin, nbytes) overlap."""
    end = 0
    for begin, nbytes in sorted(spans):
        if begin < end:
            return False
        end = begin + nbytes
    return True


def _check_shared_places(graph: Graph) -> _Spans:
    """Check weights and work memory, and return where they are."""
    _check_named("weight", graph.weights, graph.regions)
    _check_named("work place", graph.work, graph.regions)
    # Tied weights are one place with two names.
    spans = {(graph.regions[p.region].base + p.offset, p.nbytes) for p in graph.weights}
    spans |= {(graph.regions[p.region].base + p.offset, p.nbytes) for p in graph.work}
    _require(_disjoint(spans), "weights and work memory overlap")
    return _Spans(spans)


def _check_places(graph: Graph, taken: _Spans) -> None:
    inputs = [read.place for read in graph.inputs]
    for read in graph.inputs:
        _require(len(read.value) == read.place.nbytes, f"input {read.place.name}: another length")
    total = sum(place.nbytes for place in inputs)
    _require(total <= MAX_GOLDEN_BYTES, f"golden inputs of more than {MAX_GOLDEN_BYTES} bytes")
    for output in graph.outputs:
        _digest(f"output {shown(output.place.name)}", output.digest)
    _check_named("input", inputs, graph.regions)
    _check_named("output", [each.place for each in graph.outputs], graph.regions)
    spans = {(graph.regions[p.region].base + p.offset, p.nbytes) for p in inputs if p.nbytes}
    free = _disjoint(spans) and not any(taken.touch(*span) for span in spans)
    _require(free, "inputs overlap with weights, work memory or each other")


def _check_named(what: str, places: Sequence[GraphPlace], regions: Sequence[RegionSpec]) -> None:
    _require(len({place.name for place in places}) == len(places), f"{what}s: a name twice")
    for place in places:
        _check_place(what, place, regions)


def _check_place(what: str, place: GraphPlace, regions: Sequence[RegionSpec]) -> None:
    _text(what, place.name, MAX_TENSOR_NAME)
    what = f"{what} {place.name}"
    _require(bool(place.name) and place.region < len(regions), f"{what}: no such region")
    bits = DTYPE_BITS.get(place.dtype)
    _require(bits is not None, f"{what}: no such dtype")
    _count(f"{what}: dimensions", place.shape, MAX_DIMENSIONS)
    nbytes = prod(place.shape) * (bits or 0)
    _require(nbytes == place.nbytes * 8, f"{what}: its shape and its length differ")
    inside = place.offset + place.nbytes <= regions[place.region].nbytes
    _require(inside, f"{what}: not in its region")


def _check_images(graph: Graph) -> None:
    for image in graph.images:
        _digest("image", image.digest)
        _require(0 < image.nbytes <= MAX_IMAGE_BYTES, f"an image of {image.nbytes} bytes")
    total = sum(image.nbytes for image in graph.images)
    _require(total <= MAX_IMAGES_BYTES, f"images of {total} bytes")
    _require(len({i.digest for i in graph.images}) == len(graph.images), "images: one twice")
    for library in graph.libraries:
        _text("library", library.name, NAME_CHARS)
        _digest(f"library {library.name}", library.fatbin)
        known = _BUILD_ID.fullmatch(library.build_id)
        _require(known is not None, f"library {library.name}: no build id")
        _text(f"library {library.name}: version", library.version, 64)
    for fatbin in graph.fatbins:
        _require(fatbin.library < len(graph.libraries), "a fatbin of no library")
        within = 0 < fatbin.nbytes <= MAX_FATBIN_BYTES and fatbin.offset <= MAX_FATBIN_BYTES
        _require(within, f"a fatbin of {fatbin.nbytes} bytes at {fatbin.offset}")
    for call in graph.calls:
        _text("call", call.name, NAME_CHARS)
        _require(call.library < len(graph.libraries), f"call {call.name}: no such library")
    _require(len({c.name for c in graph.calls}) == len(graph.calls), "calls: a name twice")


def _check_kernels(graph: Graph) -> None:
    for at, kernel in enumerate(graph.kernels):
        _require(len(kernel.name) <= MAX_KERNEL_NAME, f"kernel {at}: too long a name")
        _require(_NAMES.fullmatch(kernel.name) is not None, f"kernel {at}: no name of a kernel")
        sources = (
            (kernel.image, graph.images),
            (kernel.call, graph.calls),
            (kernel.fatbin, graph.fatbins),
        )
        given = [(index, there) for index, there in sources if index is not None]
        one = len(given) == 1 and given[0][0] < len(given[0][1])
        _require(one, f"kernel {at}: not of one image, one fatbin or one call")
        ids = [each for each, _ in kernel.attributes]
        known = ids == sorted(set(ids)) and set(ids) <= FUNCTION_ATTRIBUTES
        _require(known, f"kernel {at}: attributes that no kernel has")
        _count(f"kernel {at}: parameters", kernel.parameters, MAX_PARAMETERS)
        end = 0
        for offset, size in kernel.parameters:
            _require(end <= offset and size > 0, f"kernel {at}: parameters overlap")
            end = offset + size
        _require(end <= MAX_PARAMETERS_BYTES, f"kernel {at}: parameters of {end} bytes")


def _check_node(graph: Graph, at: int, node: Node, spans: _Spans) -> None:
    wrong = ""
    if isinstance(node, KernelNode):
        known = node.kernel < len(graph.kernels)
        wrong = _wrong_launch(node, graph.kernels[node.kernel]) if known else "no such kernel"
    elif isinstance(node, MemsetNode):
        wrong = _wrong_memset(node, spans)
    elif isinstance(node, MemcpyNode):
        inside = spans.has(node.target, node.nbytes) and spans.has(node.source, node.nbytes)
        wrong = "copies memory of no region" if node.nbytes else "copies nothing"
        wrong = "" if node.nbytes and inside else wrong
    if wrong:
        raise GraphError(f"CUDA graph: node {at}: {wrong}")


def _wrong_memset(node: MemsetNode, spans: _Spans) -> str:
    if node.element_bytes not in (1, 2, 4):
        return f"elements of {node.element_bytes} bytes"
    if node.value >= 1 << 8 * node.element_bytes:
        return "too large a value"
    if not node.width or not node.height:
        return "sets nothing"
    if node.height > 1 and node.pitch < node.width * node.element_bytes:
        return "its rows overlap"
    return "" if spans.has(node.address, node.nbytes) else "sets memory of no region"


def _wrong_launch(node: KernelNode, kernel: Kernel) -> str:
    # A package has tens of thousands of launches: this is quick for those that are right.
    for name, found, most in (("grid", node.grid, MAX_GRID), ("block", node.block, MAX_BLOCK)):
        if len(found) != 3:
            return f"its {name} has {len(found)} dimensions"
        x, y, z = found
        if not (0 < x <= most[0] and 0 < y <= most[1] and 0 < z <= most[2]):
            return f"its {name} is {found}"
    if x * y * z > MAX_THREADS:
        return f"a block of {x * y * z} threads"
    if node.shared_bytes > MAX_SHARED_BYTES:
        return "too much shared memory"
    if node.attributes:
        ids = [each for each, _ in node.attributes]
        if ids != sorted(set(ids)):
            return "attributes are not in order"
        for each, value in node.attributes:
            if ATTRIBUTES.get(each) != len(value):
                return f"attribute {each} does not travel"
    return "" if len(node.values) == kernel.nbytes else "parameters of another length"


def _check_tried(graph: Graph) -> None:
    for each in graph.tried:
        node = graph.nodes[each.node] if each.node < len(graph.nodes) else None
        _require(isinstance(node, KernelNode), "bytes were tried of no kernel")
        assert isinstance(node, KernelNode)
        end = each.offset + each.nbytes
        within = each.nbytes > 0 and end <= len(node.values)
        zeros = within and not any(node.values[each.offset : end])
        _require(zeros, f"node {each.node}: bytes that were tried are no zeros of parameters")


def _check_edges(graph: Graph) -> None:
    count = len(graph.nodes)
    after: list[list[int]] = [[] for _ in range(count)]
    waits = [0] * count
    for edge in graph.edges:
        _require(edge.first < count and edge.second < count, "an edge of no node")
        small = max(edge.from_port, edge.to_port, edge.type) < 256
        _require(small, "an edge with a port or a type of more than a byte")
        after[edge.first].append(edge.second)
        waits[edge.second] += 1
    pairs = {(e.first, e.second, e.from_port, e.to_port) for e in graph.edges}
    _require(len(pairs) == len(graph.edges), "an edge twice")
    ready = deque(at for at, n in enumerate(waits) if not n)
    done = 0
    while ready:
        done += 1
        for second in after[ready.popleft()]:
            waits[second] -= 1
            if not waits[second]:
                ready.append(second)
    _require(done == count, "its edges go in a circle")
