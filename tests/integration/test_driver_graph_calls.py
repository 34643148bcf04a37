"""Graphs of the stand-in driver: captured, looked at, built, changed and run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.driver import decode
from tests.support.driver.build import kernels_library
from tests.support.driver.programs import each_major, finish, passes

pytestmark = each_major

#: Three vectors of 96 floats and a matrix on GPU 0, and a layer of kernels over them. `captured`
#: gives a graph of what a function does on a stream.
_LAYER = """
from ctypes import c_int32
import numpy as np
use()
modes, types = driver.CUstreamCaptureMode, driver.CUgraphNodeType
N, draw, s = 96, np.random.default_rng(3), stream()
norm, matvec, add = (function(name) for name in ("norm", "matvec", "add"))
def put(address, array):
    call("cuMemcpyHtoD", address, np.ascontiguousarray(array, np.float32), array.size * 4)
def get(address, n=N):
    return np.frombuffer(fetch(address, 4 * n), np.float32)
def random(*shape):
    return draw.random(shape, np.float32)
X, Y, Z, W = alloc(4 * N), alloc(4 * N), alloc(4 * N), alloc(4 * N * N)
x, w = random(N), random(N, N)
put(X, x), put(W, w)
def launch(kernel, stream, *values, shared=0):
    call("cuLaunchKernel", kernel, 1, 1, 1, 128, 1, 1, shared, stream, arguments(*values), 0)
def adds(stream, x, y, out, scale):
    launch(add, stream, x, y, out, scale, c_int32(N))
def multiplies(stream, x, out):
    launch(matvec, stream, x, W, out, c_int32(N), c_int32(N))
def captured(work, *streams, mode="GLOBAL"):
    call("cuStreamBeginCapture", s, getattr(modes, "CU_STREAM_CAPTURE_MODE_" + mode))
    work(s, *streams)
    return call("cuStreamEndCapture", s)
def instantiated(graph):
    return call("cuGraphInstantiate", graph, 0)
def run(executable, stream=s):
    call("cuGraphLaunch", executable, stream)
    call("cuStreamSynchronize", stream)
def nodes_of(graph):
    count = call("cuGraphGetNodes", graph)[1]
    return call("cuGraphGetNodes", graph, count)[0]
def kind(node):
    return call("cuGraphNodeGetType", node).name.removeprefix("CU_GRAPH_NODE_TYPE_")
def edges_of(graph, with_data=False):
    get_edges = getattr(driver, "cuGraphGetEdges_v2", driver.cuGraphGetEdges)
    count = get_edges(graph)[-1]
    error, first, second, data, _ = get_edges(graph, count)
    assert not int(error)
    found = [(int(a), int(b)) for a, b in zip(first, second)]
    return [(*e, d.from_port, d.type) for e, d in zip(found, data)] if with_data else found
def order(graph, first, second):
    name = "cuGraphAddDependencies_v2" if hasattr(driver, "cuGraphGetEdges_v2") else (
        "cuGraphAddDependencies")
    return attempt(name, graph, [first], [second], [driver.CUgraphEdgeData()], 1)
def event():
    return call("cuEventCreate", 2)
def follow(first, second):
    at = event()
    call("cuEventRecord", at, first)
    call("cuStreamWaitEvent", second, at, 0)
def kernel_params(function, *values, threads=128, shared=0):
    params = driver.CUDA_KERNEL_NODE_PARAMS()
    params.func = function
    params.gridDimX = params.gridDimY = params.gridDimZ = 1
    params.blockDimX, params.blockDimY, params.blockDimZ = threads, 1, 1
    params.sharedMemBytes = shared
    params.kernelParams = arguments(*values)
    return params
def memset_params(address, value, count, element=1):
    params = driver.CUDA_MEMSET_NODE_PARAMS()
    params.dst, params.value, params.elementSize = address, value, element
    params.width, params.height = count, 1
    return params
def memcpy_params(to, source, nbytes):
    params = driver.CUDA_MEMCPY3D()
    params.srcMemoryType = params.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    params.dstDevice, params.srcDevice, params.WidthInBytes = to, source, nbytes
    params.Height = params.Depth = 1
    return params
"""


def layer(major: int, code: str, **settings: object) -> list[str]:
    library = kernels_library(90, decode.images())
    return passes(major, _LAYER + code, KERNELS=library, **settings)


#: Two branches: Y = W x, and a copy of x in Z that is doubled; then Y + 0.5 Z, after Y was cleared.
_FORK = """
def forks(first, second):
    call("cuMemsetD8Async", Y, 0, 4 * N, first)
    follow(first, second)
    multiplies(first, X, Y)
    call("cuMemcpyDtoDAsync", Z, X, 4 * N, second)
    adds(second, Z, Z, Z, 1.0)
    follow(second, first)
    adds(first, Y, Z, Y, 0.5)
