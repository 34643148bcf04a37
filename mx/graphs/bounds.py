"""The bounds that every CUDA graph keeps.

`check` is asked before anything of a graph is loaded. It takes time linear in the graph's size.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
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
POINTER_BYTES = 8
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
}
_NAMES = re.compile(r"[A-Za-z_$.][A-Za-z0-9_$.@]*")
_BUILD_ID = re.compile(r"([0-9a-f]{2}){1,64}")


def check(graph: Graph) -> None:
    """Check everything about a graph that can be known before something is loaded.

    Raises:
        GraphError: Something is out of its bounds; the message says what and where.
    """
    for what, most in COUNTS.items():
        least = what in ("regions", "outputs", "nodes")
        _count(what, getattr(graph, what), most, int(least))
    _text("pin", graph.pin, NAME_CHARS)
    names = [name for name, _ in graph.environment]
    _require(names == sorted(set(names)), "environment: names are not in order")
    for name, value in graph.environment:
        _text("environment", name, 64)
        _text(f"environment {name}", value, NAME_CHARS)
    _check_regions(graph.regions)
    _check_places(graph)
    _check_images(graph)
    _check_kernels(graph)
    spans = _Spans(graph.regions)
    for at, node in enumerate(graph.nodes):
        _check_node(graph, at, node, spans)
    _check_edges(graph)


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
    """Answers whether addresses are in regions."""

    def __init__(self, regions: Sequence[RegionSpec]) -> None:
        ordered = sorted((r.base, r.base + r.nbytes) for r in regions)
        self._bases = [base for base, _ in ordered]
        self._ends = [end for _, end in ordered]

    def has(self, address: int, nbytes: int) -> bool:
        at = bisect_right(self._bases, address) - 1
        return at >= 0 and address + nbytes <= self._ends[at]


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


def _check_places(graph: Graph) -> None:
    total = 0
    for read in graph.inputs:
        _require(len(read.value) == read.place.nbytes, f"input {read.place.name}: another length")
        total += len(read.value)
    _require(total <= MAX_GOLDEN_BYTES, f"golden inputs of more than {MAX_GOLDEN_BYTES} bytes")
    for output in graph.outputs:
        _digest(f"output {shown(output.place.name)}", output.digest)
    inputs, outputs = [i.place for i in graph.inputs], [o.place for o in graph.outputs]
    for what, places in (("weight", graph.weights), ("input", inputs), ("output", outputs)):
        names = {place.name for place in places}
        _require(len(names) == len(places), f"{what}s: a name twice")
        for place in places:
            _check_place(what, place, graph.regions)
    # Tied weights are one place with two names.
    fixed = {(place.region, place.offset, place.nbytes) for place in [*graph.weights, *inputs]}
    spans = ((graph.regions[r].base + offset, nbytes) for r, offset, nbytes in fixed)
    _require(_disjoint(spans), "weights and inputs overlap")


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
    for call in graph.calls:
        _text("call", call.name, NAME_CHARS)
        _require(call.library < len(graph.libraries), f"call {call.name}: no such library")
    _require(len({c.name for c in graph.calls}) == len(graph.calls), "calls: a name twice")


def _check_kernels(graph: Graph) -> None:
    for at, kernel in enumerate(graph.kernels):
        _require(len(kernel.name) <= MAX_KERNEL_NAME, f"kernel {at}: too long a name")
        _require(_NAMES.fullmatch(kernel.name) is not None, f"kernel {at}: no name of a kernel")
        of_image = kernel.image is not None and kernel.image < len(graph.images)
        of_call = kernel.call is not None and kernel.call < len(graph.calls)
        one = (kernel.image is None) != (kernel.call is None)
        _require(one and (of_image or of_call), f"kernel {at}: of no image and no call")
        _count(f"kernel {at}: parameters", kernel.parameters, MAX_PARAMETERS)
        end = 0
        for offset, size in kernel.parameters:
            _require(end <= offset and size > 0, f"kernel {at}: parameters overlap")
            end = offset + size
        _require(end <= MAX_PARAMETERS_BYTES, f"kernel {at}: parameters of {end} bytes")


def _check_node(graph: Graph, at: int, node: Node, spans: _Spans) -> None:
    what = f"node {at}"
    if isinstance(node, KernelNode):
        _require(node.kernel < len(graph.kernels), f"{what}: no such kernel")
        _check_launch(what, node, graph.kernels[node.kernel], spans)
    elif isinstance(node, MemsetNode):
        _require(node.element_bytes in (1, 2, 4), f"{what}: elements of {node.element_bytes} bytes")
        _require(node.value < 1 << 8 * node.element_bytes, f"{what}: too large a value")
        _require(node.width > 0 and node.height > 0, f"{what}: sets nothing")
        apart = node.height == 1 or node.pitch >= node.width * node.element_bytes
        _require(apart, f"{what}: its rows overlap")
        _require(spans.has(node.address, node.nbytes), f"{what}: sets memory of no region")
    elif isinstance(node, MemcpyNode):
        _require(node.nbytes > 0, f"{what}: copies nothing")
        inside = spans.has(node.target, node.nbytes) and spans.has(node.source, node.nbytes)
        _require(inside, f"{what}: copies memory of no region")


def _check_launch(what: str, node: KernelNode, kernel: Kernel, spans: _Spans) -> None:
    for name, found, most in (("grid", node.grid, MAX_GRID), ("block", node.block, MAX_BLOCK)):
        _require(len(found) == 3, f"{what}: its {name} has {len(found)} dimensions")
        fits = all(0 < n <= m for n, m in zip(found, most, strict=True))
        _require(fits, f"{what}: its {name} is {found}")
    _require(prod(node.block) <= MAX_THREADS, f"{what}: a block of {prod(node.block)} threads")
    _require(node.shared_bytes <= MAX_SHARED_BYTES, f"{what}: too much shared memory")
    ids = [each for each, _ in node.attributes]
    _require(ids == sorted(set(ids)), f"{what}: attributes are not in order")
    for each, value in node.attributes:
        _require(ATTRIBUTES.get(each) == len(value), f"{what}: attribute {each} does not travel")
    _require(len(node.values) == kernel.nbytes, f"{what}: parameters of another length")
    if not node.pointers:
        return
    begins = [offset for offset, _ in kernel.parameters]
    end = 0
    for pointer in node.pointers:
        _require(pointer >= end, f"{what}: pointers overlap")
        end = pointer + POINTER_BYTES
        inside = bisect_right(begins, pointer) - 1
        fits = inside >= 0 and end <= sum(kernel.parameters[inside])
        _require(fits, f"{what}: a pointer at {pointer} is in no parameter")
        address = int.from_bytes(node.values[pointer:end], "little")
        _require(spans.has(address, 0), f"{what}: {address:#x} is in no region")


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
