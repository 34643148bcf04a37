"""A GPU is filled by several of its links at once, from sources on the GPUs at their other ends:
over a stand-in whose GPUs are joined in no uniform way."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mx.units import MIB
from tests.support.driver.build import MAJORS, why_not
from tests.support.driver.programs import passes

MAJOR = MAJORS[-1]
_LONG = pytest.mark.long
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_not(MAJOR)), reason=why_not(MAJOR)),
]

#: Serves a model from GPUs 1 and 2, and pulls it to GPU 0: no copy begins before the pull has a
#: connection to each source that its plan has chosen. Prints plan, report and topology.
_PULL = """
import json, subprocess
import numpy as np
from safetensors.numpy import load_file
import mx
from benchmarks.processes import Cluster
from mx.core import striping
from mx.fetching.transfer import Transfer
from mx.memory.device import HostReader
from mx_transports.toolkit.cuda.session import GpuSession

folder, both = {folder!r}, threading.Event()
striping.LATE_S = 1e9  # the first connection waits for the others here

def gated(self, *arguments, start=GpuSession._start_step):
    assert both.wait(200)
    return start(self, *arguments)
GpuSession._start_step = gated

def counted(self, connection, add=Transfer.add_connection):
    number = add(self, connection)
    if number + 1 == chosen:
        both.set()
    return number
Transfer.add_connection = counted

def right(pull):
    layout, memory, reader = pull.manifest.layout, pull.memory(), HostReader()
    wanted = load_file(folder + "/m/model.safetensors")
    for tensor in layout.tensors:
        at = layout.layers[tensor.layer].arena_offset + tensor.offset
        found = np.frombuffer(reader.whole(memory[at : at + tensor.nbytes]), np.uint8)
        assert (found == wanted[tensor.name]).all(), tensor.name
    reader.close()

cluster = Cluster()
def said(*command):
    command = [sys.executable, "-m", "mx", *command, "--coordinator", cluster.coordinator, "--json"]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
try:
    ends = {{
        cluster.serve(folder + "/m", "m", "--device", f"cuda:{{gpu}}")[1]["endpoint"]: gpu
        for gpu in (1, 2)
    }}
    plan = said("plan", "m", "--device", "cuda:0")["paths"]
    chosen = sum(path["use"] == "chosen" for path in plan)
    with mx.pull("m", coordinator=cluster.coordinator, device="cuda:0") as pull:
        report = pull.wait(200)
        right(pull)
    print(json.dumps([
        [(ends[path["source"]], path["transport"], path["use"], path["bytes"]) for path in plan],
        [(ends[path.source], path.transport, path.bytes) for path in report.paths],
        report.retries,
        said("topo", "--sources"),
    ]))
finally:
    cluster.close()
"""


@pytest.mark.parametrize(
    ("nvlink", "peers", "links"),
    [
        ("0-1,0-2", "all", {1: "cuda_ipc", 2: "cuda_ipc"}),
        ("0-1", "all", {1: "cuda_ipc", 2: "pcie_p2p"}),
        pytest.param("0-1", "0-1", {1: "cuda_ipc"}, marks=_LONG),  # else a context on GPU 2
        pytest.param("switch", "all", {1: "cuda_ipc"}, marks=_LONG),  # or 2: they share lanes
    ],
)
def test_bytes_come_by_each_link_of_the_target(
    nvlink: str, peers: str, links: dict[int, str], tmp_path: Path
) -> None:
    (tmp_path / "m").mkdir()
    weights = np.random.default_rng(1).integers(0, 256, (8, 8 * MIB), dtype=np.uint8)
    tensors = {f"model.layers.{n}.weight": each for n, each in enumerate(weights)}
    save_file(tensors, tmp_path / "m/model.safetensors")
    settings = {"DEVICES": 3, "NVLINK": nvlink, "PEERS": peers, "KERNELS": True}
    (line,) = passes(MAJOR, _PULL.format(folder=str(tmp_path)), **settings)
    plan, brought, retries, topology = json.loads(line)
    used = {gpu: transport for gpu, transport, use, _ in plan if use == "chosen"}
    if nvlink == "switch":
        assert list(used.values()) == ["cuda_ipc"]
        links = used
    assert used == links
    assert sum(nbytes for *_, use, nbytes in plan if use == "chosen") == weights.nbytes
    assert {gpu: transport for gpu, transport, _ in brought} == links
    assert sum(nbytes for *_, nbytes in brought) == weights.nbytes
    assert all(nbytes > 0 for *_, nbytes in brought) and not retries
    found = {
        (path["transport"], path["chosen"])
        for source in topology["sources"]
        for path in source["paths"]
        if path["target"].endswith("00")
    }
    assert {("cuda_ipc", True)} <= found