other = stream()
graph = captured(forks, other)
def right(x):
    return np.allclose(get(Y), w @ x + x, rtol=1e-5)
"""


@pytest.mark.parametrize("order", ["reverse", "created", "1", "2"])
def test_a_capture_with_a_fork_runs_for_new_contents(major: int, order: str) -> None:
    code = (
        _FORK
        + """
print(*sorted(map(kind, nodes_of(graph))), len(edges_of(graph)))
put(Y, random(N)), put(Z, random(N))
executable = instantiated(graph)
call("cuGraphDestroy", graph)
print(get(Y)[0] > 0)  # nothing of it ran so far
for _ in range(3):
    x = random(N)
    put(X, x)
    run(executable)
    print(right(x))
"""
    )
    lines = layer(major, code, GRAPH_ORDER=order)
    assert lines == ["KERNEL KERNEL KERNEL MEMCPY MEMSET 5", *["True"] * 4]


def test_a_graph_that_is_built_by_hand_equals_the_captured_one(major: int) -> None:
    code = (
        _FORK
        + """
def shape(graph):
    nodes = nodes_of(graph)
    def said(node):
        if kind(node) == "MEMSET":
            p = call("cuGraphMemsetNodeGetParams", node)
            return ("set", int(p.dst), p.value, p.elementSize, p.width, p.height)
        if kind(node) == "MEMCPY":
            p = call("cuGraphMemcpyNodeGetParams", node)
            types = (p.srcMemoryType.name, p.dstMemoryType.name)
            return (*types, int(p.dstDevice), int(p.srcDevice), p.WidthInBytes, p.Height, p.Depth)
        p = call("cuGraphKernelNodeGetParams", node)
        values, at = [], 0
        while int((info := driver.cuFuncGetParamInfo(p.func, at))[0]) == 0:
            offset, nbytes = info[1:]
            address = ctypes.c_void_p.from_address(int(p.kernelParams) + 8 * at).value
            values.append((offset, nbytes, ctypes.string_at(address, nbytes)))
            at += 1
        grid = (p.gridDimX, p.gridDimY, p.gridDimZ, p.blockDimX, p.sharedMemBytes)
        return (call("cuFuncGetName", p.func).decode(), grid, values)
    texts = {int(node): repr(said(node)) for node in nodes}
    return sorted(texts.values()), sorted((texts[a], texts[b]) for a, b in edges_of(graph))
built = call("cuGraphCreate", 0)
context = call("cuCtxGetCurrent")
clear = call("cuGraphAddMemsetNode", built, [], 0, memset_params(Y, 0, 4 * N), context)
params = kernel_params(matvec, X, W, Y, c_int32(N), c_int32(N))
multiply = call("cuGraphAddKernelNode", built, [clear], 1, params)
copy = call("cuGraphAddMemcpyNode", built, [clear], 1, memcpy_params(Z, X, 4 * N), context)
params = kernel_params(add, Z, Z, Z, 1.0, c_int32(N))
double = call("cuGraphAddKernelNode", built, [copy], 1, params)
params = kernel_params(add, Y, Z, Y, 0.5, c_int32(N))
last = call("cuGraphAddKernelNode", built, [multiply], 1, params)
params.kernelParams = arguments(1, 2, 3, 4.0, c_int32(5))  # they were copied
print(shape(built) == shape(graph), repr(order(built, double, last)), shape(built) == shape(graph))
for name in ("cuGraphNodeGetDependencies_v2", "cuGraphNodeGetDependencies"):
    if hasattr(driver, name):
        print([int(node) for node in call(name, last, 2)[0]] == [int(multiply), int(double)])
for text in shape(graph)[0]:
    print(text)
run(instantiated(built))
print(right(x))
"""
    )
    lines = layer(major, code)
    assert lines[0] == "False '' True" and lines[-1] == "True"
    assert lines[1:-6] == ["True"] * (2 if major == 12 else 1)
    # Sizes and offsets are those of the cubin: an int between pointers is padded.
    assert "'matvec', (1, 1, 1, 128, 0), [(0, 8" in "".join(lines)
    sizes = "(24, 4, b'`\\x00\\x00\\x00'), (28, 4, b'`\\x00\\x00\\x00'), (32, 8"
    assert sizes in "".join(lines)


def test_a_missing_edge_shows(major: int) -> None:
    """Nodes that nothing orders run in another order than they were made, or in a drawn one."""
    code = """
graph = call("cuGraphCreate", 0)
context = call("cuCtxGetCurrent")
copy = call("cuGraphAddMemcpyNode", graph, [], 0, memcpy_params(Y, X, 4 * N), context)
params = kernel_params(add, Y, Y, Z, 1.0, c_int32(N))
call("cuGraphAddKernelNode", graph, [], 0, params)  # it should have named the copy
executable, right = instantiated(graph), []
for _ in range(16):
    x = random(N)
    put(X, x)
    run(executable)
    right.append(bool(np.allclose(get(Z), 2 * x)))
