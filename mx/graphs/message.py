"""`mx.graphs.package` <-> protobuf. What comes in is checked here, once, and trusted afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from mx.codec import by_name
from mx.graphs.bounds import COUNTS, MAX_ALL, MAX_IMAGES_BYTES, MAX_MESSAGE_BYTES, Taken, check
from mx.graphs.package import (
    SHARED,
    Edge,
    EmptyNode,
    Graph,
    GraphError,
    GraphOutput,
    Image,
    Kernel,
    KernelNode,
    MemcpyNode,
    MemsetNode,
    Node,
    RegionSpec,
)
from mx.wire.v1 import graphs_pb2 as pb

FORMAT = 3
#: What a size's message has for each launch that differs (proto/mx/wire/v1/graphs.proto).
_COLUMNS = 11


@dataclass(frozen=True, slots=True)
class Capture:
    """What one process captured, for `combine` with another one's.

    `graph` has no address that the driver knows and no region has. `images` are in the graph's
    order. `outside` has addresses of memory that was allocated to see where such memory is;
    `halves` has words in parameters that may be half an address of it.
    """

    graph: Graph
    images: tuple[bytes, ...]
    outside: tuple[int, ...] = ()
    halves: tuple[int, ...] = ()

    def to_bytes(self) -> bytes:
        """Return the capture for `from_bytes` in another process."""
        message = by_name(pb.GraphCapture, self, graph=_message(self.graph))
        return message.SerializeToString(deterministic=True)

    @classmethod
    def from_bytes(cls, data: bytes) -> Capture:
        """Return the capture of another process.

        Args:
            data: What its `to_bytes` returned.

        Raises:
            GraphError: It is not such a thing.
        """
        if len(data) > MAX_MESSAGE_BYTES + MAX_IMAGES_BYTES:
            raise GraphError(f"CUDA graph: a capture of {len(data)} bytes")
        try:
            message = pb.GraphCapture.FromString(data)
        except DecodeError:
            raise GraphError("CUDA graph: a capture that is not a protobuf message") from None
        if message.graph.sizes:
            raise GraphError("CUDA graph: a capture of several graphs")
        graph = _graph(message.graph)
        if [len(image) for image in message.images] != [image.nbytes for image in graph.images]:
            raise GraphError("CUDA graph: a capture with other images than it names")
        return by_name(cls, message, graph=graph)


def encode(*graphs: Graph) -> bytes:
    """Return the message of graphs that have the same tuples of `SHARED`: the same bytes for equal
    graphs.

    Raises:
        GraphError: They are out of bounds, or have not.
    """
    first, *others = graphs
    check(first)
    message = _message(first)
    known = {_topology(first): 0}
    for index, graph in enumerate(others, 1):
        for what in SHARED:
            if getattr(graph, what) != getattr(first, what):
                raise GraphError(f"CUDA graph: graphs of one package differ in their {what}")
        check(graph)
        of = known.setdefault(_topology(graph), index)
        message.sizes.append(_size_message(graph, first, of, graphs[of]))
    data = message.SerializeToString(deterministic=True)
    _require_size(data)
    return data


def decode(data: bytes) -> tuple[Graph, ...]:
    """Return the graphs of a message, with all their bounds checked.

    Args:
        data: The message, as `encode` made it.

    Raises:
        GraphError: It is too large, no such message, or says something out of bounds.
    """
    _require_size(data)
    try:
        message = pb.CudaGraph.FromString(data)
    except DecodeError:
        raise GraphError("CUDA graph: no protobuf message") from None
    taken: Taken = {}
    found = [_graph(message, taken)]
    left = dict.fromkeys(("nodes", "edges", "tried"), MAX_ALL)
    for size in message.sizes:
        found.append(_sized(size, found, left))
        check(found[-1], found[size.of] if size.of < len(found) - 1 else found[0], taken)
    if len({(graph.name, graph.regions) for graph in found}) < len(found):
        raise GraphError("CUDA graph: a name twice at the same addresses")
    return tuple(found)


def _require_size(data: bytes) -> None:
    if len(data) > MAX_MESSAGE_BYTES:
        raise GraphError(f"CUDA graph: a message of more than {MAX_MESSAGE_BYTES} bytes")


def _message(graph: Graph) -> pb.CudaGraph:
    return by_name(
        pb.CudaGraph,
        graph,
        format=FORMAT,
        environment=[pb.GraphField(name=name, value=value) for name, value in graph.environment],
        outputs=_output_messages(graph),
        images=[by_name(pb.GraphImage, each, blake3=each.digest) for each in graph.images],
        kernels=map(_kernel_message, graph.kernels),
        nodes=map(_node_message, graph.nodes),
    )


def _output_messages(graph: Graph) -> list[pb.GraphOutput]:
    return [by_name(pb.GraphOutput, each, blake3=each.digest) for each in graph.outputs]


def _topology(graph: Graph) -> object:
    """Return what graphs of one topology have in common: edges, and of each node all but its
    parameters."""
    kinds = (n.attributes if isinstance(n, KernelNode) else type(n) for n in graph.nodes)
    return tuple(kinds), graph.edges


def _size_message(graph: Graph, first: Graph, of: int, template: Graph) -> pb.GraphSize:
    own = template is graph
    made = by_name(
        pb.GraphSize,
        graph,
        of=of,
        regions=[
            by_name(pb.GraphRegion, e) for e in graph.regions if graph.regions != first.regions
        ],
        outputs=_output_messages(graph),
        nodes=map(_node_message, graph.nodes if own else ()),
        edges=[by_name(pb.GraphEdge, each) for each in graph.edges if own],
    )
    values = bytearray()
    for at, (node, other) in enumerate(zip(graph.nodes, template.nodes, strict=True)):
        if isinstance(node, KernelNode) and node != other:
            assert isinstance(other, KernelNode)
            begin, end = _differs(node, other)
            made.launches.extend((at, node.kernel, *node.grid, *node.block, node.shared_bytes))
            made.launches.extend((begin, end - begin))
            values += node.values[begin:end]
        elif node != other:
            made.at.append(at)
            made.nodes.append(_node_message(node))
    made.parameters = bytes(values)
    return made


def _differs(node: KernelNode, other: KernelNode) -> tuple[int, int]:
    """Return from where to where the parameters differ: all if the kernels do."""
    if node.kernel != other.kernel:
        return 0, len(node.values)
    pairs = enumerate(zip(node.values, other.values, strict=True))
    places = [at for at, (one, another) in pairs if one != another]
    return (places[0], places[-1] + 1) if places else (0, 0)


def _kernel_message(kernel: Kernel) -> pb.GraphKernel:
    offsets, sizes = zip(*kernel.parameters, strict=True) if kernel.parameters else ((), ())
    attributes = [pb.GraphFunctionAttribute(id=i, value=value) for i, value in kernel.attributes]
    return by_name(pb.GraphKernel, kernel, offsets=offsets, sizes=sizes, attributes=attributes)


def _node_message(node: Node) -> pb.GraphNode:
    if isinstance(node, KernelNode):
        attributes = [pb.GraphAttribute(id=each, value=value) for each, value in node.attributes]
        launch = by_name(pb.GraphKernelNode, node, attributes=attributes, parameters=node.values)
        return pb.GraphNode(kernel=launch)
    if isinstance(node, MemsetNode):
        return pb.GraphNode(memset=by_name(pb.GraphMemsetNode, node))
    if isinstance(node, MemcpyNode):
        return pb.GraphNode(memcpy=by_name(pb.GraphMemcpyNode, node))
    return pb.GraphNode(empty=pb.GraphEmptyNode())


def _graph(message: pb.CudaGraph, taken: Taken | None = None) -> Graph:
    if message.format != FORMAT:
        raise GraphError(
            f"CUDA graph: format {message.format}, and this release of mx reads {FORMAT}",
            hint="publish it with the same release, or capture here",
        )
    # Before objects are made of them: an empty message takes two bytes, and an object a hundred.
    for what, most in COUNTS.items():
        if len(getattr(message, what)) > most:
            raise GraphError(f"CUDA graph: {what}: more than {most}")
    graph = by_name(
        Graph,
        message,
        environment=tuple((field.name, field.value) for field in message.environment),
        outputs=_outputs(message),
        images=tuple(by_name(Image, each, digest=each.blake3) for each in message.images),
        kernels=tuple(map(_kernel, message.kernels)),
        nodes=tuple(map(_node, message.nodes)),
    )
    check(graph, taken=taken)
    return graph


def _outputs(message: pb.CudaGraph | pb.GraphSize) -> tuple[GraphOutput, ...]:
    return tuple(by_name(GraphOutput, each, digest=each.blake3) for each in message.outputs)


def _sized(message: pb.GraphSize, before: Sequence[Graph], left: dict[str, int]) -> Graph:
    """Return the graph of a size's message, after those `before` it, not checked yet. `left` is how
    much of each a package may still have."""
    first, own = before[0], message.of == len(before)
    if message.of > len(before):
        raise GraphError("CUDA graph: a size of no graph")
    template = first if own else before[message.of]
    for what in left:
        left[what] -= len(getattr(message, what))
    left["nodes"] -= 0 if own else len(template.nodes)
    for what in ("regions", "inputs", "outputs"):
        if len(getattr(message, what)) > COUNTS[what]:
            raise GraphError(f"CUDA graph: {what}: more than {COUNTS[what]}")
    if min(left.values()) < 0:
        raise GraphError(f"CUDA graph: more than {MAX_ALL} nodes or edges")
    return by_name(
        Graph,
        message,
        regions=tuple(by_name(RegionSpec, each) for each in message.regions) or first.regions,
        outputs=_outputs(message),
        nodes=tuple(map(_node, message.nodes)) if own else _changed(message, template.nodes),
        edges=tuple(by_name(Edge, each) for each in message.edges) if own else template.edges,
        topology=message.of,
        **{what: getattr(first, what) for what in SHARED},
    )


def _changed(message: pb.GraphSize, nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Return nodes, with those in place that a size's message has."""
    found, values, begin, last = list(nodes), message.parameters, 0, -1
    numbers = iter(message.launches)
    wrong = len(message.launches) % _COLUMNS or len(message.at) != len(message.nodes)
    wrong = wrong or bool(message.edges) or list(message.at) != sorted(set(message.at))
    shapes: dict[tuple[int, int, int], tuple[int, int, int]] = {}  # few: one object for each
    for at, kernel, x, y, z, a, b, c, shared, offset, nbytes in zip(
        *[numbers] * _COLUMNS, strict=False
    ):
        node = found[at] if last < at < len(found) else None
        if not isinstance(node, KernelNode):
            raise GraphError(f"CUDA graph: a size has a launch at {at}, where there is none")
        last, value = at, values[begin : begin + nbytes]
        if kernel == node.kernel:
            value = node.values[:offset] + value + node.values[offset + nbytes :]
        grid, block = (x, y, z), (a, b, c)
        grid, block = shapes.setdefault(grid, grid), shapes.setdefault(block, block)
        found[at] = KernelNode(kernel, grid, block, shared, node.attributes, value)
        begin += nbytes
    for at, each in zip(message.at, message.nodes, strict=False):
        other = _node(each)
        if at >= len(found) or isinstance(other, KernelNode) or type(other) is not type(found[at]):
            raise GraphError(f"CUDA graph: a size has a node at {at} of another kind")
        found[at] = other
    if wrong or begin != len(values):
        raise GraphError("CUDA graph: a size that does not fit its topology")
    return tuple(found)


def _kernel(message: pb.GraphKernel) -> Kernel:
    source = message.WhichOneof("source")
    if len(message.offsets) != len(message.sizes):
        raise GraphError("CUDA graph: a kernel with more offsets than sizes, or fewer")
    return Kernel(
        message.name,
        message.image if source == "image" else None,
        message.call if source == "call" else None,
        tuple(zip(message.offsets, message.sizes, strict=True)),
        message.fatbin if source == "fatbin" else None,
        tuple((each.id, each.value) for each in message.attributes),
    )


def _node(message: pb.GraphNode) -> Node:
    kind = message.WhichOneof("node")
    if kind == "kernel":
        found = message.kernel
        attributes = tuple((each.id, each.value) for each in found.attributes)
        return by_name(KernelNode, found, attributes=attributes, values=found.parameters)
    if kind == "memset":
        return by_name(MemsetNode, message.memset)
    if kind == "memcpy":
        return by_name(MemcpyNode, message.memcpy)
    if kind == "empty":
        return EmptyNode()
    raise GraphError("CUDA graph: a node of a kind that this release of mx does not know")
