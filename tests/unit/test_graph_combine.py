"""Two captures of one graph, and what refuses it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from mx.graphs import GraphRefusedError, combine
from mx.graphs.message import Capture, decode
from mx.graphs.package import Edge, Fatbin, Graph, Image, KernelNode, RegionSpec
from tests.support.graphs import BASE, NBYTES, graphs, small

#: Where outside memory was in two processes.
THERE, ELSEWHERE = (0x7F12_0000_0000, 0x7F34_0000_1000), (0x7F12_0020_0000, 0x7F35_0000_1000)


def captured(graph: Graph, outside: tuple[int, ...] = THERE, halves: tuple[int, ...] = ()) -> Any:
    """Return a graph as one process captures it."""
    images = tuple(bytes(image.nbytes) for image in graph.images)
    return Capture(replace(graph, tried=()), images, outside, halves)


def joined(first: Graph, second: Graph, *halves: tuple[int, ...]) -> Any:
    """Return the package of a graph as two processes captured it."""
    words = halves or ((), ())
    return combine(captured(first, THERE, words[0]), captured(second, ELSEWHERE, words[1]))


@given(graphs())
def test_two_captures_that_are_alike_give_the_graph(graph: Graph) -> None:
    package = joined(graph, graph)
    assert decode(package.graph) == (graph,)
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
        (lambda g: {"fatbins": (Fatbin(1, 0, 100_000),)}, "their fatbins"),
        (lambda g: {"calls": (replace(g.calls[0], name="mm"),)}, "their calls"),
        (lambda g: {"kernels": (replace(g.kernels[0], name="k"), *g.kernels[1:])}, "their kernels"),
        (lambda g: {"edges": (*g.edges, Edge(0, 4))}, "their edges"),
        (lambda g: {"nodes": g.nodes[:-1], "edges": g.edges}, "5 nodes, the other one 4"),
        (lambda g: {"regions": (RegionSpec(BASE, NBYTES), *g.regions[:0])}, "their regions"),
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
    with pytest.raises(GraphRefusedError, match=says):
        joined(graph, replace(graph, **change(graph)))


def with_bytes(graph: Graph, at: int, value: bytes) -> Graph:
    """Return a graph whose first node has other bytes of its parameters."""
    node = graph.nodes[0]
    assert isinstance(node, KernelNode)
    values = node.values[:at] + value + node.values[at + len(value) :]
    return replace(graph, nodes=(replace(node, values=values), *graph.nodes[1:]))


def test_bytes_that_nothing_explains_are_named() -> None:
    with pytest.raises(GraphRefusedError, match="_Z3addPfS_: parameter 2 differs, .*: byte 1"):
        joined(small(), with_bytes(small(), 17, b"\1"))


def test_an_address_of_the_region_is_the_same_in_both() -> None:
    inside, other = ((BASE + n).to_bytes(8, "little") for n in (4096, 8192))
    for first, second in ((inside, other), (inside, b"\1" * 8), (b"\1" * 8, inside)):
        one, two = (with_bytes(small(), 18, value) for value in (first, second))
        with pytest.raises(GraphRefusedError, match="parameter 2 has another address of the reg"):
            joined(one, two)
    halved = with_bytes(small(), 16, inside[:4])
    joined(halved, halved)  # a number: nothing is relocated


def test_half_an_address_is_named() -> None:
    one, other = 0x1234_5000, 0x1254_5000
    first = with_bytes(small(), 20, one.to_bytes(4, "little"))
    second = with_bytes(small(), 20, other.to_bytes(4, "little"))
    for words in (((one,), ()), ((), (other,))):
        with pytest.raises(GraphRefusedError, match="parameter 2 has half an address .*: byte 4"):
            joined(first, second, *words)
    # Addresses may differ in their upper halves alone.
    with pytest.raises(GraphRefusedError, match="parameter 2 has half an address .*: byte 4"):
        joined(first, first, (one,), (one,))
    joined(first, first, (one,), (other,))  # half of none in one process: a number
    inner = with_bytes(small(), 16, (BASE + (1 << 20)).to_bytes(8, "little"))
    joined(inner, inner, (1 << 20,), (1 << 20,))  # half an address of the region


def test_captures_without_decoys_are_refused() -> None:
    for other in (THERE, (*ELSEWHERE, THERE[1])):
        with pytest.raises(GraphRefusedError, match="the same addresses in both captures"):
            combine(captured(small()), captured(small(), other))
    with pytest.raises(GraphRefusedError, match="the same addresses in both captures"):
        combine(captured(small(), ()), captured(small()))