print(all(right), any(right))
"""
    assert layer(major, code) == ["False False"]
    assert layer(major, code, GRAPH_ORDER="created") == ["True True"]
    assert layer(major, code, GRAPH_ORDER="7") == ["False True"]


def test_what_a_capture_asks_of_its_streams(major: int) -> None:
    code = """
info = getattr(driver, "cuStreamGetCaptureInfo_v3", driver.cuStreamGetCaptureInfo)
other = stream()
def state(on):
    error, status, identity, graph, after, *_ = info(on)
    assert not int(error)
    return status.name.rpartition("_")[2], len(after or [])
def work(first, second):
    print(state(first), state(second))
    adds(first, X, X, Y, 1.0)
    follow(first, second)
    adds(second, X, X, Z, 1.0)
    print(state(first), state(second), int(info(first)[2]) == int(info(second)[2]))
    follow(second, first)
    print(state(first))
    print(int(call("cuGraphGetNodes", info(first)[3])[1]))
captured(work, other)
print(state(s), state(other))
"""
    active = "('ACTIVE', 0) ('NONE', 0)", "('ACTIVE', 1) ('ACTIVE', 1) True", "('ACTIVE', 2)", "2"
    assert layer(major, code) == [*active, "('NONE', 0) ('NONE', 0)"]


#: Calls between the beginning and the end of a capture on `s` that ruin it: what they say, and what
#: the end says.
_RUINED = {
    "a fork that is not joined": ("follow(s, other); adds(other, X, X, Y, 1.0)", "", "UNJOINED"),
    "the end on another stream": (
        'follow(s, other); print(attempt("cuStreamEndCapture", other))',
        "STREAM_CAPTURE_UNMATCHED",
        "INVALIDATED",
    ),
    "a wait for work outside": (
        'call("cuEventRecord", at, other); print(attempt("cuStreamWaitEvent", s, at, 0))',
        "STREAM_CAPTURE_ISOLATION",
        "INVALIDATED",
    ),
    "two captures in one": (
        'call("cuStreamBeginCapture", other, modes.CU_STREAM_CAPTURE_MODE_GLOBAL); '
        'call("cuEventRecord", at, other); print(attempt("cuStreamWaitEvent", s, at, 0))',
        "STREAM_CAPTURE_MERGE",
        "INVALIDATED",
    ),
    "a question about a captured event": (
        'call("cuEventRecord", at, s); print(attempt("cuEventSynchronize", at))',
        "STREAM_CAPTURE_UNSUPPORTED",
        "INVALIDATED",
    ),
    "the same where it is safe": (
        'relax(); call("cuEventRecord", at, s); print(attempt("cuEventQuery", at))',
        "CAPTURED_EVENT",
        "INVALIDATED",
    ),
    "an allocation": (
        'print(attempt("cuMemAlloc", 8))',
        "STREAM_CAPTURE_UNSUPPORTED",
        "INVALIDATED",
    ),
    "a copy that waits": (
        'print(attempt("cuMemcpyDtoH", bytearray(4), X, 4))',
        "STREAM_CAPTURE_UNSUPPORTED",
        "INVALIDATED",
    ),
    "pageable memory": (
        'print(attempt("cuMemcpyHtoDAsync", X, bytes(4), 4, s))',
        "STREAM_CAPTURE_UNSUPPORTED",
        "INVALIDATED",
    ),
    "the context's work": (
        'relax(); print(attempt("cuCtxSynchronize"))',
        "STREAM_CAPTURE_UNSUPPORTED",
        "INVALIDATED",
    ),
    "a stream that is destroyed": (
        'print(attempt("cuStreamDestroy", s))',
        "STREAM_CAPTURE_UNSUPPORTED",
        "INVALIDATED",
    ),
    "what follows": (
        'attempt("cuMemAlloc", 8); print(attempt("cuMemsetD8Async", X, 0, 4, s))',
        "STREAM_CAPTURE_INVALIDATED",
        "INVALIDATED",
    ),
    "nothing": ("adds(s, X, X, Y, 1.0)", "", ""),
}


def test_what_ruins_a_capture(major: int) -> None:
    code = """
def relax():
    call("cuThreadExchangeStreamCaptureMode", modes.CU_STREAM_CAPTURE_MODE_RELAXED)
for text in CASES:
    call("cuThreadExchangeStreamCaptureMode", modes.CU_STREAM_CAPTURE_MODE_GLOBAL)
    s, other, at = stream(), stream(), event()
    call("cuStreamBeginCapture", s, modes.CU_STREAM_CAPTURE_MODE_GLOBAL)
    exec(text)
    error, graph = driver.cuStreamEndCapture(s)
    print(error.name.partition("CUDA_ERROR_")[2], bool(graph and int(graph)))
    attempt("cuStreamEndCapture", other)
    print(attempt("cuMemsetD8Async", X, 0, 4, other), attempt("cuStreamSynchronize", s))
