"""CUDA graphs from one process to another: of mx's own kernel, and of a decode step of torch's."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import mx.graphs
from benchmarks.processes import Cluster
from mx import config
from mx.artifacts import carry, publish
from mx.artifacts.recording import record
from mx.artifacts.trust import make_key
from mx.cuda.device import CudaStream, Device, DeviceMemory
from mx.cuda.ring import PinnedRing
from mx.graphs.calls import GraphCalls
from mx.graphs.message import Capture
from tests.gpu.graph_programs import (
    DECODER,
    FOLDER,
    OWN_BASE,
    REGION_BYTES,
    SIZES,
    Digest,
    Placed,
    capture_decoder,
    capture_digest,
    capture_llama,
    chunks,
    llama_trial,
    record_decoder,
    restore_llama,
    save_decoder,
    use_decoder,
)

ROOT = Path(__file__).parents[2]


def command(program: Any, *arguments: object) -> list[str]:
    """Return the command that runs a program in a process of its own."""
    boot = "import json, sys; sys.path[:] = json.loads(sys.argv.pop())\n"
    boot += "import tests.gpu.graph_programs as programs\n"
    boot += "getattr(programs, sys.argv[1])(*sys.argv[2:])"
    given = [program.__name__, *map(str, arguments), json.dumps(sys.path)]
    return [sys.executable, "-c", boot, *given]


def run(program: Any, *arguments: object) -> dict[str, Any]:
    """Run a program in a process of its own, and return the object that it prints, if any."""
    ended = subprocess.run(
        command(program, *arguments), cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    lines = ended.stdout.splitlines()
    return json.loads(lines[-1]) if lines else {}


def packaged(
    program: Any,
    folder: Path,
    names: Iterable[str],
    trial: Callable[[Path], mx.graphs.Trial] | None = None,
) -> Path:
    """Capture in two processes, and write the package: "graph", and images by their hashes."""
    for decoys in (0, 1):
        print(run(program, folder / f"capture-{decoys}", decoys))
    packages = []
    for name in names:
        files = [folder / f"capture-{decoys}.{name}" for decoys in (0, 1)]
        captures = (Capture.from_bytes(file.read_bytes()) for file in files)
        packages.append(mx.graphs.combine(*captures, trial=trial(folder) if trial else None))
    package = mx.graphs.join(packages)
    (folder / "graph").write_bytes(package.graph)
    for digest, image in package.images.items():
        (folder / digest).write_bytes(image)
    return folder


def test_a_graph_of_another_process_computes_the_same(gpu: Device, tmp_path: Path) -> None:
    """In two sizes, of which one is set in the raw graph of the other."""
    folder = packaged(capture_digest, tmp_path, SIZES)

    def image(digest: str) -> bytes:
        return (folder / digest).read_bytes()

    with mx.graphs.restore_all((folder / "graph").read_bytes(), image, pin="pin") as graphs:
        reasons = [graph.reason for graph in graphs.values()]
        assert list(graphs) == list(SIZES) and reasons == [None] * 2
        with (
            mx.graphs.region(REGION_BYTES, base=OWN_BASE) as own,
            gpu.current(),
            CudaStream(gpu) as stream,
            Placed(Digest(gpu, own.allocate), own) as eager,
        ):

            def computed(given: dict[str, bytes], size: str) -> bytes:
                for name, value in given.items():
                    eager.write(name, value)
                eager.digest.run(stream.handle, size)
                stream.synchronize()
                return eager.read("copy", size)

            for size, graph in graphs.items():
                expected = {"copy": computed(chunks(2), size)}
                assert graph.prove(chunks(2), expected), graph.reason
            ring = PinnedRing(gpu)
            for seed, size in product((3, 4), SIZES):
                graph = graphs[size]
                for name, value in chunks(seed).items():
                    ring.upload(graph.inputs()[name].address, memoryview(value))
                assert graph.launch(stream.handle)
                stream.synchronize()
                found = bytearray(graph.outputs()["copy"].nbytes)
                ring.download(graph.outputs()["copy"].address, memoryview(found))
                assert found == computed(chunks(seed), size)
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
    folder = packaged(capture_llama, tmp_path, ["step"], llama_trial)
    (folder / "capture-0.weights").rename(folder / "weights")
    found = run(restore_llama, folder)
    print(found)  # restored_s: 20 ms a graph, reaching for 5
    assert found["state"] == "launched", found["reason"]
    assert found["same"] == [True] * 3


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torch", "transformers"))),
    reason="there is no torch, or no transformers",
)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_model_of_transformers_decodes_by_a_graph_that_travelled(
    gpu: Device, tmp_path: Path, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured twice, signed and served; found, restored, proved and launched by `load`."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("torch is built for CPUs")
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run(save_decoder)
    cluster = Cluster()
    try:
        cluster.serve(tmp_path / "decoder", DECODER)
        for decoys in (0, 1):
            run(capture_decoder, decoys, cluster.coordinator, attention)
        assert record(tmp_path / "recorded", command(record_decoder, attention)) == 0
        key, trust = make_key(tmp_path / "key"), tmp_path / "trust.toml"
        trust.write_text(f"[[signer]]\nname = 'me'\nkey = '{key}'\nmodels = ['*']\n")
        trust.chmod(0o600)
        made = tmp_path / "graphs.safetensors"
        publish(tmp_path / "recorded", model=DECODER, key=tmp_path / "key", out=made, graphs=True)
        with carry.serve(made, settings=config.load({"coordinator": cluster.coordinator})):
            found = run(use_decoder, cluster.coordinator, trust, attention)
    finally:
        cluster.close()
    print(found)
    assert found["reason"] == ""
    assert found["same"] == [True] * 6
    assert found["counts"] == {"restored": 1, "proved": 1, "launched": 1}
