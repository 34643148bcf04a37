"""The message of graphs of several sizes: what comes back, what it stores, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from mx.errors import ConfigError
from mx.graphs import Package, join
from mx.graphs import message as messages
from mx.graphs.bounds import MAX_ALL
from mx.graphs.message import Capture, decode, encode
from mx.graphs.package import (
    Edge,
    Graph,
    GraphError,
    GraphPlace,
    Image,
    Kernel,
    KernelNode,
    Library,
    LibraryCall,
    MemsetNode,
    RegionSpec,
)
from mx.wire.v1 import graphs_pb2 as pb
from tests.support.graphs import BASE, graphs, packages, small


def sized(graph: Graph, number: int) -> Graph:
    """Return a graph whose first launch and memset have other parameters."""
    first, second, memset, *rest = graph.nodes
    assert isinstance(first, KernelNode) and isinstance(memset, MemsetNode)
    values = first.values[:8] + bytes([number]) + first.values[9:]
    first = replace(first, grid=(number, 1, 1), values=values)
    nodes = (first, second, replace(memset, value=number), *rest)
    return replace(graph, name=f"decode.{number}", nodes=nodes)


def several(count: int = 3) -> tuple[Graph, ...]:
    return tuple(sized(small(), number) for number in range(1, count + 1))


@given(packages())
def test_graphs_come_back(given: tuple[Graph, ...]) -> None:
    data = encode(*given)
    found = decode(data)
    assert found == given
    assert encode(*found) == data
    for graph in found:  # what they have in common they have once
        template = found[graph.topology]
        assert graph.kernels is found[0].kernels and graph.edges is template.edges
        for node, other in zip(graph.nodes, template.nodes, strict=True):
            assert type(node) is type(other) and (node is other or node != other)


def test_a_size_stores_what_differs() -> None:
    one, more = (len(encode(*several(count))) for count in (1, 41))
    assert more - one < 40 * 150  # its names, inputs, outputs, and two nodes
    message = pb.CudaGraph.FromString(encode(*several(2)))
    (size,) = message.sizes
    assert list(size.launches) == [0, 0, 2, 1, 1, 128, 1, 1, 512, 8, 1]
    assert size.parameters == b"\2" and list(size.at) == [2] and not size.edges


def _change(change: Callable[[Any], object]) -> bytes:
    message = pb.CudaGraph.FromString(encode(*several()))
    change(message)
    return message.SerializeToString()


def _launches(size: Any, *numbers: int) -> None:
    del size.launches[:]
    size.launches.extend(numbers)


def _set(index: int, value: int) -> Callable[[Any], object]:
    """Change a number of the second graph's launch."""

    def change(message: Any) -> None:
        message.sizes[0].launches[index] = value

    return change