"""
    lines = layer(major, f"CASES = {[case[0] for case in _RUINED.values()]!r}\n" + code)
    expected = []
    for _, said, end in _RUINED.values():
        expected += [said] if said else []
        expected += [f"STREAM_CAPTURE_{end} False" if end else " True", " "]
    assert lines == expected


@pytest.mark.parametrize("mode", ["GLOBAL", "THREAD_LOCAL", "RELAXED"])
def test_threads_that_capture_at_once(major: int, mode: str) -> None:
    """Unsafe calls of one thread ruin the captures of others that are global."""
    code = f"""
both, allocated, graphs = threading.Barrier(2), threading.Barrier(2), {{}}
def capture(name, allocates):
    call("cuCtxPushCurrent", call("cuDevicePrimaryCtxRetain", 0))
    on = stream()
    call("cuStreamBeginCapture", on, modes.CU_STREAM_CAPTURE_MODE_{mode})
    adds(on, X, X, Y, 1.0)
    both.wait(60)
    if allocates:
        graphs["said"] = attempt("cuMemAlloc", 8)
    allocated.wait(60)
    error, graphs[name] = driver.cuStreamEndCapture(on)
threads = [threading.Thread(target=capture, args=(name, name == "allocates"))
           for name in ("other", "allocates")]
for thread in threads: thread.start()
for thread in threads: thread.join()
def result(name):
    if not graphs[name] or not int(graphs[name]):
        return "ruined"
    run(instantiated(graphs[name]))
    return len(nodes_of(graphs[name]))
print(graphs["said"], result("allocates"), result("other"))
"""
    said = {
        "GLOBAL": "STREAM_CAPTURE_UNSUPPORTED ruined ruined",
        "THREAD_LOCAL": "STREAM_CAPTURE_UNSUPPORTED ruined 1",
        "RELAXED": " 1 1",
    }
    assert layer(major, code) == [said[mode]]


def test_the_default_stream_is_not_captured(major: int) -> None:
    code = """
blocking = call("cuStreamCreate", 0)
print(attempt("cuStreamBeginCapture", 0, modes.CU_STREAM_CAPTURE_MODE_RELAXED))
call("cuStreamBeginCapture", blocking, modes.CU_STREAM_CAPTURE_MODE_RELAXED)
print(attempt("cuStreamIsCapturing", 0), attempt("cuStreamIsCapturing", blocking))
print(attempt("cuMemsetD8Async", X, 0, 4, 0), attempt("cuStreamEndCapture", blocking))
call("cuStreamBeginCapture", s, modes.CU_STREAM_CAPTURE_MODE_RELAXED)
print(attempt("cuMemsetD8Async", X, 0, 4, 0), attempt("cuStreamEndCapture", s))
print(attempt("cuStreamEndCapture", s))
call("cuStreamBeginCapture", s, modes.CU_STREAM_CAPTURE_MODE_RELAXED)
print(attempt("cuStreamBeginCapture", s, modes.CU_STREAM_CAPTURE_MODE_RELAXED))
"""
    implicit = "STREAM_CAPTURE_IMPLICIT"
    assert layer(major, code) == [
        "STREAM_CAPTURE_UNSUPPORTED",
        f"{implicit} ",
        f"{implicit} STREAM_CAPTURE_INVALIDATED",
        " ",
        "ILLEGAL_STATE",
        "ILLEGAL_STATE",
    ]


def test_nodes_of_every_kind_have_a_name(major: int) -> None:
    code = """
noted = []
note = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: noted.append(1))
hosted = driver.CUhostFn(ctypes.cast(note, ctypes.c_void_p).value)
at, word, host = event(), alloc(4), pinned(4 * N)
outer = call("cuEventCreate", 2)
def safe(stream):
    call("cuLaunchHostFunc", stream, hosted, 0)
    call("cuEventRecordWithFlags", outer, stream, 1)
    call("cuStreamWaitEvent", stream, outer, 1)
    call("cuMemsetD8Async", Y, 0x3f, 4 * N, stream)
    call("cuMemcpyDtoHAsync", host, Y, 4 * N, stream)
    call("cuMemcpyHtoDAsync", Z, host, 4 * N, stream)
inner = captured(safe)
def around(stream):
    call("cuGraphLaunch", instantiated(inner), stream)
    adds(stream, Y, Z, Z, 2.0)
