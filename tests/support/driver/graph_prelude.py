"""Programs over the stand-in that capture, build and run graphs of `decode`'s kernels."""

from __future__ import annotations

from tests.support.driver import decode
from tests.support.driver.build import kernels_library
from tests.support.driver.programs import passes

#: Three vectors of 96 floats and a matrix on GPU 0, and a layer of kernels over them. `captured`
#: gives a graph of what a function does on a stream.
PRELUDE = """
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
    """Run a program with all names of the prelude, and return its output's lines.

    Args:
        major: The major version of CUDA.
        code: The program; it has to succeed.
        **settings: Settings of the stand-in.
    """
    library = kernels_library(90, decode.images())
    return passes(major, PRELUDE + code, KERNELS=library, **settings)
