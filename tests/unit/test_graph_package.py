"""A CUDA graph's message: what comes back of it, and every bound that it has to keep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from mx.core.layout import MAX_TENSORS
from mx.graphs import bounds
from mx.graphs.bounds import check
from mx.graphs.message import FORMAT, Capture, decode, encode
from mx.graphs.package import (
    Edge,
    EmptyNode,
    Fatbin,
    Graph,
    GraphError,
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
    RegionSpec,
    TriedBytes,
)
from mx.units import GIB, MIB
from mx.wire.v1 import graphs_pb2 as pb
from tests.support.graphs import BASE, NBYTES, OTHER, graphs, small


@given(graphs())
def test_a_graph_comes_back(graph: Graph) -> None:
    data = encode(graph)
    assert decode(data) == (graph,)
    assert encode(*decode(data)) == data


def test_a_capture_comes_back() -> None:
    graph = replace(small(), images=(Image(b"i" * 32, 3),))
    capture = Capture(graph, (b"abc",), (BASE, OTHER), (1 << 20,))
    assert Capture.from_bytes(capture.to_bytes()) == capture
    for spoiled in (replace(capture, images=(b"ab",)), replace(capture, images=())):
        with pytest.raises(GraphError, match="other images"):
            Capture.from_bytes(spoiled.to_bytes())
    with pytest.raises(GraphError, match="not a protobuf"):
        Capture.from_bytes(b"\xff" * 9)


def _launch(**changes: Any) -> Any:
    return lambda g: {"nodes": (replace(g.nodes[0], **changes), *g.nodes[1:])}


def _node(node: Any) -> Any:
    return lambda g: {"nodes": (*g.nodes[:-1], node)}


def _kernel(**changes: Any) -> Any:
    return lambda g: {"kernels": (replace(g.kernels[0], **changes), *g.kernels[1:])}


def _weight(**changes: Any) -> Any:
    return lambda g: {"weights": (replace(g.weights[0], **changes),)}


def _tried(*span: int) -> Any:
    return lambda g: {"tried": (TriedBytes(*span),)}


def _same(**changes: Any) -> Any:
    return lambda g: changes


MEMSET, MEMCPY = MemsetNode(BASE, 0, 0, 1, 8, 1), MemcpyNode(BASE, OTHER, 8)
PLACE = GraphPlace("x", 0, 1024, 2, "U8", (2,))
#: What is changed, and what the error says of it.
SPOILED: dict[str, tuple[Any, str]] = {
    "fields": (_same(environment=tuple((f"f{n:03}", "") for n in range(65))), "environment: 65"),
    "fields' order": (_same(environment=(("b", ""), ("a", ""))), "not in order"),
    "a field twice": (_same(environment=(("a", ""), ("a", ""))), "not in order"),
    "a field's name": (_same(environment=(("a\x1b", ""),)), "unprintable"),
    "a field's value": (_same(environment=(("a", "x" * 257),)), "more than 256"),
    "the pin": (_same(pin="\n"), "pin: .* unprintable"),
    "no region": (_same(regions=()), "regions: 0"),
    "regions": (_same(regions=tuple(RegionSpec(n << 30, 1) for n in range(1, 10))), "regions: 9"),
    "an empty region": (_same(regions=(RegionSpec(BASE, 0),)), "empty"),
    "a region at 0": (_same(regions=(RegionSpec(0, 8),)), "no such addresses"),
    "a region beyond": (_same(regions=(RegionSpec(1 << 57, 8),)), "no such addresses"),
    "a region that wraps": (_same(regions=(RegionSpec(BASE, (1 << 64) - BASE),)), "no such"),
    "overlapping regions": (
        _same(regions=(RegionSpec(BASE, NBYTES), RegionSpec(BASE + NBYTES - 1, 8))),
        "regions overlap",
    ),
    "a weight's region": (_weight(region=2), "no such region"),
    "a weight's name": (_weight(name="x" * 1025), "more than 1024"),
    "a weight without name": (_weight(name=""), "no such region"),
    "a weight's dtype": (_weight(dtype="F33"), "no such dtype"),
    "a weight's shape": (_weight(shape=(2, 5)), "differ"),
    "a weight's length": (_weight(nbytes=33), "differ"),
    "a weight's rank": (_weight(shape=(1,) * 17, nbytes=4), "dimensions: 17"),
    "a weight's offset": (_weight(offset=NBYTES - 31), "not in its region"),
    "a weight that wraps": (_weight(offset=(1 << 64) - 16), "not in its region"),
    "a weight twice": (lambda g: {"weights": (g.weights[0], g.weights[0])}, "name twice"),
    "weights that overlap": (
        lambda g: {"weights": (g.weights[0], replace(g.weights[1], offset=16))},
        "overlap",
    ),
    "an input in a weight": (_same(inputs=(Input(replace(PLACE, offset=8), b"ab"),)), "overlap"),
    "an input's length": (_same(inputs=(Input(PLACE, b"abc"),)), "another length"),
    "an input's place": (_same(inputs=(Input(replace(PLACE, region=9), b"ab"),)), "no such region"),
    "too many inputs": (
        _same(inputs=tuple(Input(replace(PLACE, name=str(n)), b"ab") for n in range(65))),
        "inputs: 65",
    ),
    "no output": (_same(outputs=()), "outputs: 0"),
    "an output's digest": (_same(outputs=(GraphOutput(PLACE, b"d" * 31),)), "31 bytes"),
    "an output's place": (
        _same(outputs=(GraphOutput(replace(PLACE, offset=9**13), b"d" * 32),)),
        "not",
    ),
    "an image's digest": (_same(images=(Image(b"", 1),)), "digest of 0"),
    "an image's length": (_same(images=(Image(b"i" * 32, 257 * MIB),)), "an image of"),
    "an empty image": (_same(images=(Image(b"i" * 32, 0),)), "an image of 0"),
    "an image twice": (_same(images=(Image(b"i" * 32, 1),) * 2), "one twice"),
    "all images": (
        _same(images=tuple(Image(bytes([n]) * 32, 256 * MIB) for n in range(5))),
        f"images of {5 * GIB // 4}",
    ),
    "a library's name": (_same(libraries=(Library("\0", "00", b"f" * 32),)), "unprintable"),
    "a library's build": (_same(libraries=(Library("l", "0G", b"f" * 32),)), "no build id"),
    "a library's kernels": (_same(libraries=(Library("l", "00", b"f"),)), "digest of 1"),
    "libraries": (_same(libraries=(Library("l", "00", b"f" * 32),) * 65), "libraries: 65"),
    "a call's library": (_same(calls=(LibraryCall("c", 2),)), "no such library"),
    "a call's name": (_same(calls=(LibraryCall("c\n", 0),)), "unprintable"),
    "a call twice": (_same(calls=(LibraryCall("c", 0),) * 2), "name twice"),
    "calls": (_same(calls=tuple(LibraryCall(str(n), 0) for n in range(1025))), "calls: 1025"),
    "a library's version": (_same(libraries=(Library("l", "00", b"f" * 32, "\n"),)), "unprint"),
    "a fatbin's library": (_same(fatbins=(Fatbin(2, 0, 1),)), "of no library"),
    "an empty fatbin": (_same(fatbins=(Fatbin(1, 0, 0),)), "a fatbin of 0"),
    "a fatbin beyond": (_same(fatbins=(Fatbin(1, 5 * GIB, 1),)), "a fatbin of 1"),
    "fatbins": (_same(fatbins=(Fatbin(1, 0, 1),) * 10_001), "fatbins: 10001"),
    "a kernel's name": (_kernel(name="a b"), "no name"),
    "a kernel's fatbin": (_kernel(image=None, fatbin=1), "not of one image"),
    "a kernel's attribute": (_kernel(attributes=((16, 1),)), "no kernel has"),
    "a kernel's attributes": (_kernel(attributes=((8, 1), (0, 1))), "no kernel has"),
    "a kernel without name": (_kernel(name=""), "no name"),
    "a long name": (_kernel(name="k" * 16_385), "too long"),
    "a kernel's image": (_kernel(image=1), "not of one image"),
    "a kernel of nothing": (_kernel(image=None), "not of one image"),
    "a kernel of both": (_kernel(call=0), "not of one image"),
    "a kernel's call": (_kernel(image=None, call=1), "not of one image"),
    "overlapping parameters": (_kernel(parameters=((0, 8), (4, 4))), "overlap"),
    "an empty parameter": (_kernel(parameters=((0, 0),)), "overlap"),
    "parameters' bytes": (_kernel(parameters=((0, 32_765),)), "32765 bytes"),
    "parameters": (_kernel(parameters=tuple((n, 1) for n in range(4097))), "parameters: 4097"),
    "kernels": (_same(kernels=(small().kernels[0],) * 10_001), "kernels: 10001"),
    "no node": (_same(nodes=(), edges=()), "nodes: 0"),
    "a node's kernel": (_launch(kernel=3), "no such kernel"),
    "a grid of two": (_launch(grid=(1, 1)), "2 dimensions"),
    "an empty grid": (_launch(grid=(1, 0, 1)), "its grid is"),
    "a large grid": (_launch(grid=(1, 65_536, 1)), "its grid is"),
    "a block of four": (_launch(block=(1, 1, 1, 1)), "4 dimensions"),
    "a deep block": (_launch(block=(1, 1, 65)), "its block is"),
    "a large block": (_launch(block=(1024, 2, 1)), "2048 threads"),
    "shared memory": (_launch(shared_bytes=257 << 10), "shared memory"),
    "an attribute": (_launch(attributes=((1, bytes(64)),)), "attribute 1"),
    "an attribute's value": (_launch(attributes=((8, bytes(64)),)), "attribute 8"),
    "attributes' order": (_launch(attributes=((8, bytes(4)), (4, bytes(12)))), "not in order"),
    "parameters cut": (_launch(values=bytes(27)), "another length"),
    "more parameters": (_launch(values=bytes(29)), "another length"),
    "tried bytes of nothing": (_tried(0, 16, 0), "no zeros of parameters"),
    "tried bytes that are none": (_tried(0, 0, 8), "no zeros of parameters"),
    "tried bytes beyond": (_tried(0, 20, 9), "no zeros of parameters"),
    "tried bytes of a memset": (_tried(2, 0, 1), "of no kernel"),
    "tried bytes of nowhere": (_tried(9, 0, 1), "of no kernel"),
    "a memset's address": (_node(replace(MEMSET, address=BASE - 1)), "no region"),
    "a memset's width": (_node(replace(MEMSET, width=NBYTES + 1)), "no region"),
    "a memset of nothing": (_node(replace(MEMSET, width=0)), "sets nothing"),
    "a memset of no row": (_node(replace(MEMSET, height=0)), "sets nothing"),
    "a memset's rows": (_node(replace(MEMSET, height=3, pitch=4)), "rows overlap"),
    "a memset's height": (_node(replace(MEMSET, height=1 << 40, pitch=8)), "no region"),
    "a memset's elements": (_node(replace(MEMSET, element_bytes=3)), "elements of 3"),
    "a memset's value": (_node(replace(MEMSET, value=256)), "too large"),
    "a copy's target": (_node(replace(MEMCPY, target=1)), "no region"),
    "a copy's source": (_node(replace(MEMCPY, source=BASE + NBYTES - 7)), "no region"),
    "a copy of nothing": (_node(replace(MEMCPY, nbytes=0)), "copies nothing"),
    "a copy across": (_node(replace(MEMCPY, nbytes=1 << 62)), "no region"),
    "an edge from nowhere": (_same(edges=(Edge(5, 1),)), "of no node"),
    "an edge to nowhere": (_same(edges=(Edge(0, 5),)), "of no node"),
    "an edge to itself": (_same(edges=(Edge(1, 1),)), "circle"),
    "a circle": (_same(edges=(Edge(0, 1), Edge(1, 2), Edge(2, 0))), "circle"),
    "an edge twice": (_same(edges=(Edge(0, 1), Edge(0, 1))), "edge twice"),
    "a port": (_same(edges=(Edge(0, 1, 256),)), "port"),
    "another port": (_same(edges=(Edge(0, 1, 0, 256),)), "port"),
    "a type": (_same(edges=(Edge(0, 1, 0, 0, 256),)), "port"),
}  # fmt: skip


@pytest.mark.parametrize("what", SPOILED)
def test_a_bound_is_kept(what: str) -> None:
    check(small())
    change, says = SPOILED[what]
    spoiled = replace(small(), **change(small()))
    with pytest.raises(GraphError, match=says):
        check(spoiled)
    with pytest.raises(GraphError, match=says):
        encode(spoiled)


def test_large_counts_are_refused_before_objects_are_made() -> None:
    for what, most in bounds.COUNTS.items():
        tag = pb.CudaGraph.DESCRIPTOR.fields_by_name[what].number << 3 | 2
        varint = bytes([tag]) if tag < 128 else bytes([tag & 127 | 128, tag >> 7])
        data = bytes([8, FORMAT]) + (varint + b"\0") * (most + 1)
        with pytest.raises(GraphError, match=f"{what}: more than {most}"):
            decode(data)
    graph = replace(small(), nodes=(EmptyNode(),) * (bounds.MAX_NODES + 1), edges=())
    with pytest.raises(GraphError, match="nodes: 100001"):
        check(graph)
    edges = (Edge(0, 1),) * (bounds.MAX_EDGES + 1)
    with pytest.raises(GraphError, match="edges: 400001"):
        check(replace(small(), edges=edges))
    weights = (small().weights[0],) * (MAX_TENSORS + 1)
    with pytest.raises(GraphError, match="weights: 1000001"):
        check(replace(small(), weights=weights))


def test_golden_inputs_are_bounded() -> None:
    nbytes = 17 * MIB
    regions = (RegionSpec(BASE, 64 * MIB), *small().regions[1:])
    place = GraphPlace("x", 0, 1024, nbytes, "U8", (nbytes,))
    with pytest.raises(GraphError, match="golden inputs"):
        check(replace(small(), regions=regions, inputs=(Input(place, bytes(nbytes)),)))


def test_other_messages_are_refused() -> None:
    with pytest.raises(GraphError, match="no protobuf"):
        decode(b"\xff")
    with pytest.raises(GraphError, match="format 0"):
        decode(b"")
    with pytest.raises(GraphError, match="format 1"):
        decode(pb.CudaGraph(format=1).SerializeToString())
    with pytest.raises(GraphError, match="more than"):
        decode(bytes(bounds.MAX_MESSAGE_BYTES + 1))
    message = pb.CudaGraph.FromString(encode(small()))
    message.nodes.add()
    with pytest.raises(GraphError, match="of a kind"):
        decode(message.SerializeToString())
    message = pb.CudaGraph.FromString(encode(small()))
    message.kernels[0].offsets.append(28)
    with pytest.raises(GraphError, match="more offsets"):
        decode(message.SerializeToString())


def test_a_kernel_has_the_bytes_of_its_parameters() -> None:
    assert Kernel("k", 0, None, ()).nbytes == 0
    assert Kernel("k", 0, None, ((0, 8), (16, 4))).nbytes == 20
    assert MemsetNode(0, 16, 0, 4, 2, 3).nbytes == 40
    assert isinstance(small().nodes[0], KernelNode)