graph = captured(around, mode="RELAXED")
call("cuGraphAddEmptyNode", graph, nodes_of(graph), 2)
print(*map(kind, nodes_of(inner)))
(child,) = [node for node in nodes_of(graph) if kind(node) == "GRAPH"]
within = call("cuGraphChildGraphNodeGetGraph", child)
print(*map(kind, nodes_of(graph)), len(nodes_of(within)), attempt("cuGraphDestroy", within))
executable = instantiated(graph)
run(executable)  # once: the bindings of CUDA 12 free what they hand a host function
print(len(noted), set((get(Z) / get(Y)).tolist()), attempt("cuEventQuery", outer))
def unsafe(stream):
    address = int(call("cuMemAllocAsync", 64, stream))
    call("cuStreamWaitValue32", stream, word, driver.cuuint32_t(1), 0)
    return address
bad = captured(unsafe)
print(*map(kind, nodes_of(bad)), attempt("cuGraphInstantiate", bad, 0))
conditional = call("cuGraphCreate", 0)
params = driver.CUgraphNodeParams()
params.type = types.CU_GRAPH_NODE_TYPE_CONDITIONAL
handle = call("cuGraphConditionalHandleCreate", conditional, call("cuCtxGetCurrent"), 0, 0)
params.conditional.handle, params.conditional.size = handle, 1
if hasattr(driver, "cuGraphAddNode_v2"):
    call("cuGraphAddNode_v2", conditional, None, None, 0, params)
else:
    call("cuGraphAddNode", conditional, None, None, 0, params)
print(*map(kind, nodes_of(conditional)), attempt("cuGraphInstantiate", conditional, 0))
print(attempt("cuMemAllocAsync", 64, s))
"""
    assert layer(major, code) == [
        "MEMCPY MEMCPY MEMSET WAIT_EVENT EVENT_RECORD HOST",
        "EMPTY KERNEL GRAPH 6 INVALID_VALUE",
        "1 {3.0} ",
        "BATCH_MEM_OP MEM_ALLOC NOT_SUPPORTED",
        "CONDITIONAL NOT_SUPPORTED",
        "NOT_SUPPORTED",
    ]


def test_attributes_and_edges_that_begin_early(major: int) -> None:
    code = """
ids = driver.CUlaunchAttributeID
def attribute(name, **fields):
    made = driver.CUlaunchAttribute()
    made.id = getattr(ids, "CU_LAUNCH_ATTRIBUTE_" + name)
    for field, value in fields.items():
        setattr(made.value, field, value)
    return made
def early(stream):
    adds(stream, X, X, Y, 1.0)
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = 2, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 128, 1, 1
    config.hStream = stream
    config.attrs = [
        attribute("PROGRAMMATIC_STREAM_SERIALIZATION", programmaticStreamSerializationAllowed=1),
        attribute("PRIORITY", priority=-3),
    ]
    config.numAttrs = 2
    call("cuLaunchKernelEx", config, add, arguments(Y, Y, Z, 1.0, c_int32(N)), 0)
graph = captured(early)
second, first = nodes_of(graph)
print([(a == int(first), b == int(second), *data) for a, b, *data in edges_of(graph, True)])
print(attempt("cuGraphGetEdges", graph, 1) if hasattr(driver, "cuGraphGetEdges_v2") else
      "LOSSY_QUERY")
def asked(node, name):
    return call("cuGraphKernelNodeGetAttribute", node, getattr(ids, "CU_LAUNCH_ATTRIBUTE_" + name))
print(asked(second, "PRIORITY").priority, asked(first, "PRIORITY").priority)
value = driver.CUkernelNodeAttrValue()
value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = 2, 1, 1
cluster = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
call("cuGraphKernelNodeSetAttribute", second, cluster, value)
print(asked(second, "CLUSTER_DIMENSION").clusterDim.x, asked(second, "PRIORITY").priority)
print(repr(attempt("cuGraphInstantiate", graph, 0)))
call("cuGraphKernelNodeSetAttribute", first, cluster, value)
print(attempt("cuGraphInstantiate", graph, 0))  # its grid is of one block
print(attempt("cuGraphKernelNodeGetAttribute", first, ids.CU_LAUNCH_ATTRIBUTE_IGNORE))
"""
    assert layer(major, code) == [
        "[(True, True, 1, 1)]",
        "LOSSY_QUERY",
        "-3 0",
        "2 -3",
        "''",
        "INVALID_CLUSTER_SIZE",
        "INVALID_VALUE",
    ]


def test_kernels_of_libraries(major: int) -> None:
    code = """
library = call("cuLibraryLoadData", image("add"), None, None, 0, None, None, 0)
(kernel,) = call("cuLibraryEnumerateKernels", call("cuLibraryGetKernelCount", library), library)
print(call("cuKernelGetName", kernel), call("cuKernelGetParamInfo", kernel, 3),
      call("cuLibraryGetKernel", library, b"add") == kernel,
      attempt("cuLibraryGetKernel", library, b"other"),
      attempt("cuKernelGetParamInfo", kernel, 7))
