"""Makes the driver's graphs from graphs' plain values: one for all graphs of a topology."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from math import prod
from typing import Any

from mx.contexts import Undo
from mx.graphs.bounds import MAX_PARAMETERS_BYTES
from mx.graphs.calls import GraphCalls
from mx.graphs.package import Graph, KernelNode, MemcpyNode, MemsetNode, Node

#: Attributes: the dimensions of a cluster, and the preferred ones.
_CLUSTERS = (4, 11)


class Template:
    """A raw graph that has the nodes and edges of all graphs of a topology.

    The driver's instantiation is a copy. So each graph is set in place of the one before, node by
    node where it differs, and instantiated: fewer calls than building each anew, or than cloning
    one and looking for its nodes in the clone.
    """

    def __init__(
        self, driver: GraphCalls, graph: Graph, function_of: Callable[[int], int], context: int
    ) -> None:
        """Build the raw graph, with the parameters of `graph`. The device's context is current.

        Args:
            driver: The calls.
            graph: A graph of the topology.
            function_of: Returns the CUfunction of a kernel, by its index; it may raise.
            context: The device's.

        Raises:
            CudaError: The driver fails.
        """
        self._driver, self._function_of, self._kernels = driver, function_of, graph.kernels
        self._values = ctypes.create_string_buffer(MAX_PARAMETERS_BYTES)
        self._view = memoryview(self._values).cast("B")
        #: Of each kernel: what its nodes are made of, and pointers to parameters in `_values`.
        self._launches: dict[int, tuple[Any, Any]] = {}
        self._most: dict[int, tuple[int, int]] = {}
        self._now: list[Node | None] = [*graph.nodes]
        self.graph = driver.graph_create()
        with Undo(driver.graph_destroy, self.graph):
            self._nodes = [self._add(node, context) for node in graph.nodes]
            edges = [
                (self._nodes[e.first], self._nodes[e.second], e.from_port, e.to_port, e.type)
                for e in graph.edges
            ]
            driver.add_edges(self.graph, edges)

    def instantiate(self, graph: Graph) -> int:
        """Return an executable of a graph of this topology, which the caller destroys.

        Raises:
            CudaError: The driver fails.
        """
        for at, (now, node) in enumerate(zip(self._now, graph.nodes, strict=True)):
            if node is not now:
                self._now[at] = None  # a call that fails may have done something
                self._set(self._nodes[at], node)
                self._now[at] = node
        return self._driver.instantiate(self.graph)

    def close(self) -> None:
        """Destroy the raw graph; its executables stay."""
        self._driver.graph_destroy(self.graph)

    def _add(self, node: Node, context: int) -> Any:
        driver = self._driver
        if isinstance(node, KernelNode):
            added = driver.add_kernel(self.graph, self._launch(node), node)
            for attribute, value in node.attributes:
                driver.set_attribute(added, attribute, value)
            return added
        if isinstance(node, MemsetNode):
            return driver.add_memset(self.graph, _memset(node), context)
        if isinstance(node, MemcpyNode):
            return driver.add_memcpy(self.graph, _memcpy(node), context)
        return driver.add_empty(self.graph)

    def _set(self, handle: Any, node: Node) -> None:
        driver = self._driver
        if isinstance(node, KernelNode):
            driver.set_kernel(handle, self._launch(node), node)
            for attribute, value in node.attributes:  # nothing says that a node keeps them
                driver.set_attribute(handle, attribute, value)
        elif isinstance(node, MemsetNode):
            driver.set_memset(handle, _memset(node))
        elif isinstance(node, MemcpyNode):
            driver.set_memcpy(handle, _memcpy(node))

    def _launch(self, node: KernelNode) -> Any:
        """Return what a node is made of, until the next one is: the driver copies parameters."""
        made = self._launches.get(node.kernel)
        if made is None:
            first = ctypes.addressof(self._values)
            found = [first + offset for offset, _ in self._kernels[node.kernel].parameters]
            pointers = (ctypes.c_void_p * max(1, len(found)))(*found)
            function = self._function_of(node.kernel)
            launch = self._driver.launch(function, ctypes.addressof(pointers))
            made = self._launches[node.kernel] = (launch, pointers)
        self._view[: len(node.values)] = node.values
        if node.shared_bytes or node.attributes:
            self._allow(node)
        return made[0]

    def _allow(self, node: KernelNode) -> None:
        """Allow a kernel the most shared memory and the largest cluster that nodes ask for."""
        sizes = [memoryview(v).cast("I") for each, v in node.attributes if each in _CLUSTERS]
        asked = (node.shared_bytes, max(map(prod, sizes), default=1))
        before = self._most.get(node.kernel, (0, 1))
        if asked[0] > before[0] or asked[1] > before[1]:
            most = max(asked[0], before[0]), max(asked[1], before[1])
            self._driver.allow(self._function_of(node.kernel), *most)
            self._most[node.kernel] = most


def _memset(node: MemsetNode) -> tuple[int, ...]:
    shape = (node.element_bytes, node.width, node.height)
    return (node.address, node.pitch, node.value, *shape)


def _memcpy(node: MemcpyNode) -> tuple[int, int, int]:
    return node.target, node.source, node.nbytes
