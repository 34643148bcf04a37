"""CUDA graphs from one process to another, over the stand-in driver."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mx.graphs.message import decode
from mx.graphs.package import KernelNode
from tests.support.driver.layer_programs import package_of, runs, written
from tests.support.driver.logs import calls, kept
from tests.support.driver.programs import each_major_at_leisure
from tests.support.libraries import library

pytestmark = [pytest.mark.integration, each_major_at_leisure]


_RESTORE = """
folder = Path({folder!r})
graph = mx.graphs.restore(
    (folder / "graph").read_bytes(), lambda digest: (folder / digest).read_bytes(), pin="pin-1"
)
print(graph.state.value, graph.reason or "")
"""
_PROVE = """
weights = values(1)
for name, tensor in graph.tensors().items():
    call("cuMemcpyHtoD", tensor.address, weights[name].tobytes(), tensor.nbytes)
with mx.graphs.region(REGION_BYTES, base=OWN_BASE) as own:  # the engine's own memory
    eager = Layer(own)
    eager.fill(weights, vector(0))
    expected = eager.eager(vector(8))
proved = graph.prove({"x": vector(8)}, {"out": expected, "copy": expected})
print(proved, graph.state.value, graph.reason or "")
"""
_LAUNCH = """
engine = stream()
for seed in (9, 10, 11):
    call("cuMemcpyHtoD", graph.inputs()["x"].address, vector(seed), 4 * N)
    assert graph.launch(int(engine))
    call("cuStreamSynchronize", engine)
    out = fetch(graph.outputs()["out"].address, 4 * N)
    print(is_right(weights, vector(seed), out))
print(mx.graphs.counts())
graph.close()
print(graph.state.value, graph.launch(int(engine)), graph.tensors())
"""


def test_a_graph_computes_in_another_process(major: int, tmp_path: Path) -> None:
    package = package_of(major, tmp_path)
    graph = decode(package.graph)[0]
    launches = [node for node in graph.nodes if isinstance(node, KernelNode)]
    assert len(graph.nodes) == 7 and len(launches) == 5
    assert [kernel.call for kernel in graph.kernels] == [None] * 3
    assert sorted(package.images) == sorted(image.digest.hex() for image in graph.images)
    assert package.pin == "pin-1" and package.environment["sm"] == "sm_90"
    code = _RESTORE.format(folder=str(written(package, tmp_path))) + _PROVE + _LAUNCH
    lines = runs(major, code)
    assert lines[:2] == ["restored ", "True proved "]
    assert lines[2:5] == ["True"] * 3
    assert lines[5] == "{'restored': 1, 'proved': 1, 'launched': 1}"
    assert lines[6] == "closed False {}"


@pytest.mark.long
def test_a_region_is_free_again_after_its_graph(major: int, tmp_path: Path) -> None:
    """A process restores a graph as often as it likes. Where freed addresses stay taken, as the
    stand-in has it otherwise, the second one is refused by name."""
    restore = _RESTORE.format(folder=str(written(package_of(major, tmp_path), tmp_path)))
    twice = restore + "graph.close()\n" + restore
    free = runs(major, twice, REUSE_ADDRESSES=True)
    assert free == ["restored "] * 2
    first, second = runs(major, twice)
    assert first == "restored " and second.startswith("refused occupied: ")


#: `add` is a library's: a call launches it, and its image is not given.
_LIBRARY = """
from mx.graphs import EagerCall
library = Kernels()
at = alloc(4096)
loads = lambda s: library.launch(s, "add", at, at, at, 1.0, 8)
calls = [EagerCall("add 8", Path({library!r}), loads)]
"""


@pytest.mark.long
def test_kernels_of_libraries_stay_at_home(major: int, tmp_path: Path) -> None:
    """The graph names the call that loads a kernel, and its target makes that call."""
    one, other = library(tmp_path / "libone.so", "0xabcd"), library(tmp_path / "other.so", "0xef")
    before = _LIBRARY.format(library=str(one))
    package = package_of(
        major,
        tmp_path,
        before=before.replace("\n", "\n    ")
        + "\n    kernels.functions['add'] = library.functions['add']",
        images="kernels.given('norm', 'matvec')",
        calls="calls",
    )
    graph = decode(package.graph)[0]
    assert len(package.images) == 2 and [call.name for call in graph.calls] == ["add 8"]
    assert {kernel.name: kernel.call for kernel in graph.kernels} == {
        "add": 0,
        "matvec": None,
        "norm": None,
    }
    restored = _RESTORE.format(folder=str(written(package, tmp_path)))
    restored = restored.replace('pin="pin-1"', 'pin="pin-1", calls=calls')
    code = before + restored + _PROVE + _LAUNCH
    lines = runs(major, code)
    assert lines[:2] == ["restored ", "True proved "] and lines[2:5] == ["True"] * 3
    launch = '"add", at, at, at, 1.0, 8'
    twice = f"loads = lambda s: more.launch(s, {launch}) or "
    two = before.replace("loads = lambda s: ", "more = Kernels()\n" + twice)
    wrong = {
        _LIBRARY.format(library=str(other)): "environment: libone.so build_id",
        "calls = []": "environment: call add 8: 'libone.so' there, '' here",
        before.replace(launch, '"norm", at, at, at, 8'): "kernel: add: .* does not load it",
        two: "kernel: add: the call add 8 loads two kernels of that name",
        before.replace("library.launch", "library.lunch"): "other: AttributeError",
    }
    for setting, says in wrong.items():
        (line,) = runs(major, setting + restored)
        assert re.match(f"refused {says}", line)


_PULLED = """
from benchmarks.processes import Cluster
import mx
cluster = Cluster()
try:
    cluster.serve({checkpoint!r}, "m", "--device", "cpu")
    {restore}
    with mx.pull("m", coordinator=cluster.coordinator, into=graph.tensors()) as pull:
        print([sorted(layer.tensors()) != [] for layer in pull.layers()] != [])