print(int(call("cuKernelGetLibrary", kernel)) == int(library)
      if hasattr(driver, "cuKernelGetLibrary") else True)
found = call("cuKernelGetFunction", kernel)
print(call("cuFuncGetName", found),
      int(call("cuFuncGetModule", found)) == int(call("cuLibraryGetModule", library)),
      call("cuFuncGetAttribute",
           driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, found))
def both(stream):
    launch(found, stream, X, X, Y, 1.0, c_int32(N))
    launch(driver.CUfunction(int(kernel)), stream, Y, X, Y, 1.0, c_int32(N))
graph = captured(both)
for node in nodes_of(graph):
    p = call("cuGraphKernelNodeGetParams", node)
    print(int(p.func) == int(found), int(p.kern) == int(kernel))
executable = instantiated(graph)
run(executable)
print(np.allclose(get(Y), 3 * x))
call("cuLibraryUnload", library)
print(attempt("cuKernelGetName", kernel))
call("cuGraphLaunch", executable, s)
print(attempt("cuStreamSynchronize", s))
"""
    assert layer(major, code) == [
        "b'add' [24, 4] True NOT_FOUND INVALID_VALUE",
        "True",
        "b'add' True 128",
        "False True",
        "True False",
        "True",
        "INVALID_HANDLE",
        "ILLEGAL_ADDRESS",
    ]


def test_an_executable_is_updated(major: int) -> None:
    code = """
def one(scale, out=Y):
    return captured(lambda stream: adds(stream, X, X, out, scale))
first = one(1.0)
executable = instantiated(first)
(node,) = nodes_of(first)
def factor():
    run(executable)
    return round(float((get(Y) / x).mean()), 3)
print(factor())
call("cuGraphExecKernelNodeSetParams", executable, node,
     kernel_params(add, X, X, Y, 2.0, c_int32(N)))
print(factor())
error, info = driver.cuGraphExecUpdate(executable, one(3.0))
print(error.name, info.result.name, factor())
two = captured(lambda stream: (adds(stream, X, X, Y, 4.0), adds(stream, X, X, Y, 5.0)))
print(attempt("cuGraphExecUpdate", executable, two), factor())
clears = captured(lambda stream: call("cuMemsetD8Async", Y, 0, 4 * N, stream))
print(attempt("cuGraphExecUpdate", executable, clears), factor())
print(attempt("cuGraphExecKernelNodeSetParams", executable, nodes_of(two)[0],
              kernel_params(add, X, X, Y, 2.0, c_int32(N))))
call("cuGraphDestroy", first)
print(attempt("cuGraphExecKernelNodeSetParams", executable, node,
              kernel_params(add, X, X, Y, 2.0, c_int32(N))), factor())
"""
    assert layer(major, code) == [
        "2.0",
        "3.0",
        "CUDA_SUCCESS CU_GRAPH_EXEC_UPDATE_SUCCESS 4.0",
        "GRAPH_EXEC_UPDATE_FAILURE 4.0",
        "GRAPH_EXEC_UPDATE_FAILURE 4.0",
        "INVALID_VALUE",
        "INVALID_VALUE 4.0",
    ]


def test_what_is_under_way_is_not_changed(major: int) -> None:
    """Launches run one after the other, as the executable was when each was queued."""
    code = """
graph = captured(lambda stream: adds(stream, Y, X, Y, 1.0))
(node,), executable, word = nodes_of(graph), instantiated(graph), pinned(4)
ctypes.memset(word, 0, 4)
fill(Y, 0, 4 * N)
call("cuStreamWaitValue32", s, word, driver.cuuint32_t(1), 0)
call("cuGraphLaunch", executable, s)
call("cuGraphExecKernelNodeSetParams", executable, node,
     kernel_params(add, Y, X, Y, 10.0, c_int32(N)))
other = stream()
call("cuGraphLaunch", executable, other)
call("cuGraphExecKernelNodeSetParams", executable, node,
     kernel_params(add, Y, X, Y, 100.0, c_int32(N)))
print(attempt("cuStreamQuery", other))
call("cuGraphExecDestroy", executable)
ctypes.memset(word, 1, 4)
call("cuStreamSynchronize", other)
print(round(float((get(Y) / x).mean())), attempt("cuGraphLaunch", executable, s))
"""
    assert layer(major, code) == ["NOT_READY", "11 INVALID_VALUE"]


def test_a_kernel_asks_for_shared_memory(major: int) -> None:
    code = """
weight = alloc(4 * N)
put(weight, np.ones(N))
def normal(shared):
    launch(norm, s, X, weight, Y, c_int32(N), shared=shared)
    return attempt("cuStreamSynchronize", s)
