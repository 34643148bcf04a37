"""CUDA graphs from one process to another: of mx's own kernel, and of a decode step of torch's."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mx.graphs
from mx.cuda.device import CudaStream, Device, DeviceMemory
from mx.cuda.graphs import GraphCalls
from mx.cuda.ring import PinnedRing
from mx.graphs.message import Capture
from tests.gpu.graph_programs import (
    REGION_BYTES,
    Digest,
    Placed,
    capture_digest,
    capture_llama,
    chunks,
    restore_llama,
)

ROOT = Path(__file__).parents[2]


def run(program: Any, *arguments: object) -> dict[str, Any]:
    """Run a program in a process of its own, and return the object that it prints, if any."""
    boot = "import json, sys; sys.path[:] = json.loads(sys.argv.pop())\n"
    boot += "import tests.gpu.graph_programs as programs\n"
    boot += "getattr(programs, sys.argv[1])(*sys.argv[2:])"
    command = [sys.executable, "-c", boot, program.__name__, *map(str, arguments)]
    ended = subprocess.run(
        [*command, json.dumps(sys.path)], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    lines = ended.stdout.splitlines()
    return json.loads(lines[-1]) if lines else {}


def packaged(program: Any, folder: Path) -> Path:
    """Capture in two processes, and write the package: "graph", and images by their hashes."""
    for shifted in (0, 1):
        print(run(program, folder / f"capture-{shifted}", shifted))
    captures = (Capture.from_bytes((folder / f"capture-{n}").read_bytes()) for n in (0, 1))
    package = mx.graphs.combine(*captures)
    (folder / "graph").write_bytes(package.graph)
    for digest, image in package.images.items():
        (folder / digest).write_bytes(image)
    return folder


def test_a_graph_of_another_process_computes_the_same(gpu: Device, tmp_path: Path) -> None:
    folder = packaged(capture_digest, tmp_path)

    def image(digest: str) -> bytes:
        return (folder / digest).read_bytes()

    with mx.graphs.restore((folder / "graph").read_bytes(), image, pin="pin") as graph:
        assert graph.state is mx.graphs.State.RESTORED, graph.reason
        with (
            mx.graphs.region(REGION_BYTES, shifted=True) as own,
            gpu.current(),
            CudaStream(gpu) as stream,
            Placed(Digest(gpu, own.allocate), own) as eager,
        ):

            def computed(given: dict[str, bytes]) -> bytes:
                for name, value in given.items():
                    eager.write(name, value)
                eager.digest.run(stream.handle)
                stream.synchronize()
                return eager.read("copy")

            assert graph.prove(chunks(2), {"copy": computed(chunks(2))}), graph.reason
            ring = PinnedRing(gpu)
            for seed in (3, 4):
                for name, value in chunks(seed).items():
                    ring.upload(graph.inputs()[name].address, memoryview(value))
                assert graph.launch(stream.handle)
                stream.synchronize()
                found = bytearray(32)
                ring.download(graph.outputs()["copy"].address, memoryview(found))
                assert found == computed(chunks(seed))
            ring.close()


def test_edges_are_those_of_the_driver(gpu: Device) -> None:
    """The bindings' own data of edges is in freed memory, so that the first ones have any ports."""
    calls = GraphCalls()
    with gpu.current(), CudaStream(gpu) as stream, DeviceMemory(gpu, 64 * 64) as memory:
        for _ in range(20):
            calls.capture_begin(stream.handle)
            for at in range(0, memory.nbytes, 64):
                gpu.driver.memset(memory.address + at, 0, 64, stream.handle)
            graph = calls.capture_end(stream.handle)
            nodes = set(map(int, calls.nodes(graph)))
            edges = list(calls.edges(graph))
            assert len(edges) == 63 and {node for edge in edges for node in edge[:2]} == nodes
            assert {edge[2:] for edge in edges} == {(0, 0, 0)}
            calls.graph_destroy(graph)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="there is no torch")
def test_a_decode_step_of_torch_is_restored_bit_for_bit(gpu: Device, tmp_path: Path) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("torch is built for CPUs")
    folder = packaged(capture_llama, tmp_path)
    (folder / "capture-0.weights").rename(folder / "weights")
    found = run(restore_llama, folder)
    print(found)  # restored_s: 20 ms a graph, reaching for 5
    assert found["state"] == "launched", found["reason"]
    assert found["same"] == [True] * 3
