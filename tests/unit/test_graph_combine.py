"""Two captures of one graph, and what refuses it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from mx.graphs.export import combine
from mx.graphs.message import Capture, decode
from mx.graphs.package import (
    Edge,
    Graph,
    Image,
    KernelNode,
    MemcpyNode,
    MemsetNode,
    Node,
    RegionSpec,
)
from mx.graphs.pointers import GraphRefusedError
from tests.support.graphs import BASE, OTHER, graphs, small

SHIFTS = {BASE: 0x0B15_2740_0000, OTHER: 0x0A13_1520_0000}


def captured(graph: Graph) -> Capture:
    """Return a graph as one process captures it."""
    nodes = tuple(replace(n, pointers=()) if isinstance(n, KernelNode) else n for n in graph.nodes)
    images = tuple(bytes(image.nbytes) for image in graph.images)
    return Capture(replace(graph, nodes=nodes), images)


def shifted(graph: Graph) -> Graph:
    """Return the graph at other addresses."""

    def moved(address: int) -> int:
        for region in graph.regions:
            if region.base <= address < region.base + region.nbytes:
                return address + SHIFTS[region.base]
        raise AssertionError(hex(address))

    def node(old: Node) -> Node:
        if isinstance(old, KernelNode):
            values = bytearray(old.values)
            for at in old.pointers:
                word = int.from_bytes(values[at : at + 8], "little")
                values[at : at + 8] = moved(word).to_bytes(8, "little")
            return replace(old, values=bytes(values))
        if isinstance(old, MemsetNode):
            return replace(old, address=moved(old.address))
        if isinstance(old, MemcpyNode):
            return replace(old, target=moved(old.target), source=moved(old.source))
        return old

    regions = tuple(RegionSpec(r.base + SHIFTS[r.base], r.nbytes) for r in graph.regions)
    return replace(graph, regions=regions, nodes=tuple(map(node, graph.nodes)))


@given(graphs())
def test_two_captures_give_the_graph_with_its_pointers(graph: Graph) -> None:
    package = combine(captured(graph), captured(shifted(graph)))
    assert decode(package.graph) == graph
    assert package.environment == dict(graph.environment) and package.pin == graph.pin
    assert sorted(package.images) == sorted(image.digest.hex() for image in graph.images)


def _first(**changes: Any) -> Any:
    return lambda g: {"nodes": (replace(g.nodes[0], **changes), *g.nodes[1:])}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda g: {"environment": ()}, "their environment"),
        (lambda g: {"pin": ""}, "their pin"),
        (lambda g: {"weights": g.weights[:1]}, "their weights"),
        (lambda g: {"inputs": ()}, "their inputs"),
        (lambda g: {"outputs": (replace(g.outputs[0], digest=bytes(32)),)}, "their outputs"),
        (lambda g: {"images": (Image(b"j" * 32, 1000),)}, "their images"),
        (lambda g: {"libraries": (replace(g.libraries[0], build_id="01"),)}, "their libraries"),
        (lambda g: {"calls": (replace(g.calls[0], name="mm"),)}, "their calls"),
        (lambda g: {"kernels": (replace(g.kernels[0], name="k"), *g.kernels[1:])}, "their kernels"),
        (lambda g: {"edges": (*g.edges, Edge(0, 4))}, "their edges"),
        (lambda g: {"nodes": g.nodes[:-1], "edges": g.edges}, "5 nodes, the other one 4"),
        (lambda g: {"regions": g.regions[:1]}, "other regions"),
        (_first(grid=(9, 1, 1)), "node 0, kernel _Z3addPfS_: .* launch it differently"),
        (_first(attributes=()), "launch it differently"),
        (_first(shared_bytes=0), "launch it differently"),
        (lambda g: {"nodes": (*g.nodes[:4], g.nodes[2])}, "node 4: .* differ in it"),
        (lambda g: {"nodes": (*g.nodes[:2], replace(g.nodes[2], value=0), *g.nodes[3:])}, "node 2"),
        (
            lambda g: {"nodes": (*g.nodes[:2], replace(g.nodes[2], address=BASE), *g.nodes[3:])},
            "node 2",
        ),
        (
            lambda g: {"nodes": (*g.nodes[:3], replace(g.nodes[3], nbytes=65), g.nodes[4])},
            "node 3",
        ),
    ],
)
def test_what_differs_refuses_the_graph(change: Any, says: str) -> None:
    graph = small()
    second = shifted(graph)
    with pytest.raises(GraphRefusedError, match=says):
        combine(captured(graph), captured(replace(second, **change(second))))


def test_a_parameter_is_named() -> None:
    graph = small()
    second = shifted(graph)
    first_node = second.nodes[0]
    assert isinstance(first_node, KernelNode)
    values = first_node.values[:16] + b"\1" + first_node.values[17:]
    nodes = (replace(first_node, values=values), *second.nodes[1:])
    with pytest.raises(GraphRefusedError, match="_Z3addPfS_: parameter 2 differs"):
        combine(captured(graph), captured(replace(second, nodes=nodes)))


def test_captures_at_the_same_address_are_refused() -> None:
    capture = captured(small())
    with pytest.raises(GraphRefusedError, match="one half only"):
        combine(capture, capture)
