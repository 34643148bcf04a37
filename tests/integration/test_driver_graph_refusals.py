"""Graphs that don't travel, and graphs that are not used: each with its reason."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from mx.graphs import GraphRefusedError, combine
from mx.graphs.message import Capture
from tests.support.driver.layer_programs import export, packaged, runs
from tests.support.driver.logs import calls, kept
from tests.support.driver.programs import each_major_at_leisure

pytestmark = [pytest.mark.integration, each_major_at_leisure]

#: Tries to export graphs that have more nodes than the layer's.
_EXPORTS = """
d = calling.driver
device = alloc(4096)
host = pinned(4096)
with mx.graphs.region(REGION_BYTES) as region:
    layer = Layer(region)
    kernels, at = layer.kernels, layer.address
    spare = region.allocate(4096)
    carry = region.allocate(4 * N)

    def export(name, *more, change=None, images=None, **changes):
        layer.fill(values(1), vector(7))
        graph = layer.capture(*more)
        if change:
            change(graph)
        given = dict(
            weights=layer.weights(),
            inputs={"x": layer.tensors["x"]},
            outputs={"out": layer.tensors["out"]},
            images=kernels.given() if images is None else images,
        )
        try:
            mx.graphs.export(graph, region, **given | changes)
        except Exception as error:
            print(json.dumps([name, f"{type(error).__name__}: {error}"]))
        else:
            print(json.dumps([name, ""]))

    def first_kernel(graph):
        nodes, count = call("cuGraphGetNodes", graph, 64)
        for node in nodes[:count]:
            if call("cuGraphNodeGetType", node).name.endswith("KERNEL"):
                return node

    def child(graph):
        call("cuGraphAddChildGraphNode", graph, None, 0, layer.capture())

    def conditional(graph):
        handle = call("cuGraphConditionalHandleCreate", graph, gpu.context, 1, 0)
        given = d.CUgraphNodeParams()
        given.type = d.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        given.conditional.handle = handle
        given.conditional.type = d.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_IF
        given.conditional.size = 1
        given.conditional.ctx = d.CUcontext(gpu.context)
        name = "cuGraphAddNode_v2" if hasattr(d, "cuGraphAddNode_v2") else "cuGraphAddNode"
        call(name, graph, None, None, 0, given)

    def policy(graph):
        value = d.CUkernelNodeAttrValue()
        value.accessPolicyWindow.base_ptr = at["x"]
        value.accessPolicyWindow.num_bytes = 128
        attribute = d.CUkernelNodeAttrID(1)
        call("cuGraphKernelNodeSetAttribute", first_kernel(graph), attribute, value)

    launch = kernels.launch
    add = lambda x, y, out: lambda s: launch(s, "add", x, y, out, 1.0, N)
    export("nothing")
    free = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p).value
    export("host", lambda s: call("cuLaunchHostFunc", s, d.CUhostFn(free), 0))
    export("child", change=child)
    export("event", lambda s: call("cuEventRecordWithFlags", call("cuEventCreate", 2), s, 1))
    words = lambda s: call("cuStreamWaitValue32", s, spare, d.cuuint32_t(1), 0)
    export("words", words)
    export("conditional", change=conditional)
    export("policy", change=policy)
    export("allocation", lambda s: call("cuMemAllocAsync", 4096, s))
    export("to host", lambda s: call("cuMemcpyDtoHAsync", host, spare, 64, s))
    export("set elsewhere", lambda s: call("cuMemsetD8Async", device, 0, 64, s))
    export("copy elsewhere", lambda s: call("cuMemcpyDtoDAsync", spare, device, 64, s))
    export("pointer elsewhere", add(device, at["x"], spare))
    export("pointer to the host", add(at["x"], at["x"], host))
    export(
        "carry",
        add(at["out"], carry, at["out"]),
        change=lambda graph: call("cuMemcpyHtoD", carry, vector(3), 4 * N),
    )
    export("nccl", lambda s: launch(s, "ncclDevKernel_Sum", at["x"], at["x"], spare, 1.0, N))
    export("image", images=kernels.given("add", "norm"))
    export("output", outputs={"elsewhere": DeviceTensor(device)})
