"""CUDA graphs by the driver's calls, over plain ints: what they are made of, and making them.

Nodes, functions, modules, graphs and executable graphs are ints, as in `mx.cuda.driver`; a current
context is needed everywhere. The edges of a graph have data (ports) in both majors, under other
names of the calls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from mx.cuda.calling import DriverCalls
from mx.cuda.driver import RELAXED_CAPTURE
from mx.graphs.package import KernelNode

_NODE = "CU_GRAPH_NODE_TYPE_"
_ABSENT = ("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_INVALID_HANDLE", "CUDA_ERROR_NOT_SUPPORTED")
#: What a kernel may have without asking.
_SHARED_BYTES, _CLUSTER_BLOCKS = 48 << 10, 8
_ATTRIBUTE_BYTES = 64
#: CU_LAUNCH_PARAM_BUFFER_POINTER and CU_LAUNCH_PARAM_BUFFER_SIZE.
_POINTER, _SIZE = 1, 2
#: A CUgraphEdgeData: from_port, to_port and type are its first bytes.
_EDGE_BYTES = 8


class Launch(NamedTuple):
    """A kernel node: `parameters` is where a pointer to each parameter is, 0 if they are packed;
    `packed` has their bytes then."""

    function: int
    context: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    parameters: int
    packed: bytes = b""


class CopyNode(NamedTuple):
    """A copy node; `plain` if it is of one row, between device addresses."""

    plain: bool
    target: int
    source: int
    nbytes: int


def _packed(extra: int) -> bytes:
    """Return the bytes of packed parameters: `extra` has names and values (cuLaunchKernel)."""
    found: dict[int, int] = {}
    while extra and (name := ctypes.c_uint64.from_address(extra).value):  # 0: CU_LAUNCH_PARAM_END
        found[name] = ctypes.c_uint64.from_address(extra + 8).value
        extra += 16
    if not found.keys() >= {_POINTER, _SIZE}:
        return b""
    return ctypes.string_at(found[_POINTER], ctypes.c_size_t.from_address(found[_SIZE]).value)


def _fill(launch: Any, node: KernelNode) -> None:
    launch.gridDimX, launch.gridDimY, launch.gridDimZ = node.grid
    launch.blockDimX, launch.blockDimY, launch.blockDimZ = node.block
    launch.sharedMemBytes = node.shared_bytes


class GraphCalls(DriverCalls):
    """The driver's calls for graphs. Each raises CudaError if it fails."""

    # -- what a graph is made of -------------------------------------------------------------------

    def nodes(self, graph: int) -> list[Any]:
        """Return a graph's nodes, as the bindings have them (cuGraphGetNodes)."""
        handle = self._d.CUgraph(graph)
        _, count = self._call("cuGraphGetNodes", handle)
        return list(self._call("cuGraphGetNodes", handle, count)[0])[:count] if count else []

    def node_kind(self, node: Any) -> str:
        """Return a node's type: "KERNEL" (cuGraphNodeGetType)."""
        kind = self._call("cuGraphNodeGetType", node)
        return str(getattr(kind, "name", int(kind))).removeprefix(_NODE)

    def edges(self, graph: int) -> Iterable[tuple[int, int, int, int, int]]:
        """Return a graph's edges as (from, to, from port, to port, type) (cuGraphGetEdges)."""
        # Not by the bindings: the data that they return (12.9, 13.0 to 13.4) is in freed memory.
        get_edges = ctypes.CDLL("libcuda.so.1").cuGraphGetEdges_v2
        count = self._call(self._versioned("cuGraphGetEdges"), self._d.CUgraph(graph))[-1]
        if not count:
            return []
        first, second = (ctypes.c_void_p * count)(), (ctypes.c_void_p * count)()
        data, there = (ctypes.c_uint8 * _EDGE_BYTES * count)(), ctypes.c_size_t(count)
        code = get_edges(ctypes.c_void_p(graph), first, second, data, ctypes.byref(there))
        if code:
            raise self._error("cuGraphGetEdges", self._d.CUresult(code), "")
        return [
            (one or 0, other or 0, *each[:3])
            for one, other, each in zip(first, second, data, strict=True)
        ]

    def _versioned(self, call: str) -> str:
        return f"{call}_v2" if hasattr(self._d, f"{call}_v2") else call

    def launch_of(self, node: Any) -> Launch:
        """Return what a kernel node launches (cuGraphKernelNodeGetParams)."""
        found = self._call("cuGraphKernelNodeGetParams", node)
        function = int(found.func)
        if not function:
            function = int(self._call("cuKernelGetFunction", found.kern))
        return Launch(
            function,
            int(found.ctx),
            (found.gridDimX, found.gridDimY, found.gridDimZ),
            (found.blockDimX, found.blockDimY, found.blockDimZ),
            found.sharedMemBytes,
            int(found.kernelParams),
            b"" if found.kernelParams else _packed(int(found.extra)),
        )

    def attribute(self, node: Any, attribute: int) -> bytes:
        """Return the bytes of a kernel node's attribute, b"" if the driver does not have it
        (cuGraphKernelNodeGetAttribute)."""
        known = self._d.CUkernelNodeAttrID(attribute)
        result, value = self._d.cuGraphKernelNodeGetAttribute(node, known)
        if int(result):  # a few for each node, on older drivers
            if result.name in _ABSENT:
                return b""
            raise self._error("cuGraphKernelNodeGetAttribute", result, "")
        return ctypes.string_at(int(value.getPtr()), _ATTRIBUTE_BYTES)

    def memset_of(self, node: Any) -> tuple[int, int, int, int, int, int]:
        """Return (address, pitch, value, bytes of an element, width, height) of a memset node."""
        found = self._call("cuGraphMemsetNodeGetParams", node)
        where = (int(found.dst), found.pitch, found.value)
        return (*where, found.elementSize, found.width, found.height)

    def memcpy_of(self, node: Any) -> CopyNode:
        """Return what a copy node copies (cuGraphMemcpyNodeGetParams)."""
        found = self._call("cuGraphMemcpyNodeGetParams", node)
        kinds = self._d.CUmemorytype
        device = (kinds.CU_MEMORYTYPE_DEVICE, kinds.CU_MEMORYTYPE_UNIFIED)
        on_device = found.srcMemoryType in device and found.dstMemoryType in device
        plain = on_device and found.Height == 1 and found.Depth == 1
        apart = (found.srcXInBytes, found.srcY, found.srcZ, found.dstXInBytes, found.dstY)
        plain = plain and not any((*apart, found.dstZ))
        return CopyNode(plain, int(found.dstDevice), int(found.srcDevice), found.WidthInBytes)

    def function_name(self, function: int) -> str:
        """Return a kernel's mangled name (cuFuncGetName)."""
        name: bytes = self._call("cuFuncGetName", self._d.CUfunction(function))
        return name.decode(errors="replace")

    def parameters(self, function: int) -> tuple[tuple[int, int], ...]:
        """Return the offset and the size of each parameter (cuFuncGetParamInfo)."""
        handle = self._d.CUfunction(function)
        found: list[tuple[int, int]] = []
        while True:
            result, *values = self._d.cuFuncGetParamInfo(handle, len(found))
            if result == self._d.CUresult.CUDA_ERROR_INVALID_VALUE:
                return tuple(found)
            if int(result):
                raise self._error("cuFuncGetParamInfo", result, "")
            found.append((int(values[0]), int(values[1])))

    def knows(self, address: int) -> bool:
        """Return True if an address is one of the driver's (cuPointerGetAttribute)."""
        kind = self._d.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        return not int(self._d.cuPointerGetAttribute(kind, address)[0])

    # -- kernels -----------------------------------------------------------------------------------

    def module_load(self, image: bytes) -> int:
        """Load an image (cuModuleLoadData)."""
        return int(self._call("cuModuleLoadData", image))

    def module_unload(self, module: int) -> None:
        """cuModuleUnload."""
        self._call("cuModuleUnload", self._d.CUmodule(module))

    def module_function(self, module: int, name: str) -> int:
        """cuModuleGetFunction."""
        handle = self._d.CUmodule(module)
        return int(self._call("cuModuleGetFunction", handle, name.encode(), detail=name))

    def library_load(self, image: bytes) -> int:
        """Load images as a library, which belongs to no context (cuLibraryLoadData)."""
        return int(self._call("cuLibraryLoadData", image, [], [], 0, [], [], 0))

    def library_unload(self, library: int) -> None:
        """cuLibraryUnload."""
        self._call("cuLibraryUnload", self._d.CUlibrary(library))

    def library_kernels(self, library: int) -> list[str]:
        """Return the mangled names of a library's kernels (cuLibraryEnumerateKernels)."""
        handle = self._d.CUlibrary(library)
        count = int(self._call("cuLibraryGetKernelCount", handle))
        kernels = self._call("cuLibraryEnumerateKernels", count, handle) if count else ()
        return [self._call("cuKernelGetName", each).decode(errors="replace") for each in kernels]

    def library_function(self, library: int, name: str) -> int:
        """Return a library's kernel as a function of the current context, 0 if it has none of that
        name (cuLibraryGetKernel, cuKernelGetFunction)."""
        result, kernel = self._d.cuLibraryGetKernel(self._d.CUlibrary(library), name.encode())
        if int(result):
            if result.name == "CUDA_ERROR_NOT_FOUND":
                return 0
            raise self._error("cuLibraryGetKernel", result, name)
        return int(self._call("cuKernelGetFunction", kernel))

    def function_attributes(
        self, function: int, attributes: Iterable[int]
    ) -> tuple[tuple[int, int], ...]:
        """Return the numbers and the values of a function's attributes, in order, without those
        that the driver does not have (cuFuncGetAttribute)."""
        found, handle = [], self._d.CUfunction(function)
        for number in sorted(attributes):
            name = self._d.CUfunction_attribute(number)
            result, value = self._d.cuFuncGetAttribute(name, handle)
            if not int(result):
                found.append((number, int(value)))
            elif result.name not in _ABSENT:
                raise self._error("cuFuncGetAttribute", result, "")
        return tuple(found)

    def set_function_attribute(self, function: int, attribute: int, value: int) -> None:
        """cuFuncSetAttribute."""
        name = self._d.CUfunction_attribute(attribute)
        self._call("cuFuncSetAttribute", self._d.CUfunction(function), name, value)

    def allow(self, function: int, shared_bytes: int, cluster_blocks: int) -> None:
        """Let a kernel be launched with so much dynamic shared memory, and clusters so large, where
        that needs a word (cuFuncSetAttribute)."""
        names, handle = self._d.CUfunction_attribute, self._d.CUfunction(function)
        if shared_bytes > _SHARED_BYTES:
            name = names.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call("cuFuncSetAttribute", handle, name, shared_bytes)
        if cluster_blocks > _CLUSTER_BLOCKS:
            name = names.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            self._call("cuFuncSetAttribute", handle, name, 1)

    # -- making a graph ----------------------------------------------------------------------------

    def graph_create(self) -> int:
        """cuGraphCreate."""
        return int(self._call("cuGraphCreate", 0))

    def graph_destroy(self, graph: int) -> None:
        """cuGraphDestroy."""
        self._call("cuGraphDestroy", self._d.CUgraph(graph))

    def launch(self, function: int, parameters: int) -> Any:
        """Return what kernel nodes are made of: a function, and the address of pointers to its
        parameters."""
        made = self._d.CUDA_KERNEL_NODE_PARAMS()
        made.func, made.kernelParams = function, parameters
        return made

    def add_kernel(self, graph: int, launch: Any, node: KernelNode) -> Any:
        """Add a kernel node without edges; the parameters are copied (cuGraphAddKernelNode)."""
        _fill(launch, node)
        return self._call("cuGraphAddKernelNode", self._d.CUgraph(graph), None, 0, launch)

    def set_kernel(self, at: Any, launch: Any, node: KernelNode) -> None:
        """Let a kernel node launch something else from now on; graphs that were instantiated stay
        as they are (cuGraphKernelNodeSetParams)."""
        _fill(launch, node)
        self._call("cuGraphKernelNodeSetParams", at, launch)

    def set_attribute(self, node: Any, attribute: int, value: bytes) -> None:
        """Set a kernel node's attribute from its bytes (cuGraphKernelNodeSetAttribute)."""
        made = self._d.CUkernelNodeAttrValue()
        ctypes.memmove(int(made.getPtr()), value, len(value))
        known = self._d.CUkernelNodeAttrID(attribute)
        self._call("cuGraphKernelNodeSetAttribute", node, known, made)

    def add_memset(self, graph: int, values: Sequence[int], context: int) -> Any:
        """Add a memset node of what `memset_of` returns (cuGraphAddMemsetNode)."""
        handle, where, made = self._d.CUgraph(graph), self._d.CUcontext(context), self._set(values)
        return self._call("cuGraphAddMemsetNode", handle, None, 0, made, where)

    def set_memset(self, node: Any, values: Sequence[int]) -> None:
        """Let a memset node set something else from now on (cuGraphMemsetNodeSetParams)."""
        self._call("cuGraphMemsetNodeSetParams", node, self._set(values))

    def _set(self, values: Sequence[int]) -> Any:
        made = self._d.CUDA_MEMSET_NODE_PARAMS()
        made.dst, made.pitch, made.value, made.elementSize, made.width, made.height = values
        return made

    def add_memcpy(self, graph: int, values: Sequence[int], context: int) -> Any:
        """Add a copy between device addresses: target, source, bytes (cuGraphAddMemcpyNode)."""
        handle, where, made = self._d.CUgraph(graph), self._d.CUcontext(context), self._copy(values)
        return self._call("cuGraphAddMemcpyNode", handle, None, 0, made, where)

    def set_memcpy(self, node: Any, values: Sequence[int]) -> None:
        """Let a copy node copy something else from now on (cuGraphMemcpyNodeSetParams)."""
        self._call("cuGraphMemcpyNodeSetParams", node, self._copy(values))

    def _copy(self, values: Sequence[int]) -> Any:
        made = self._d.CUDA_MEMCPY3D()
        device = self._d.CUmemorytype.CU_MEMORYTYPE_DEVICE
        made.srcMemoryType = made.dstMemoryType = device
        made.dstDevice, made.srcDevice, made.WidthInBytes = values
        made.Height = made.Depth = 1
        return made

    def add_empty(self, graph: int) -> Any:
        """cuGraphAddEmptyNode."""
        return self._call("cuGraphAddEmptyNode", self._d.CUgraph(graph), None, 0)

    def add_edges(self, graph: int, edges: Sequence[tuple[Any, Any, int, int, int]]) -> None:
        """Add edges as `edges` returns them, between nodes (cuGraphAddDependencies)."""
        if not edges:
            return
        data = []
        for *_, from_port, to_port, kind in edges:
            each = self._d.CUgraphEdgeData()
            each.from_port, each.to_port, each.type = from_port, to_port, kind
            data.append(each)
        self._call(
            self._versioned("cuGraphAddDependencies"),
            self._d.CUgraph(graph),
            [edge[0] for edge in edges],
            [edge[1] for edge in edges],
            data,
            len(edges),
        )

    # -- running one -------------------------------------------------------------------------------

    def instantiate(self, graph: int) -> int:
        """cuGraphInstantiate."""
        return int(self._call("cuGraphInstantiate", self._d.CUgraph(graph), 0))

    def executable_destroy(self, executable: int) -> None:
        """cuGraphExecDestroy."""
        self._call("cuGraphExecDestroy", self._d.CUgraphExec(executable))

    def replay(self, executable: int, stream: int) -> None:
        """Queue a replay (cuGraphLaunch)."""
        self._call("cuGraphLaunch", self._d.CUgraphExec(executable), self._d.CUstream(stream))

    def capture_begin(self, stream: int) -> None:
        """Record a stream's work from now on; other threads are not disturbed
        (cuStreamBeginCapture, RELAXED)."""
        mode = self._d.CUstreamCaptureMode(RELAXED_CAPTURE)
        self._call("cuStreamBeginCapture", self._d.CUstream(stream), mode)

    def capture_end(self, stream: int) -> int:
        """Return the graph of a stream's work since `capture_begin`, 0 if the capture was
        invalidated before (cuStreamEndCapture)."""
        return int(self._call("cuStreamEndCapture", self._d.CUstream(stream)) or 0)