finally:
    cluster.close()
"""


def test_weights_are_pulled_into_the_graphs_memory(major: int, tmp_path: Path) -> None:
    package = package_of(major, tmp_path)
    random = np.random.default_rng(1)
    shapes = {"norm.weight": (96,), "gate.weight": (96, 96), "up.weight": (96, 96)}
    tensors = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    checkpoint = tmp_path / "model.safetensors"
    save_file(tensors, checkpoint)
    restore = _RESTORE.format(folder=str(written(package, tmp_path))).replace("\n", "\n    ")
    pulled = _PULLED.format(checkpoint=str(checkpoint), restore=restore)
    prove = _PROVE.replace("for name, tensor in graph.tensors().items():", "for _ in ():")
    lines = runs(major, pulled + prove + _LAUNCH)
    assert lines[:3] == ["restored ", "True", "True proved "] and lines[3:6] == ["True"] * 3


def test_a_kernel_may_be_launched_by_the_handle_of_its_library(major: int, tmp_path: Path) -> None:
    """As the runtime does: such a node has a CUkernel, and no CUfunction."""
    package = package_of(
        major,
        tmp_path,
        before="""
    library = call("cuLibraryLoadData", kernels.images["add"], [], [], 0, [], [], 0)
    kernel = call("cuLibraryGetKernel", library, b"add")
    given = kernels.given() | {int(call("cuKernelGetFunction", kernel)): kernels.images["add"]}
    kernels.functions["add"] = calling.driver.CUfunction(int(kernel))
    """,
        images="given",
    )
    graph = decode(package.graph)[0]
    assert sorted(kernel.name for kernel in graph.kernels) == ["add", "matvec", "norm"]
    assert len(package.images) == 3 and graph.calls == ()


def test_views_of_a_region_are_tensors_of_every_dtype(major: int) -> None:
    """Other libraries and `mx.pull` take them: by the CUDA array interface, or by DLPack."""
    code = """
from mx.core.types import DTYPE_BITS
from mx.memory.arrays import array_of
with mx.graphs.region(REGION_BYTES) as region:
    known = []
    for dtype, bits in DTYPE_BITS.items():
        tensor = region.tensor(GraphPlace("w", 0, 512, 12 * bits // 8, dtype, (3, 4)))
        try:
            found = array_of("w", tensor)
        except Exception as error:
            assert f"DLPack has no {dtype}" in str(error)
        else:
            assert (found.dtype, found.shape, found.order) == (dtype, (3, 4), ())
            assert (found.address, found.device) == (region.base + 512, region.device.key)
            known.append(dtype)
    print(*known)
"""
    found = set(runs(major, code)[0].split())
    assert found >= {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "U8", "BOOL"}


def test_a_region_gives_away_the_same_places(major: int, tmp_path: Path) -> None:
    code = """
from mx.cuda.vmm import OccupiedError
from mx.errors import CapacityError, ConfigError
for given in (dict(decoys=True), dict(base=OWN_BASE)):
    with mx.graphs.region(REGION_BYTES, **given) as region:
        print([region.allocate(n) - region.base for n in (1, 512, 513, 1)])
        assert not any(region.read(GraphPlace("w", 0, 0, 4096, "U8", (4096,))))  # zeros at first
        with mx.graphs.region(64 << 20, base=region.base + (1 << 40)) as large:
            for base in (region.base, large.base, large.base + (32 << 20)):
                try:
                    with mx.graphs.region(4096, base=base):
                        raise AssertionError
                except OccupiedError as error:
                    assert "in use in this process" in str(error)
        try:
            region.allocate(REGION_BYTES)
        except CapacityError as error:
            print(error.message)
misplaced = dict(nbytes=1, base=0x6000_0020_0000)
for wrong in (dict(nbytes=0), misplaced, dict(nbytes=1, base=-1), dict(nbytes=-1)):
    try:
        with mx.graphs.region(**wrong):
            raise AssertionError
    except ConfigError as error:
        assert "is not possible" in str(error)
"""
    one, full, other, again = runs(major, code, LOG=tmp_path)
    made = dict.fromkeys(name for name, _ in calls(tmp_path))
    assert {"cuMemAlloc", "cuMemHostAlloc"} <= set(made)  # the decoys, which are given back
    assert [each for each in kept(calls(tmp_path)) if each.startswith("cuMemFree")] == []
    assert one == other == "[0, 512, 1024, 2048]"
    assert full == again and full.startswith("the region has 4.19 MB left of 4.19 MB")


@pytest.mark.slow
def test_the_example_runs(major: int) -> None:
    example = Path(__file__).parents[2] / "examples" / "graphs.py"
    command = [sys.executable, str(example), "--stand-in", str(major)]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert "proved: True" in said and said.count("as without a graph: True") == 3