"""
_DEVICE_TENSOR = """
class DeviceTensor:
    def __init__(self, address):
        self.__cuda_array_interface__ = dict(
            shape=(8,), typestr="<f4", data=(address, False), strides=None, version=3
        )
"""


def test_what_does_not_travel_is_refused_by_name(major: int) -> None:
    said = dict(json.loads(line) for line in runs(major, _DEVICE_TENSOR + _EXPORTS))
    assert said.pop("nothing") == ""
    for name, kind in {
        "host": "HOST",
        "child": "GRAPH",
        "event": "EVENT_RECORD",
        "words": "BATCH_MEM_OP",
        "conditional": "CONDITIONAL",
        "allocation": "MEM_ALLOC",
    }.items():
        assert f"is a {kind} node, and those don't travel" in said.pop(name)
    assert "it has an access policy window" in said.pop("policy")
    assert "copies between other than rows of device memory" in said.pop("to host")
    for name, verb in {"set elsewhere": "sets", "copy elsewhere": "copies"}.items():
        assert f"{verb} memory at 0x" in said[name] and "outside the region" in said.pop(name)
    assert "kernel add: parameter 0 has the address 0x" in said.pop("pointer elsewhere")
    assert "kernel add: parameter 2 has the address 0x" in said.pop("pointer to the host")
    assert "the output out changes" in said.pop("carry")
    assert "kernel ncclDevKernel_Sum: it talks to other processes" in said.pop("nccl")
    assert "kernel matvec: its image is not at hand" in said.pop("image")
    assert "elsewhere is at 0x" in said.pop("output")
    assert said == {}


@pytest.mark.parametrize(
    ("number", "says"),
    [
        ("spare & 0xFFFFFFFF", "parameter 3 has half an address of memory outside the region"),
        ("time.monotonic_ns() & 0xFFFF", "parameter 3 differs, and mx does not know"),
        ("layer.address['copy'] & 0xFFFFFFFF", ""),  # of the region: the same in all processes
    ],
    ids=["half an outside address", "a clock", "half an inside address"],
)
def test_half_an_address_is_no_number(major: int, tmp_path: Path, number: str, says: str) -> None:
    """A kernel that is given an address as two numbers: the two captures show it."""
    captures = []
    half = f'lambda s: kernels.launch(s, "matvec", *[layer.address["x"]] * 3, {number}, 0)'
    for decoys in (False, True):
        out = tmp_path / f"{decoys}"
        # Outside memory whose lower half is above that of all kernels' small numbers.
        before = "spare = alloc(8 << 20) + (1 << 20)"
        assert export(major, out, decoys=decoys, before=before, more=half) == "exported"
        captures.append(Capture.from_bytes(out.read_bytes()))
    if not says:
        combine(*captures)
        return
    with pytest.raises(GraphRefusedError, match=f"kernel matvec: {says}"):
        combine(*captures)


#: Begins again without randomised addresses (ADDR_NO_RANDOMIZE).
_NOT_RANDOM = """
if os.environ.setdefault("MX_TEST_BEGUN", "") != "again":
    os.environ["MX_TEST_BEGUN"] = "again"
    ctypes.CDLL(None).personality(0x0040000)
    os.execv(sys.executable, sys.orig_argv)
"""


def test_captures_of_processes_without_decoys_are_refused(major: int, tmp_path: Path) -> None:
    """Without randomised addresses the same allocations are at the same places, and decoys move
    them. Where the kernel randomises they are elsewhere in any case."""
    captures = []
    for name, decoys in (("one", False), ("other", False), ("decoys", True)):
        out = tmp_path / name
        assert export(major, out, decoys=decoys, first=_NOT_RANDOM) == "exported"
        captures.append(Capture.from_bytes(out.read_bytes()))
    with pytest.raises(GraphRefusedError, match="at the same addresses in both captures"):
        combine(*captures[:2])
    combine(captures[0], captures[2])


def _given_back(found: list[tuple[str, str]], layers: int = 0) -> bool:
    """Return True if all is given back but two streams and two events of each eager layer."""
    count = Counter(name for name, _ in found)
    left = [
        f"cu{kind}Destroy: {count[f'cu{kind}Create'] - 2 * layers} of {count[f'cu{kind}Create']}"
        for kind in ("Stream", "Event")
    ]
    return [each for each in kept(found) if "Ctx" not in each] == (left if layers else [])


_RESTORES = """
folder = Path({folder!r})
message = (folder / "graph").read_bytes()
read = lambda digest: (folder / digest).read_bytes()

