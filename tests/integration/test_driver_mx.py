"""`mx serve` and `mx pull` over the stand-in driver: bytes, paths, and the log of calls."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.driver.logs import calls, kept
from tests.support.driver.programs import each_major, passes

pytestmark = each_major

#: Serves a folder from GPU 0, pulls it to each of three targets, and prints each report in a line.
_PULLS = """
import subprocess
from benchmarks.processes import Cluster
cluster = Cluster()
try:
    cluster.serve({checkpoint!r}, "m", "--device", "cuda:0")
    for target in ("cuda:0", "cpu", "cuda:1"):
        command = ["-m", "mx", "pull", "m", "--device", target, "--out", {out!r} + target, "--json"]
        command += ["--coordinator", cluster.coordinator]
        ended = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True)
        assert ended.returncode == 0, target
        print(ended.stdout.replace(chr(10), " "))
finally:
    cluster.close()
"""


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="plain"),
        pytest.param(
            {"NO_VMM": True, "SMALL_IN_BLOCKS": True}, marks=pytest.mark.long, id="legacy"
        ),
        pytest.param({"ONE_QUEUE": True, "LATE_US": 2000}, marks=pytest.mark.long, id="late"),
    ],
)
def test_serve_and_pull(major: int, tmp_path: Path, settings: dict[str, object]) -> None:
    checkpoint, log = tmp_path / "checkpoint", tmp_path / "log"
    checkpoint.mkdir()
    log.mkdir()
    random = np.random.default_rng(1)
    tensors = {
        f"model.layers.{n}.weight": random.standard_normal((1001, 700), dtype=np.float32)
        for n in range(4)
    }
    save_file(tensors, checkpoint / "model.safetensors")
    code = _PULLS.format(checkpoint=str(checkpoint), out=str(tmp_path / "out-"))
    lines = passes(major, code, LOG=log, KERNELS=True, **settings)
    to_itself, to_host, _ = (json.loads(line)["paths"] for line in lines)
    assert [path["transport"] for path in to_itself] == ["cuda_ipc-attach"]
    assert [path["transport"] for path in to_host] == ["pcie_p2p"]
    for target in ("cuda:0", "cpu", "cuda:1"):
        written = tmp_path / f"out-{target}" / "model.safetensors"
        assert written.read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    found = calls(log)
    assert {result for _, result in found} <= {"CUDA_SUCCESS", "CUDA_ERROR_NOT_READY"}
    assert kept(found) == []
    count = Counter(name for name, _ in found)
    assert count["cuLaunchKernel"]  # what came to GPU 1 was hashed there
    assert count["cuIpcOpenMemHandle" if settings.get("NO_VMM") else "cuMemCreate"]
