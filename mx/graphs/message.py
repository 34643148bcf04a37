"""`mx.graphs.package` <-> protobuf. What comes in is checked here, once, and trusted afterwards."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import DecodeError

from mx.codec import by_name
from mx.graphs.bounds import (
    COUNTS,
    MAX_IMAGES_BYTES,
    MAX_MESSAGE_BYTES,
    check,
)
from mx.graphs.package import (
    Edge,
    EmptyNode,
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
    Node,
    RegionSpec,
)
from mx.wire.v1 import graphs_pb2 as pb

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Capture:
    """What one process captured, for `combine` with another one's.

    `graph` has no pointers yet, but no address that the driver knows and no region has. `images`
    are in the graph's order.
    """

    graph: Graph
    images: tuple[bytes, ...]

    def to_bytes(self) -> bytes:
        """Return the capture for `from_bytes` in another process."""
        message = pb.GraphCapture(images=self.images)
        _fill(message.graph, self.graph)
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
        graph = _graph(message.graph)
        if [len(image) for image in message.images] != [image.nbytes for image in graph.images]:
            raise GraphError("CUDA graph: a capture with other images than it names")
        return cls(graph, tuple(message.images))


def encode(graph: Graph) -> bytes:
    """Return the message of a graph: the same bytes for equal graphs.

    Raises:
        GraphError: The graph is out of bounds.
    """
    check(graph)
    message = pb.CudaGraph()
    _fill(message, graph)
    data = message.SerializeToString(deterministic=True)
    if len(data) > MAX_MESSAGE_BYTES:
        raise GraphError(f"CUDA graph: a message of more than {MAX_MESSAGE_BYTES} bytes")
    return data


def decode(data: bytes) -> Graph:
    """Return the graph of a message, with all its bounds checked.

    Args:
        data: The message, as `encode` made it.

    Raises:
        GraphError: It is too large, no such message, or says something out of bounds.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise GraphError(f"CUDA graph: a message of more than {MAX_MESSAGE_BYTES} bytes")
    try:
        message = pb.CudaGraph.FromString(data)
    except DecodeError:
        raise GraphError("CUDA graph: no protobuf message") from None
    return _graph(message)


def _fill(message: pb.CudaGraph, graph: Graph) -> None:
    message.format = FORMAT
    message.pin = graph.pin
    for name, value in graph.environment:
        message.environment.add(name=name, value=value)
    for region in graph.regions:
        message.regions.append(by_name(pb.GraphRegion, region))
    for place in graph.weights:
        message.weights.append(by_name(pb.GraphPlace, place))
    for read in graph.inputs:
        message.inputs.add(place=by_name(pb.GraphPlace, read.place), value=read.value)
    for output in graph.outputs:
        message.outputs.add(place=by_name(pb.GraphPlace, output.place), blake3=output.digest)
    for image in graph.images:
        message.images.add(blake3=image.digest, nbytes=image.nbytes)
    for library in graph.libraries:
        message.libraries.append(by_name(pb.GraphLibrary, library))
    for call in graph.calls:
        message.calls.append(by_name(pb.GraphCall, call))
    for kernel in graph.kernels:
        source = {"image": kernel.image} if kernel.image is not None else {"call": kernel.call}
        message.kernels.add(
            name=kernel.name,
            offsets=[offset for offset, _ in kernel.parameters],
            sizes=[size for _, size in kernel.parameters],
            **source,
        )
    for node in graph.nodes:
        _fill_node(message.nodes.add(), node)
    for edge in graph.edges:
        message.edges.append(by_name(pb.GraphEdge, edge))


def _fill_node(message: pb.GraphNode, node: Node) -> None:
    if isinstance(node, KernelNode):
        message.kernel.kernel = node.kernel
        message.kernel.grid.extend(node.grid)
        message.kernel.block.extend(node.block)
        message.kernel.shared_bytes = node.shared_bytes
        for each, value in node.attributes:
            message.kernel.attributes.add(id=each, value=value)
        message.kernel.parameters = node.values
        message.kernel.pointers.extend(node.pointers)
    elif isinstance(node, MemsetNode):
        message.memset.CopyFrom(by_name(pb.GraphMemsetNode, node))
    elif isinstance(node, MemcpyNode):
        message.memcpy.CopyFrom(by_name(pb.GraphMemcpyNode, node))
    else:
        message.empty.SetInParent()


def _graph(message: pb.CudaGraph) -> Graph:
    if message.format != FORMAT:
        raise GraphError(
            f"CUDA graph: format {message.format}, and this release of mx reads {FORMAT}",
            hint="publish it with the same release, or capture here",
        )
    # Before objects are made of them: an empty message takes two bytes, and an object a hundred.
    for what, most in COUNTS.items():
        if len(getattr(message, what)) > most:
            raise GraphError(f"CUDA graph: {what}: more than {most}")
    graph = Graph(
        tuple((field.name, field.value) for field in message.environment),
        message.pin,
        tuple(by_name(RegionSpec, region) for region in message.regions),
        tuple(map(_place, message.weights)),
        tuple(Input(_place(read.place), read.value) for read in message.inputs),
        tuple(GraphOutput(_place(output.place), output.blake3) for output in message.outputs),
        tuple(Image(image.blake3, image.nbytes) for image in message.images),
        tuple(by_name(Library, library) for library in message.libraries),
        tuple(by_name(LibraryCall, call) for call in message.calls),
        tuple(map(_kernel, message.kernels)),
        tuple(map(_node, message.nodes)),
        tuple(by_name(Edge, edge) for edge in message.edges),
    )
    check(graph)
    return graph


def _place(message: pb.GraphPlace) -> GraphPlace:
    return by_name(GraphPlace, message, shape=tuple(message.shape))


def _kernel(message: pb.GraphKernel) -> Kernel:
    source = message.WhichOneof("source")
    if len(message.offsets) != len(message.sizes):
        raise GraphError("CUDA graph: a kernel with more offsets than sizes, or fewer")
    return Kernel(
        message.name,
        message.image if source == "image" else None,
        message.call if source == "call" else None,
        tuple(zip(message.offsets, message.sizes, strict=True)),
    )


def _node(message: pb.GraphNode) -> Node:
    kind = message.WhichOneof("node")
    if kind == "kernel":
        found = message.kernel
        return KernelNode(
            found.kernel,
            tuple(found.grid),
            tuple(found.block),
            found.shared_bytes,
            tuple((each.id, each.value) for each in found.attributes),
            found.parameters,
            tuple(found.pointers),
        )
    if kind == "memset":
        return by_name(MemsetNode, message.memset)
    if kind == "memcpy":
        return by_name(MemcpyNode, message.memcpy)
    if kind == "empty":
        return EmptyNode()
    raise GraphError("CUDA graph: a node of a kind that this release of mx does not know")