def tries(name, *, prove=None, **given):
    given = dict(message=message, get_image=read, pin="pin-1") | given
    with mx.graphs.restore(**given) as graph:
        if prove:
            weights = values(1)
            for each, tensor in graph.tensors().items():
                call("cuMemcpyHtoD", tensor.address, weights[each].tobytes(), tensor.nbytes)
            with mx.graphs.region(REGION_BYTES, base=OWN_BASE) as own:
                eager = Layer(own)
                eager.fill(weights, vector(0))
                expected = eager.eager(vector(8))
            prove(graph, expected)
        state, reason = graph.state.value, graph.reason
        assert not graph.launch(0) and not graph.prove({{}}, {{}})
    differ = [each.field for each in reason.differences]
    print(json.dumps([name, state, reason.cause.value, reason.message, differ]))
"""
_REASONS = """
tries("no message", message=b"")
tries("pin", pin="another")
tries("no pin", pin="")
tries("image lost", get_image=lambda digest: {}[digest])
tries("image cut", get_image=lambda digest: read(digest)[:-1])
tries("image changed", get_image=lambda digest: bytes([read(digest)[0] ^ 1]) + read(digest)[1:])
tries("no device", device="cuda:7")
with mx.graphs.region(REGION_BYTES):
    tries("occupied")
with mx.graphs.region(REGION_BYTES, base=OWN_BASE) as other:
    tries("another region", regions=[other])
print("loads follow", flush=True)
out = lambda e: {"out": e, "copy": e}
tries("no weights", prove=lambda g, e: (
    fill(g.tensors()["up.weight"].address, 0, 64), g.prove({"x": vector(8)}, out(e))))
tries("unseen", prove=lambda g, e: g.prove({"x": vector(8)}, out(bytes(len(e)))))
tries("seen", prove=lambda g, e: g.prove({"x": vector(7)}, out(e)))
tries("no input", prove=lambda g, e: g.prove({}, out(e)))
tries("short input", prove=lambda g, e: g.prove({"x": b""}, out(e)))
tries("short output", prove=lambda g, e: g.prove({"x": vector(8)}, out(b"")))
tries("no buffer", prove=lambda g, e: g.prove({"x": 5}, out(e)))
print(json.dumps(mx.graphs.counts()))
"""


def test_a_graph_that_is_not_used_has_a_reason(major: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir()
    folder = packaged(major)
    code = _RESTORES.format(folder=str(folder)) + _REASONS
    lines = runs(major, code, LOG=log, REUSE_ADDRESSES=True)
    before = lines.index("loads follow")
    tried = {
        name: rest for name, *rest in map(json.loads, [*lines[:before], *lines[before + 1 : -1]])
    }
    causes = {name: cause for name, (state, cause, _, _) in tried.items() if state == "refused"}
    assert causes == {
        "no message": "malformed",
        "pin": "pin",
        "no pin": "pin",
        "image lost": "image",
        "image cut": "image",
        "image changed": "image",
        "no device": "other",
        "occupied": "occupied",
        "another region": "occupied",
        "no weights": "golden",
        "unseen": "unseen",
        "seen": "unseen",
        "no input": "other",
        "short input": "other",
        "short output": "unseen",
        "no buffer": "other",
    }
    assert "of the weights pin-1, not another" in tried["pin"][2]
    assert "in use in this process" in tried["occupied"][2]
    assert "the output out" in tried["unseen"][2]
    assert json.loads(lines[-1])["refused: image"] == 3
    # What was refused before the loads loaded nothing: the seven that follow load three images
    # each, and the eager layer of each loads four.
    loads = [name for name, _ in calls(log) if name == "cuModuleLoadData"]
    assert len(loads) == 7 * (3 + 4)
    assert _given_back(calls(log), layers=7)


@pytest.mark.parametrize(
    ("settings", "cause", "fields"),
    [
        ({"COMPUTE_CAPABILITY": 80}, "environment", ["sm"]),
        ({"VERSION": 12040}, "environment", ["cuda_driver"]),
        ({"MEMORY_BYTES": 64 << 20}, "memory", []),
        ({"NO_VMM": True}, "other", []),
    ],
    ids=["another SM", "another driver", "too little memory", "no VMM"],
)
def test_another_machine_is_told_so(
    major: int, tmp_path: Path, settings: dict[str, object], cause: str, fields: list[str]
) -> None:
    log = tmp_path / "log"
    log.mkdir()
    folder = packaged(major)
    code = _RESTORES.format(folder=str(folder)) + 'tries("here")'
    _, state, found, _, differ = json.loads(runs(major, code, LOG=log, **settings)[-1])
    assert (state, found, differ) == ("refused", cause, fields)
    assert "cuModuleLoadData" not in dict(calls(log))


_TAMPERED = """
from mx.wire.v1 import graphs_pb2 as pb