attributes = driver.CUfunction_attribute
most = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
print(normal(16), np.allclose(get(Y), x / np.sqrt((x * x).mean() + 1e-5), rtol=1e-5))
print(call("cuFuncGetAttribute", most, norm), attempt("cuFuncSetAttribute", norm, most, 1 << 20))
bad = kernel_params(norm, X, weight, Y, c_int32(N), shared=64 << 10)
graph = call("cuGraphCreate", 0)
print(attempt("cuGraphAddKernelNode", graph, [], 0, bad))
call("cuFuncSetAttribute", norm, most, 64 << 10)
print(repr(attempt("cuGraphAddKernelNode", graph, [], 0, bad)))
print(normal(0))  # it stores there
"""
    assert layer(major, code) == [
        " True",
        "49152 INVALID_VALUE",
        "INVALID_VALUE",
        "''",
        "ILLEGAL_ADDRESS",
    ]


def test_modules_end_with_their_context(major: int) -> None:
    code = """
other = call("cuDevicePrimaryCtxRetain", 1)
call("cuCtxPushCurrent", other)
print(attempt("cuLaunchKernel", add, 1, 1, 1, 128, 1, 1, 0, stream(), arguments(X, X, Y, 1.0), 0))
function("add")
call("cuCtxPopCurrent")
call("cuDevicePrimaryCtxRelease", 0)
call("cuDevicePrimaryCtxRetain", 0)
print(attempt("cuFuncGetName", add), repr(attempt("cuFuncGetName", function("add"))))
"""
    assert layer(major, code) == ["INVALID_HANDLE", "INVALID_HANDLE ''"]


_BAD_ADDRESSES = {
    "kernel": "adds(stream, X, 4096, Y, 1.0)",
    "write": "adds(stream, X, X, 4096, 1.0)",
    "memset": 'call("cuMemsetD8Async", 4096, 0, 4, stream)',
    "memcpy": 'call("cuMemcpyDtoDAsync", Y, X + 4 * N - 4, 8, stream)',
    "beyond": "launch(matvec, stream, X, W, Y, c_int32(N), c_int32(N + 1))",
}


@pytest.mark.parametrize("work", _BAD_ADDRESSES.values(), ids=list(_BAD_ADDRESSES))
def test_a_bad_address_breaks_the_context_when_it_runs(major: int, work: str) -> None:
    code = f"""
executable = instantiated(captured(lambda stream: {work}))
print(repr(attempt("cuGraphLaunch", executable, s)), attempt("cuStreamSynchronize", s))
print(attempt("cuMemAlloc", 8))
"""
    assert layer(major, code) == ["'' ILLEGAL_ADDRESS", "ILLEGAL_ADDRESS"]


def test_memory_that_is_gone_and_kernels_that_are(major: int) -> None:
    code = """
executable = instantiated(captured(lambda stream: adds(stream, X, X, GONE, 1.0)))
run(executable)
call(*FREES)
call("cuGraphLaunch", executable, s)
print(attempt("cuStreamSynchronize", s))
"""
    frees = {"GONE = alloc(4 * N)": '("cuMemFree", GONE)'}
    frees["GONE = Y"] = '("cuModuleUnload", call("cuFuncGetModule", add))'
    for made, freed in frees.items():
        assert layer(major, f"{made}\nFREES = {freed}\n{code}") == ["ILLEGAL_ADDRESS"]


def test_arguments_are_checked(major: int) -> None:
    code = """
graph, another = call("cuGraphCreate", 0), call("cuGraphCreate", 0)
context = call("cuCtxGetCurrent")
params = kernel_params(add, X, X, Y, 1.0, c_int32(N))
first = call("cuGraphAddKernelNode", graph, [], 0, params)
second = call("cuGraphAddEmptyNode", graph, [first], 1)
stranger = call("cuGraphAddEmptyNode", another, [], 0)
print("twice", attempt("cuGraphAddEmptyNode", graph, [first, first], 2))
print("stranger", attempt("cuGraphAddEmptyNode", graph, [stranger], 1))
print("again", order(graph, first, second), order(graph, first, first),
      order(graph, first, stranger))
print("threads", attempt("cuGraphAddKernelNode", graph, [], 0,
                         kernel_params(add, X, X, Y, 1.0, c_int32(N), threads=64)))
print("handle", attempt("cuGraphAddKernelNode", graph, [], 0,
                        kernel_params(call("cuFuncGetModule", add), X)))
print("element", attempt("cuGraphAddMemsetNode", graph, [], 0, memset_params(Y, 0, 4, 3), context),
      attempt("cuGraphAddMemsetNode", graph, [], 0, memset_params(Y, 256, 4), context),
      attempt("cuGraphAddMemsetNode", graph, [], 0, memset_params(Y + 2, 0, 4, 4), context),
      attempt("cuGraphAddMemsetNode", graph, [], 0, memset_params(Y, 0, 0), context))
