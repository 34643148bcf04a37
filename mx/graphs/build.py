"""Makes the driver's graph from a graph's plain values."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod

from mx.cuda.graphs import GraphCalls, Launch
from mx.graphs.package import Graph, Kernel, KernelNode, MemcpyNode, MemsetNode

#: Attributes: the dimensions of a cluster, and the preferred ones.
_CLUSTERS = (4, 11)


def build(driver: GraphCalls, graph: Graph, functions: Sequence[int], context: int) -> int:
    """Return a raw graph, which the caller destroys. The device's context is current.

    Args:
        driver: The calls.
        graph: The graph.
        functions: The CUfunction of each of its kernels.
        context: The device's.

    Raises:
        CudaError: The driver fails.
    """
    made = driver.graph_create()
    try:
        _allow(driver, graph, functions)
        nodes = []
        for node in graph.nodes:
            if isinstance(node, KernelNode):
                nodes.append(_add_launch(driver, made, node, graph.kernels[node.kernel], functions))
            elif isinstance(node, MemsetNode):
                shape = (node.element_bytes, node.width, node.height)
                values = (node.address, node.pitch, node.value, *shape)
                nodes.append(driver.add_memset(made, values, context))
            elif isinstance(node, MemcpyNode):
                copy = (node.target, node.source, node.nbytes)
                nodes.append(driver.add_memcpy(made, *copy, context))
            else:
                nodes.append(driver.add_empty(made))
        driver.add_edges(
            made,
            [
                (nodes[e.first], nodes[e.second], e.from_port, e.to_port, e.type)
                for e in graph.edges
            ],
        )
    except BaseException:
        driver.graph_destroy(made)
        raise
    return made


def _allow(driver: GraphCalls, graph: Graph, functions: Sequence[int]) -> None:
    """Allow each kernel the most shared memory and the largest cluster that a node asks for."""
    most: dict[int, tuple[int, int]] = {}
    for node in graph.nodes:
        if isinstance(node, KernelNode):
            blocks = 1
            for attribute, value in node.attributes:
                if attribute in _CLUSTERS:
                    sizes = memoryview(value).cast("I").tolist()
                    blocks = max(blocks, prod(sizes))
            before = most.get(node.kernel, (0, 1))
            most[node.kernel] = (max(before[0], node.shared_bytes), max(before[1], blocks))
    for kernel, (shared_bytes, blocks) in most.items():
        driver.allow(functions[kernel], shared_bytes, blocks)


def _add_launch(
    driver: GraphCalls, made: int, node: KernelNode, kernel: Kernel, functions: Sequence[int]
) -> object:
    values = ctypes.create_string_buffer(node.values, max(1, len(node.values)))
    first = ctypes.addressof(values)
    places = (ctypes.c_void_p * max(1, len(kernel.parameters)))(
        *(first + offset for offset, _ in kernel.parameters)
    )
    launch = Launch(
        functions[node.kernel],
        0,
        node.grid,
        node.block,
        node.shared_bytes,
        ctypes.addressof(places),
    )
    added = driver.add_kernel(made, launch)
    for attribute, value in node.attributes:
        driver.set_attribute(added, attribute, value)
    return added