def places(message, path=()):
    for field, value in message.ListFields():
        items = value if field.is_repeated else [value]
        for index, item in enumerate(items):
            at = (*path, (field, index if field.is_repeated else None))
            if field.message_type is None:
                yield at
            else:
                yield from places(item, at)

def spoiled(path):
    changed = pb.CudaGraph.FromString(message)
    inner = changed
    for field, index in path[:-1]:
        inner = getattr(inner, field.name)
        inner = inner if index is None else inner[index]
    field, index = path[-1]
    value = getattr(inner, field.name)
    value = value if index is None else value[index]
    extreme = {
        field.TYPE_STRING: "\\n", field.TYPE_UINT32: 2**32 - 1, field.TYPE_UINT64: 2**64 - 1
    }
    new = value[:-1] if field.type == field.TYPE_BYTES else extreme[field.type]
    if index is None:
        setattr(inner, field.name, new)
    else:
        getattr(inner, field.name)[index] = new
    return changed.SerializeToString()

for path in places(pb.CudaGraph.FromString(message)):
    tries(".".join(field.name for field, _ in path), message=spoiled(path))
"""


def test_a_message_with_any_field_out_of_bounds_loads_nothing(major: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir()
    folder = packaged(major)
    lines = runs(
        major, _RESTORES.format(folder=str(folder)) + _TAMPERED, LOG=log, REUSE_ADDRESSES=True
    )
    tried = [json.loads(line) for line in lines]
    assert {state for _, state, *_ in tried} == {"refused"}
    names = {name for name, *_ in tried}
    for field in (
        *("environment.name", "environment.value", "pin", "regions.base", "regions.nbytes"),
        *("weights.name", "weights.offset", "weights.nbytes", "weights.dtype", "weights.shape"),
        *("inputs.place.name", "inputs.value", "outputs.blake3", "images.blake3", "images.nbytes"),
        *("kernels.name", "kernels.image", "kernels.offsets", "kernels.sizes", "edges.first"),
        *("nodes.kernel.kernel", "nodes.kernel.grid", "nodes.kernel.block"),
        *("nodes.kernel.parameters", "nodes.kernel.shared_bytes"),
        *("nodes.memset.address", "nodes.memset.width", "nodes.memcpy.target", "edges.second"),
    ):
        assert field in names
    assert "cuModuleLoadData" not in dict(calls(log))


_IN_BOUNDS = """
from dataclasses import replace
from mx.graphs.message import encode

g = mx.graphs.decode(message)[0]
at = [n for n, node in enumerate(g.nodes) if getattr(node, "values", b"")]

def node(index, **changes):
    nodes = list(g.nodes)
    nodes[index] = replace(nodes[index], **changes)
    return encode(replace(g, nodes=tuple(nodes)))