#: What is done to the message of three graphs, and what the error says.
SPOILED: dict[str, tuple[Callable[[Any], object], str]] = {
    "a size of a later one": (lambda m: setattr(m.sizes[0], "of", 2), "a size of no graph"),
    "a size of nothing": (lambda m: setattr(m.sizes[0], "of", 2**32 - 1), "a size of no graph"),
    "of itself, without nodes": (
        lambda m: m.sizes[0].CopyFrom(pb.GraphSize(of=1, outputs=m.outputs)),
        "nodes: 0",
    ),
    "one name twice": (lambda m: setattr(m.sizes[0], "name", "decode.1"), "a name twice"),
    "a name": (lambda m: setattr(m.sizes[0], "name", "\n"), "unprintable"),
    "a long name": (lambda m: setattr(m.sizes[0], "name", "x" * 257), "more than 256"),
    "edges besides": (lambda m: m.sizes[0].edges.add(), "does not fit its topology"),
    "numbers cut": (lambda m: m.sizes[0].launches.pop(), "does not fit its topology"),
    "a number more": (lambda m: m.sizes[0].launches.append(0), "does not fit its topology"),
    "a launch that is a memset": (_set(0, 2), "a launch at 2, where there is none"),
    "a launch beyond": (_set(0, 5), "a launch at 5, where there is none"),
    "a launch far beyond": (_set(0, 2**32 - 1), "where there is none"),
    "a launch twice": (
        lambda m: m.sizes[0].launches.extend(list(m.sizes[0].launches)),
        "a launch at 0, where there is none",
    ),
    "no such kernel": (_set(1, 9), "node 0: no such kernel"),
    "another kernel": (_set(1, 1), "node 0: parameters of another length"),
    "an empty grid": (_set(2, 0), "node 0: its grid is"),
    "a large grid": (_set(3, 2**31), "node 0: its grid is"),
    "a large block": (_set(5, 1025), "node 0: its block is"),
    "threads": (_set(6, 64), "node 0: a block of 8192 threads"),
    "shared memory": (_set(8, 2**31), "node 0: too much shared memory"),
    "parameters beyond": (_set(9, 28), "another length"),
    "parameters far beyond": (_set(9, 2**32 - 1), "another length"),
    "parameters of more bytes": (_set(10, 2), "another length|does not fit"),
    "parameters of no bytes": (_set(10, 0), "another length|does not fit"),
    "bytes left": (lambda m: setattr(m.sizes[0], "parameters", b"ab"), "does not fit"),
    "bytes lost": (lambda m: setattr(m.sizes[0], "parameters", b""), "another length|does not fit"),
    "a node at no place": (lambda m: m.sizes[0].at.pop(), "does not fit its topology"),
    "a node beyond": (lambda m: m.sizes[0].at.__setitem__(0, 5), "at 5 of another kind"),
    "a node of another kind": (
        lambda m: m.sizes[0].at.__setitem__(0, 3),
        "a node at 3 of another kind",
    ),
    "a launch among them": (
        lambda m: m.sizes[0].nodes[0].CopyFrom(m.nodes[0]),
        "a node at 2 of another kind",
    ),
    "a node twice": (
        lambda m: (m.sizes[0].at.append(2), m.sizes[0].nodes.add().CopyFrom(m.nodes[2])),
        "does not fit its topology",
    ),
    "a memset beyond": (
        lambda m: setattr(m.sizes[0].nodes[0].memset, "address", BASE - 1),
        "node 2: sets memory of no region",
    ),
    "no output": (lambda m: m.sizes[1].ClearField("outputs"), "outputs: 0"),
    "outputs": (lambda m: [m.sizes[1].outputs.add() for _ in range(64)], "outputs: more than 64"),
    "inputs": (lambda m: [m.sizes[1].inputs.add() for _ in range(65)], "inputs: more than 64"),
    "an input's bytes": (lambda m: setattr(m.sizes[1].inputs[0], "value", b"a"), "another length"),
    "an output's digest": (lambda m: setattr(m.sizes[1].outputs[0], "blake3", b"a"), "digest of 1"),
    "tried bytes": (lambda m: m.sizes[1].tried.add(node=0, offset=1, nbytes=1), "were tried"),
    "too few regions": (lambda m: m.sizes[1].regions.add(base=BASE, nbytes=4096), "no such region"),
    "other regions, nodes as they were": (
        lambda m: m.sizes[1].regions.extend(
            [
                pb.GraphRegion(base=each.base + (1 << 44), nbytes=each.nbytes)
                for each in m.regions
            ]
        ),
        "node 2: sets memory of no region",
    ),
    "a work place": (
        lambda m: m.work.add(name="kv", region=0, offset=0, nbytes=8, dtype="U8", shape=[8]),
        "overlap",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", SPOILED)
def test_a_size_that_does_not_fit_is_refused(what: str) -> None:
    change, says = SPOILED[what]
    with pytest.raises(GraphError, match=says):
        decode(_change(change))


@pytest.mark.parametrize("what", ["nodes", "edges", "tried"])
def test_all_graphs_together_are_bounded(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also nodes that a message does not repeat: each size is a row of them here."""
    data = encode(*several(9))
    if what == "nodes":
        each = len(small().nodes)
        most = 8 * (each + 1)  # and the memset that differs
        monkeypatch.setattr(messages, "MAX_ALL", most)
        assert len(decode(data)) == 9
        monkeypatch.setattr(messages, "MAX_ALL", most - 1)
    else:
        message = pb.CudaGraph.FromString(data)
        kind = {"edges": pb.GraphEdge, "tried": pb.GraphTriedBytes}[what]
        getattr(message.sizes[0], what).extend([kind()] * (MAX_ALL + 1))
        data = message.SerializeToString()
    with pytest.raises(GraphError, match="more than"):
        decode(data)


def test_addresses_of_a_package_are_bounded() -> None:
    first = replace(small(), nodes=small().nodes[:1], edges=())
    moved = [
        replace(first, regions=tuple(replace(r, base=r.base + (n << 44)) for r in first.regions))
        for n in range(17)
    ]
    assert len(decode(encode(*moved[:16]))) == 16
    with pytest.raises(GraphError, match="at more than 16 addresses"):
        decode(encode(*moved))


def test_a_capture_is_of_one_graph() -> None:
    message = pb.GraphCapture(graph=pb.CudaGraph.FromString(encode(*several())))
    message.images.append(bytes(1000))
    with pytest.raises(GraphError, match="of several graphs"):
        Capture.from_bytes(message.SerializeToString())


def _package(graph: Graph, **images: bytes) -> Package:
    return Package(encode(graph), images, dict(graph.environment), graph.pin)


def test_packages_are_joined() -> None:
    """Kernels, and what they are of, are stored once, whatever the order in each."""
    one = replace(small(), name="one", edges=(), tried=())
    image, fatbin, launched = (one.kernels[index] for index in (0, 2, 1))
    launch = one.nodes[0]
    assert isinstance(launch, KernelNode)
    other = replace(
        one,
        name="other",
        images=(Image(b"o" * 32, 5), *one.images),
        libraries=(Library("libother.so", "02", b""), *one.libraries)[1:],
        calls=(LibraryCall("more", 1), *one.calls),
        kernels=(
            replace(launched, call=1),
            replace(launched, name="of_more", call=0),
            replace(image, image=1),
            Kernel("of_other", 0, None, ()),
        ),
        nodes=(
            KernelNode(0, (1, 1, 1), (1, 1, 1), 0, (), b""),
            replace(launch, kernel=2),
            KernelNode(3, (1, 1, 1), (1, 1, 1), 0, (), b""),
            KernelNode(1, (1, 1, 1), (1, 1, 1), 0, (), b""),
        ),
        fatbins=(),
    )
    package = join([_package(one, a=b"1"), _package(other, b=b"2")])
    assert package.images == {"a": b"1", "b": b"2"}
    first, second = decode(package.graph)
    assert first.nodes == one.nodes
    names = [second.kernels[node.kernel].name for node in second.nodes]  # type: ignore[union-attr]
    assert names == ["nvjet_tst", "_Z3addPfS_", "of_other", "of_more"]
    assert first.kernels[:2] == one.kernels[:2] and fatbin not in first.kernels
    assert first.images == (*one.images, Image(b"o" * 32, 5))
    assert [call.name for call in first.calls] == ["mm 8x8", "more"]
    assert first.libraries[first.calls[1].library].name == "libtorch_cuda.so"


@given(graphs())
def test_a_package_of_one_may_be_joined(graph: Graph) -> None:
    (found,) = decode(join([_package(graph)]).graph)
    for node, other in zip(found.nodes, graph.nodes, strict=True):
        if isinstance(node, KernelNode) and isinstance(other, KernelNode):
            kernel, was = found.kernels[node.kernel], graph.kernels[other.kernel]
            assert (kernel.name, kernel.parameters) == (was.name, was.parameters)
            assert node == replace(other, kernel=node.kernel)
        else:
            assert node == other
    assert found.edges == graph.edges and len(found.kernels) <= len(graph.kernels)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pin": "other"}, "differ in their pin"),
        ({"environment": ()}, "differ in their environment"),
        ({"weights": ()}, "differ in their weights"),
        ({"name": "decode.1"}, "a name twice"),
        ({"calls": (LibraryCall("mm 8x8", 1),)}, "calls: a name twice"),
        ({"regions": (small().regions[0], RegionSpec(small().regions[1].base, 1 << 30))}, ""),
    ],
)
def test_packages_that_do_not_go_together(changes: dict[str, Any], says: str) -> None:
    one, other = several(2)
    packages = [_package(one), _package(replace(other, **changes))]
    if not says:
        assert len(decode(join(packages).graph)) == 2
        return
    with pytest.raises(GraphError, match=says):
        join(packages)


def test_no_package_is_no_package() -> None:
    with pytest.raises(ConfigError, match="no package"):
        join([])


def test_edges_that_differ_are_another_topology() -> None:
    one, other, more = several(3)
    found = decode(encode(one, replace(other, edges=(Edge(0, 1),)), more))
    assert [graph.topology for graph in found] == [0, 1, 0]


def test_inputs_are_beside_weights_and_work_memory() -> None:
    """At other addresses, too; places of no bytes are anywhere."""
    graph = small()
    kv = GraphPlace("kv", 1, 1024, 64, "U8", (64,))
    read = graph.inputs[0]
    for offset, nbytes, free in (
        *((960, 64, True), (1088, 2, True), (1056, 0, True)),
        *((961, 64, False), (1087, 2, False), (1024, 64, False), (1000, 200, False)),
    ):
        place = replace(read.place, offset=offset, nbytes=nbytes, dtype="U8", shape=(nbytes,))
        made = replace(graph, work=(kv,), inputs=(replace(read, place=place, value=bytes(nbytes)),))
        first = replace(made, inputs=(), name="first")
        for package in ((made,), (first, made)):
            if free:
                assert decode(encode(*package)) == package
            else:
                with pytest.raises(GraphError, match="inputs overlap"):
                    encode(*package)
