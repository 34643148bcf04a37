"""CUDA graphs as plain values: drawn ones that keep all bounds, and small ones to spoil."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from mx.graphs.bounds import ATTRIBUTES
from mx.graphs.package import (
    Edge,
    EmptyNode,
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
        libraries=(Library("libcublasLt.so.12", "00ff", b"f" * 32),),
        calls=(LibraryCall("mm 8x8", 0),),
        kernels=(
            Kernel("_Z3addPfS_", 0, None, ((0, 8), (8, 4), (16, 12))),
            Kernel("nvjet_tst", None, 0, ()),
        ),
        nodes=(
            KernelNode(
                0, (8, 1, 1), (128, 1, 1), 512, ((8, b"\1\0\0\0"),), address + bytes(20), (0,)
            ),
            KernelNode(1, (1, 1, 1), (32, 1, 1), 0, (), b""),
            MemsetNode(BASE + 64, 128, 255, 1, 100, 3),
            MemcpyNode(OTHER, BASE, 64),
            EmptyNode(),
        ),
        edges=(Edge(0, 1, 1, 0, 1), Edge(0, 2), Edge(1, 3), Edge(2, 3), Edge(3, 4)),
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
    kernels = []
    for number in range(draw(st.integers(1, 4))):
        of_image = bool(images) and draw(st.booleans())
        layout, end = [], 0
        for size in draw(st.lists(st.sampled_from([1, 2, 4, 8, 16, 24, 128]), max_size=5)):
            begin = -(-end // min(size, 8)) * min(size, 8)
            layout.append((begin, size))
            end = begin + size
        kernels.append(
            Kernel(
                f"_Z{number}k",
                draw(st.integers(0, len(images) - 1)) if of_image else None,
                None if of_image else draw(st.integers(0, len(calls) - 1)),
                tuple(layout),
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
    )


@st.composite
def _launches(draw: Any, kernels: list[Kernel], address: int) -> KernelNode:
    index = draw(st.integers(0, len(kernels) - 1))
    kernel = kernels[index]
    values = bytearray(draw(st.binary(min_size=kernel.nbytes, max_size=kernel.nbytes)))
    pointers = []
    for offset, size in kernel.parameters:
        if size >= 8 and draw(st.booleans()):
            at = offset + draw(st.integers(0, size - 8))
            values[at : at + 8] = address.to_bytes(8, "little")
            pointers.append(at)
    chosen = draw(st.sets(st.sampled_from(sorted(ATTRIBUTES))))
    return KernelNode(
        index,
        (draw(st.integers(1, 1 << 20)), 1, draw(st.integers(1, 65_535))),
        (draw(st.integers(1, 512)), 2, 1),
        draw(st.integers(0, 200_000)),
        tuple((each, bytes(ATTRIBUTES[each])) for each in sorted(chosen)),
        bytes(values),
        tuple(pointers),
    )