def kernel(**changes):
    return encode(replace(g, kernels=(replace(g.kernels[0], **changes), *g.kernels[1:])))

right = lambda graph, e: graph.prove({"x": vector(8)}, {"out": e, "copy": e})
one = g.nodes[at[0]]
other = (int.from_bytes(one.values[:8], "little") + 64).to_bytes(8, "little")
tries("another address", message=node(at[0], values=other + one.values[8:]), prove=right)
tries("another number", message=node(at[0], values=one.values[:24] + bytes(4) + one.values[28:]),
      prove=right)
tries("a name", message=kernel(name="_Zother"))
tries("an output", message=encode(replace(g, outputs=(replace(g.outputs[0], digest=bytes(32)),
      *g.outputs[1:]))), prove=right)
size = g.kernels[0].parameters
tries("more parameters", message=encode(replace(g, kernels=tuple(
    replace(k, parameters=k.parameters[:-1]) for k in g.kernels), nodes=tuple(
    replace(n, values=n.values[:g.kernels[n.kernel].parameters[-2][0] + 8]) if hasattr(n, "values")
    else n for n in g.nodes))))
tries("no edges", message=encode(replace(g, edges=())), prove=right)
"""


def test_a_message_that_says_something_else_is_not_proved(major: int) -> None:
    folder = packaged(major)
    code = _RESTORES.format(folder=str(folder)) + _IN_BOUNDS
    # Nodes that no edge orders run the last one first, as the graph was listed.
    lines = runs(major, code, REUSE_ADDRESSES=True, GRAPH_ORDER="created")
    causes = {name: cause for name, _, cause, *_ in map(json.loads, lines)}
    assert causes == {
        "another address": "golden",
        "another number": "golden",
        "a name": "kernel",
        "an output": "golden",
        "more parameters": "kernel",
        "no edges": "golden",
    }


_FAULTS = """
with mx.graphs.restore(message, read, pin="pin-1") as graph:
    weights = values(1)
    for each, tensor in graph.tensors().items():
        call("cuMemcpyHtoD", tensor.address, weights[each].tobytes(), tensor.nbytes)
    x = {"x": vector(8)}
    wrong = {"out": bytes(4 * N), "copy": bytes(4 * N)}
    graph.prove(x, wrong)
    print(graph.state.value, graph.reason.cause.value, graph.reason.message)
gpu.close()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("cuMemCreate:1:CUDA_ERROR_OUT_OF_MEMORY", "memory"),
        ("cuMemMap:1:CUDA_ERROR_UNKNOWN", "driver"),
        ("cuModuleLoadData:2:CUDA_ERROR_INVALID_IMAGE", "driver"),
        ("cuModuleGetFunction:3:CUDA_ERROR_UNKNOWN", "driver"),
        ("cuGraphAddKernelNode:2:CUDA_ERROR_UNKNOWN", "driver"),
        ("cuGraphAddMemcpyNode:1:CUDA_ERROR_UNKNOWN", "driver"),
        ("cuGraphAddDependencies:1:CUDA_ERROR_UNKNOWN", "driver"),
        ("cuGraphInstantiateWithFlags:1:CUDA_ERROR_OUT_OF_MEMORY", "memory"),
        ("cuGraphLaunch:2:CUDA_ERROR_UNKNOWN", "driver"),
    ],
)
def test_whatever_fails_is_given_back(major: int, tmp_path: Path, fault: str, cause: str) -> None:
    log = tmp_path / "log"
    log.mkdir()
    code = _RESTORES.format(folder=str(packaged(major))) + _FAULTS
    state, found, message = runs(major, code, LOG=log, FAIL=fault)[-1].split(" ", 2)
    assert (state, found) == ("refused", cause) and "failed" in message
    count = Counter(name for name, result in calls(log) if result == "CUDA_SUCCESS")
    assert _given_back(calls(log))
    assert count["cuModuleLoadData"] == count["cuModuleUnload"]
    assert count["cuGraphCreate"] == count["cuGraphDestroy"]
    assert (
        sum(count[name] for name in count if name.startswith("cuGraphInstantiate"))
        == (count["cuGraphExecDestroy"])
    )