print("context", attempt("cuGraphAddMemsetNode", graph, [], 0, memset_params(Y, 0, 4), None))
print("nothing", attempt("cuGraphAddMemcpyNode", graph, [], 0, memcpy_params(Y, X, 0), context))
print("type", attempt("cuGraphMemsetNodeGetParams", first),
      attempt("cuGraphKernelNodeGetParams", second))
print("cycle", repr(order(graph, second, first)), attempt("cuGraphInstantiate", graph, 0))
print("flags", attempt("cuGraphInstantiate", another, 16), attempt("cuGraphCreate", 1))
call("cuGraphDestroy", graph)
print("destroyed", attempt("cuGraphDestroy", graph), attempt("cuGraphNodeGetType", first),
      attempt("cuGraphGetNodes", graph))
copy = call("cuGraphClone", another)
call("cuGraphDestroy", another)
print("clone", len(nodes_of(copy)))
"""
    bad = "INVALID_VALUE"
    assert layer(major, code) == [
        f"twice {bad}",
        f"stranger {bad}",
        f"again {bad} {bad} {bad}",
        f"threads {bad}",
        "handle INVALID_HANDLE",
        f"element {bad} {bad} {bad} {bad}",
        "context INVALID_CONTEXT",
        f"nothing {bad}",
        f"type {bad} {bad}",
        f"cycle '' {bad}",
        f"flags {bad} {bad}",
        f"destroyed {bad} {bad} {bad}",
        "clone 1",
    ]


def test_a_forked_child_has_no_graphs(major: int) -> None:
    code = """
executable = instantiated(captured(lambda stream: adds(stream, X, X, Y, 1.0)))
child = os.fork()
if not child:
    said = [attempt("cuGraphLaunch", executable, s), attempt("cuGraphCreate", 0),
            attempt("cuStreamBeginCapture", s, modes.CU_STREAM_CAPTURE_MODE_GLOBAL)]
    os._exit(said != ["NOT_INITIALIZED"] * 3)
print(os.waitpid(child, 0)[1])
run(executable)
print(np.allclose(get(Y), 2 * x))
"""
    assert layer(major, code) == ["0", "True"]


def test_calls_and_nodes_fail_on_purpose(major: int, tmp_path: Path) -> None:
    code = """
graph = captured(lambda stream: [adds(stream, X, X, Y, 1.0) for _ in range(3)])
print(attempt("cuGraphInstantiate", graph, 0))
executable = instantiated(graph)
call("cuGraphLaunch", executable, s)
print(attempt("cuStreamSynchronize", s))
"""
    fail = "cuGraphInstantiateWithFlags:1:CUDA_ERROR_OUT_OF_MEMORY"
    assert layer(major, code, FAIL=fail, LOG=tmp_path) == ["OUT_OF_MEMORY", ""]
    (log,) = tmp_path.iterdir()
    assert "cuGraphLaunch(" in log.read_text() and "cuStreamEndCapture(" in log.read_text()
    # Copies to the GPU, the launch, and the third of its nodes.
    fail = "cuGraphInstantiateWithFlags:1:1,work:6:CUDA_ERROR_LAUNCH_FAILED"
    assert layer(major, code, FAIL=fail) == ["INVALID_VALUE", "LAUNCH_FAILED"]
    fail = "cuGraphInstantiateWithFlags:1:1,work:7:CUDA_ERROR_LAUNCH_FAILED"
    assert layer(major, code, FAIL=fail) == ["INVALID_VALUE", ""]


def test_each_node_is_late(major: int) -> None:
    code = """
graph = captured(lambda stream: [adds(stream, Y, X, Y, 1.0) for _ in range(3)])
fill(Y, 0, 4 * N)
executable = instantiated(graph)
call("cuGraphUpload", executable, s)
call("cuGraphLaunch", executable, s)
print(attempt("cuStreamQuery", s), attempt("cuStreamSynchronize", s), np.allclose(get(Y), 3 * x))
"""
    assert layer(major, code, LATE_US=3000) == ["NOT_READY  True"]


def test_a_broken_context_ends_with_its_error(major: int) -> None:
    """Nothing hangs: launches that wait for others of the executable are let go."""
    code = """
bad = instantiated(captured(lambda stream: adds(stream, X, 4096, Y, 1.0)))
others = [stream() for _ in range(3)]
for on in (s, *others, s):
    attempt("cuGraphLaunch", bad, on)
print(*(attempt("cuStreamSynchronize", on) for on in (s, *others)))
"""
    library = kernels_library(90, decode.images())
    ended = finish(major, _LAYER + code, KERNELS=library, LATE_US=500)
    assert (ended.returncode, ended.stdout.strip()) == (0, " ".join(["ILLEGAL_ADDRESS"] * 4))
