"""CUDA graphs from one process to another, over the stand-in driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from mx.graphs.message import decode
from mx.graphs.package import KernelNode
from tests.support.driver.graph_programs import package_of, runs, written
from tests.support.driver.programs import each_major

pytestmark = [pytest.mark.integration, each_major]


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
with mx.graphs.region(REGION_BYTES, shifted=True) as own:  # the engine's own memory
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
    graph = decode(package.graph)
    launches = [node for node in graph.nodes if isinstance(node, KernelNode)]
    assert len(graph.nodes) == 7 and len(launches) == 5
    assert all(len(node.pointers) == 3 for node in launches)
    assert [kernel.call for kernel in graph.kernels] == [None] * 3
    assert sorted(package.images) == sorted(image.digest.hex() for image in graph.images)
    assert package.pin == "pin-1" and package.environment["sm"] == "9.0"
    code = _RESTORE.format(folder=str(written(package, tmp_path))) + _PROVE + _LAUNCH
    lines = runs(major, code)
    assert lines[:2] == ["restored ", "True proved "]
    assert lines[2:5] == ["True"] * 3
    assert lines[5] == "{'restored': 1, 'proved': 1, 'launched': 1}"
    assert lines[6] == "closed False {}"
