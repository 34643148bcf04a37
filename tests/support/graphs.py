"""CUDA graphs as plain values: drawn ones that keep all bounds, and small ones to spoil."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from mx.graphs.bounds import ATTRIBUTES
from mx.graphs.package import (
    Edge,
    EmptyNode,
    Fatbin,
    Graph,
    GraphOutput,
    GraphPlace,
    Image,
    Input,
    Kernel,
    KernelNode,
    Library,
    LibraryCall,
    MemcpyNode,
    MemsetNode,
    Node,
    RegionSpec,
    TriedBytes,
)

BASE, NBYTES = 0x6000_0000_0000, 4 << 20
OTHER = 0x7000_0020_0000
#: Of each region: weights, then inputs, then outputs, by thirds.
_PART = NBYTES // 4


def small() -> Graph:
    """Return a graph that has one of everything."""
    address = (BASE + 4096).to_bytes(8, "little")
    return Graph(
        environment=(("driver", "13000"), ("sm", "9.0")),
        pin="pin-1",
        regions=(RegionSpec(BASE, NBYTES), RegionSpec(OTHER, NBYTES)),
        weights=(
            GraphPlace("w", 0, 0, 32, "F32", (2, 4)),
            GraphPlace("tied", 0, 0, 32, "F32", (8,)),
        ),
        inputs=(Input(GraphPlace("x", 1, 256, 4, "BF16", (2,)), b"abcd"),),
        outputs=(GraphOutput(GraphPlace("y", 1, 512, 2, "U8", (2,)), b"d" * 32),),
        images=(Image(b"i" * 32, 1000),),
        libraries=(
            Library("libcublasLt.so.12", "00ff", b"f" * 32),
            Library("libtorch_cuda.so", "01", b"t" * 32, "2.11.0+cu130"),
        ),
        calls=(LibraryCall("mm 8x8", 0),),
        kernels=(
            Kernel("_Z3addPfS_", 0, None, ((0, 8), (8, 4), (16, 12))),
            Kernel("nvjet_tst", None, 0, ()),
            Kernel("_ZN2at6native3fooE", None, None, ((0, 8),), 0, ((0, 1024), (8, 49152))),
        ),
        nodes=(
            KernelNode(0, (8, 1, 1), (128, 1, 1), 512, ((8, b"\1\0\0\0"),), address + bytes(20)),
            KernelNode(1, (1, 1, 1), (32, 1, 1), 0, (), b""),
            MemsetNode(BASE + 64, 128, 255, 1, 100, 3),
            MemcpyNode(OTHER, BASE, 64),
            EmptyNode(),
        ),
        edges=(Edge(0, 1, 1, 0, 1), Edge(0, 2), Edge(1, 3), Edge(2, 3), Edge(3, 4)),
        fatbins=(Fatbin(1, 4096, 100_000),),
        tried=(TriedBytes(0, 16, 12),),
    )


@st.composite
def graphs(draw: Any) -> Graph:
    """Draw a graph that keeps all bounds."""
    regions = (RegionSpec(BASE, NBYTES), RegionSpec(OTHER, NBYTES))[: draw(st.integers(1, 2))]

    def places(prefix: str, part: int, least: int = 0) -> tuple[GraphPlace, ...]:
        sizes = draw(st.lists(st.integers(0, 5000), min_size=least, max_size=4))
        found, at = [], part * _PART
        for number, size in enumerate(sizes):
            region = draw(st.integers(0, len(regions) - 1))
            name = f"{prefix}.{number}" + draw(st.sampled_from(["", "é", ".weight"]))
            found.append(GraphPlace(name, region, at, 2 * size, "BF16", (size, 1)))
            at += 10_240
        return tuple(found)

    images = tuple(Image(bytes([n]) * 32, n + 1) for n in range(draw(st.integers(0, 3))))
    libraries = tuple(
        Library(f"lib{n}.so", f"{n:02x}", bytes(32)) for n in range(draw(st.integers(1, 2)))
    )
    calls = tuple(
        LibraryCall(f"call {n}", draw(st.integers(0, len(libraries) - 1)))
        for n in range(draw(st.integers(1, 2)))
    )
    fatbins = tuple(
        Fatbin(draw(st.integers(0, len(libraries) - 1)), 8 * n, n + 1)
        for n in range(draw(st.integers(0, 2)))
    )
    kinds = ["call", *(["image"] if images else []), *(["fatbin"] if fatbins else [])]
    kernels = []
    for number in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(kinds))
        layout, end = [], 0
        for size in draw(st.lists(st.sampled_from([1, 2, 4, 8, 16, 24, 128]), max_size=5)):
            begin = -(-end // min(size, 8)) * min(size, 8)
            layout.append((begin, size))
            end = begin + size
        kernels.append(
            Kernel(
                f"_Z{number}k",
                draw(st.integers(0, len(images) - 1)) if kind == "image" else None,
                draw(st.integers(0, len(calls) - 1)) if kind == "call" else None,
                tuple(layout),
                draw(st.integers(0, len(fatbins) - 1)) if kind == "fatbin" else None,
                ((0, draw(st.integers(0, 1024))),) if kind == "fatbin" else (),
            )
        )
    nodes: list[Node] = []
    for _ in range(draw(st.integers(1, 8))):
        region = draw(st.sampled_from(regions))
        at = region.base + draw(st.integers(0, NBYTES // 2))
        kind = draw(st.sampled_from(["kernel", "kernel", "memset", "memcpy", "empty"]))
        if kind == "kernel":
            nodes.append(draw(_launches(kernels, at)))
        elif kind == "memset":
            width = draw(st.integers(1, 4096))
            element = draw(st.sampled_from([1, 2, 4]))
            height = draw(st.integers(1, 3))
            nodes.append(MemsetNode(at, width * 4, 7, element, width, height))
        elif kind == "memcpy":
            nodes.append(MemcpyNode(at, regions[0].base, draw(st.integers(1, 4096))))
        else:
            nodes.append(EmptyNode())
    pairs = draw(st.sets(st.tuples(st.integers(0, len(nodes) - 1), st.integers(0, len(nodes) - 1))))
    port = st.integers(0, 255)
    edges = tuple(
        Edge(one, other, draw(port), draw(port), draw(st.sampled_from([0, 1])))
        for one, other in sorted(pairs)
        if one < other
    )
    environment = draw(st.dictionaries(st.sampled_from("abcd"), st.sampled_from(["", "1", "é"])))
    return Graph(
        tuple(sorted(environment.items())),
        draw(st.sampled_from(["", "pin"])),
        regions,
        places("w", 0),
        tuple(Input(place, bytes(place.nbytes)) for place in places("x", 1)),
        tuple(GraphOutput(place, bytes(32)) for place in places("y", 2, 1)),
        images,
        libraries,
        calls,
        tuple(kernels),
        tuple(nodes),
        edges,
        fatbins,
    )


@st.composite
def _launches(draw: Any, kernels: list[Kernel], address: int) -> KernelNode:
    index = draw(st.integers(0, len(kernels) - 1))
    kernel = kernels[index]
    values = bytearray(draw(st.binary(min_size=kernel.nbytes, max_size=kernel.nbytes)))
    for offset, size in kernel.parameters:
        if size >= 8 and draw(st.booleans()):
            at = offset + draw(st.integers(0, size - 8))
            values[at : at + 8] = address.to_bytes(8, "little")
    chosen = draw(st.sets(st.sampled_from(sorted(ATTRIBUTES))))
    return KernelNode(
        index,
        (draw(st.integers(1, 1 << 20)), 1, draw(st.integers(1, 65_535))),
        (draw(st.integers(1, 512)), 2, 1),
        draw(st.integers(0, 200_000)),
        tuple((each, bytes(ATTRIBUTES[each])) for each in sorted(chosen)),
        bytes(values),
    )


@st.composite
def packages(draw: Any, graph: Graph | None = None) -> tuple[Graph, ...]:
    """Draw the graphs of a package: of one topology, of others, and at other addresses."""
    first = draw(graphs()) if graph is None else graph
    found = [first]
    for number in range(draw(st.integers(0, 3))):
        template = draw(st.sampled_from(found))
        nodes = tuple(
            draw(_sized(node, first.kernels)) if draw(st.booleans()) else node
            for node in template.nodes
        )
        edges = template.edges[: draw(st.sampled_from([None, None, 1]))]
        made = replace(template, name=f"decode.{number}", nodes=nodes, edges=edges, tried=())
        found.append(replace(made, inputs=first.inputs[: draw(st.integers(0, 1))]))
    if draw(st.booleans()):
        found += [_moved(each) for each in found]
    return tuple(found)


@st.composite
def _sized(draw: Any, node: Node, kernels: tuple[Kernel, ...]) -> Node:
    if isinstance(node, KernelNode):
        made: KernelNode = draw(_launches(list(kernels), BASE))
        return made if draw(st.booleans()) else replace(made, attributes=node.attributes)
    if isinstance(node, MemsetNode):
        return replace(node, value=draw(st.integers(0, 255)))
    return replace(node, nbytes=1) if isinstance(node, MemcpyNode) else node


def _moved(graph: Graph) -> Graph:
    """Return a graph at other addresses; numbers in parameters stay."""
    by = 1 << 44
    regions = tuple(replace(region, base=region.base + by) for region in graph.regions)
    nodes: list[Node] = []
    for node in graph.nodes:
        if isinstance(node, MemsetNode):
            node = replace(node, address=node.address + by)
        elif isinstance(node, MemcpyNode):
            node = replace(node, target=node.target + by, source=node.source + by)
        nodes.append(node)
    return replace(graph, regions=regions, nodes=tuple(nodes))
