"""Graphs of the stand-in driver: looked at, built, changed and run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.driver import decode
from tests.support.driver.build import kernels_library
from tests.support.driver.graph_prelude import PRELUDE, layer
from tests.support.driver.programs import each_major_at_leisure, finish

pytestmark = each_major_at_leisure

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
holder = call("cuGraphAddChildGraphNode", copy, [], 0, another)
call("cuGraphAddEmptyNode", another, [], 0)  # neither copy has it
call("cuGraphDestroy", another)
print("clone", len(nodes_of(copy)), len(nodes_of(call("cuGraphChildGraphNodeGetGraph", holder))))
print("stale", attempt("cuGraphAddChildGraphNode", copy, [], 0, another))
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
        "clone 2 1",
        f"stale {bad}",
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
    ended = finish(major, PRELUDE + code, KERNELS=library, LATE_US=500)
    assert (ended.returncode, ended.stdout.strip()) == (0, " ".join(["ILLEGAL_ADDRESS"] * 4))
